"""Mistakes that hide the weights: each is undone in the call, and named if attention is then found behind it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from regard.diagnosis.calling import Caller, InputSizes, declared_heads
from regard.diagnosis.report import CheckFinding
from regard.diagnosis.scores import PRECISION, normalized_axis, product_of
from regard.diagnosis.weights import TOLERANCE, Measurement, close, measured

#: Inputs that a residual connection may add, and their names in sentences.
RESIDUALS = {"query": "query", "key": "keys", "value": "values"}


@dataclass(frozen=True)
class Variant:
    """A call in which a mistake is undone, and the finding that names the mistake."""

    caller: Caller
    finding: CheckFinding


def variants_of(caller: Caller) -> Iterator[Variant]:
    """Calls in which a mistake is undone, and the weights can be measured, which they cannot in the function itself."""
    if len(caller.roles.inputs) == 3:
        yield from _fitting(_with_swapped_values(caller))
    for variant in _with_views(caller):
        yield from _fitting(variant)
    for part in RESIDUALS:
        yield from _fitting(_with_residual(caller, part), is_product=False)


def variant_of_measured(caller: Caller, measurable: Caller, measurement: Measurement) -> Variant | None:
    """The variant of a function whose weights can be measured, but are not those that its author means; else None.

    `measurable` is the function, or a copy with identities for its matrices, that gave the `measurement`.
    """
    if _adds_a_term(measurable, measurement):
        for part in RESIDUALS:
            variant = next(_fitting(_with_residual(caller, part), is_product=False), None)
            if variant is not None:
                return variant
    if product_of(measurement) is not None:
        return None
    for name in ("1/sqrt({width})", "sqrt({width})"):
        variant = _with_scaled_weights(caller, measurement, name)
        if variant is not None:
            return variant
    inner = _inner_softmax(measurement.weights)
    if inner.min() > -TOLERANCE and product_of(replace(measurement, weights=inner)) is not None:
        text = "The logarithms of the weights are a softmax themselves, so weights are almost uniform."
        remedy = "Apply it once: scores.softmax(-1) @ v. A loss or layer that takes logits has a softmax of its own."
        finding = CheckFinding("softmax axis", "wrong", text, remedy, "the softmax is applied twice")
        return Variant(replace(caller, undone=replace(caller.undone, weights=_inner_softmax)), finding)
    return None


def _fitting(variant: Variant, is_product: bool = True) -> Iterator[Variant]:
    """The variant, if its weights are a softmax over the keys, and with `is_product` that of q . k."""
    found = measured(variant.caller)
    if found is None:
        return
    measurable, measurement = found
    if normalized_axis(measurement.weights) != 3 or measurement.weights.min() < -TOLERANCE:
        return
    product = product_of(measurement) if is_product else None
    if is_product and (product is None or product.kind != "dot"):
        return
    if not _adds_a_term(measurable, measurement):
        yield variant


def _with_swapped_values(caller: Caller) -> Variant:
    """The variant in which the second input is the values, and the third the keys."""
    query, key, value = caller.roles.inputs
    roles = replace(caller.roles, inputs=(query, value, key))
    text = f"The scores compare {query} with {value}, and the weights multiply {key}."
    remedy = "Compute the scores from q and k, and multiply the weights by v. Look at the order of the arguments."
    finding = CheckFinding("query and key", "wrong", text, remedy, "keys and values are swapped")
    return Variant(replace(caller, roles=roles), finding)


def _with_views(caller: Caller) -> Iterator[Variant]:
    """The mistakes of a function that splits or joins heads by .view, for each number of heads that fits."""
    if caller.query_axes not in ("bnd", "bnhd") or caller.key_axes != caller.query_axes:
        return
    texts = {True: "split", False: "joined"}
    for sizes in _sizes_by_heads(caller):
        for split, join in ((True, True), (True, False), (False, True)):
            text = f"With {sizes.heads} heads, numbers of different tokens are mixed in one head."
            remedy = "Split by x.view(B, n, H, D).transpose(1, 2), and join by y.transpose(1, 2).reshape(B, n, H * D)."
            name = f"the heads are {texts[split]} by .view without .transpose"
            finding = CheckFinding("heads", "wrong", text, remedy, name)
            yield Variant(replace(caller, sizes=sizes, undone=replace(caller.undone, split=split, join=join)), finding)


def _sizes_by_heads(caller: Caller) -> Iterator[InputSizes]:
    """The sizes of calls with the width divided into heads; those of the caller if heads have an axis.

    Where values cannot be chosen, there are fewer keys than channels of a head, so that weights can be solved for.
    """
    s = caller.sizes
    if "h" in caller.query_axes:
        yield s
        return
    for heads in dict.fromkeys([*declared_heads(caller.function), 2, 4, 8]):
        width = s.width // heads
        if heads > 1 and s.width % heads == 0 and width > 1:
            fits = len(caller.roles.inputs) == 3 or width > s.keys  # else weights cannot be solved for
            length = s.keys if fits else width - 1
            yield replace(s, heads=heads, width=width, queries=min(s.queries, length), keys=length)


def _with_residual(caller: Caller, part: str) -> Variant:
    """The variant in which an input, "query", "key" or "value", is subtracted from the output.

    In a module it is a question, not a mistake: layers have residual connections.
    """
    name = RESIDUALS[part]
    verb = "is" if part == "query" else "are"
    text = f"The output is the attention plus the {name}. The other findings are those of the attention alone."
    if isinstance(caller.function, nn.Module):
        remedy = "Right in a layer of a Transformer. In an attention leave it to the layer."
        finding = CheckFinding(
            "residual", "unknown", f"{text} It is a residual connection; norms, if any, are left out.", remedy
        )
    else:
        mistake = f"the {name} {verb} added to the output (a residual connection)"
        remedy = "Return weights @ v alone, and add the input where the attention is called: x + attention(x)."
        finding = CheckFinding("residual", "wrong", text, remedy, mistake)
    return Variant(replace(caller, undone=replace(caller.undone, residual=part)), finding)


def _with_scaled_weights(caller: Caller, measurement: Measurement, factor_name: str) -> Variant | None:
    """The variant if all rows sum to a factor, and are a softmax of q . k otherwise; else None.

    `factor_name` is the formula of the factor for a `width`.
    """
    width = measurement.query.shape[-1]
    factor = math.sqrt(width) if factor_name == "sqrt({width})" else 1 / math.sqrt(width)
    sums = measurement.weights.nansum(-1)
    is_constant = close(sums, torch.full_like(sums, factor), PRECISION * factor)
    product = product_of(replace(measurement, weights=measurement.weights / factor)) if is_constant else None
    if product is None or product.kind != "dot":
        return None
    text = f"The weights of each query sum to {factor:.4g} = {factor_name.format(width=width)}, not to 1."
    remedy = "Scale the scores, not the weights: (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v."
    finding = CheckFinding("scale", "wrong", text, remedy, "the scale is applied after the softmax")

    def unscaled(weights: Tensor) -> Tensor:
        return weights / factor

    return Variant(replace(caller, undone=replace(caller.undone, weights=unscaled)), finding)


def _adds_a_term(measurable: Caller, measurement: Measurement) -> bool:
    """Whether the output is not weights times values alone: values of 0 do not give zeros, or rows sum to 2.

    Rows sum to 2 if the values themselves are added: each query has the weight 1 on its own token besides.
    """
    sums = measurement.weights.sum(-1)
    return _output_for_no_values(measurable) > TOLERANCE or close(sums, torch.full_like(sums, 2.0), 1e-3)


@torch.no_grad()
def _output_for_no_values(caller: Caller) -> float:
    """The largest number of the output for values of zero; 0 if values cannot be chosen."""
    if len(caller.roles.inputs) < 3:
        return 0.0
    query, key, value = caller.sizes.sample(0, caller.dtype)
    return float(caller(query, key, torch.zeros_like(value)).output.nan_to_num().abs().max())


def term_finding(measurable: Caller) -> CheckFinding | None:
    """A term of the output that does not come from the values, and is no input; None if there is none."""
    size = _output_for_no_values(measurable)
    if size <= TOLERANCE:
        return None
    text = f"For values of zero the output is not zero, but up to {size:.2g}: another term is added."
    remedy = "Right for positions or biases in the values. Else return weights @ v alone."
    return CheckFinding("residual", "unknown", text, remedy)


def _inner_softmax(weights: Tensor) -> Tensor:
    """p where weights = softmax(p) and each row of p sums to 1.

    The logarithms of the weights are p plus a number for each row, which this sum determines.
    """
    logs = weights.clamp(min=1e-30).log()
    return logs - (logs.sum(-1, keepdim=True) - 1) / logs.shape[-1]
