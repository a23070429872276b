"""Findings about changes that must not change an output: of other sequences, the order, hidden tokens, dropout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.diagnosis.calling import Caller, Inputs, NoOutput
from regard.diagnosis.masks import Response
from regard.diagnosis.report import CheckFinding
from regard.diagnosis.weights import close


@torch.no_grad()
def batch_finding(caller: Caller) -> CheckFinding | None:
    """Whether each sequence of a batch has the output of a run alone, whatever the others hold.

    With a batch of one sequence: `_lost_batch_finding`, which may be None.
    """
    if caller.sizes.batch == 1:
        return _lost_batch_finding(caller)
    query, key, value = inputs = caller.sizes.sample(1, caller.dtype)
    together = caller(*inputs).output
    remedy = "Keep the batch axis: no sum, norm, softmax, roll or reshape over axis 0; transpose axes before .view."
    mistake = "sequences of a batch mix"
    if size := _size_of_mixing(caller, inputs, 0):
        text = f"A change of the other sequences changes the output of a sequence by {size:.2g}."
        return CheckFinding("batch", "wrong", text, remedy, mistake)
    try:
        each = zip(query.split(1), key.split(1), value.split(1), strict=True)
        alone = torch.cat([caller(q, k, v).output for q, k, v in each])
    except NoOutput as error:
        text = f"The batch changes the shape of an output: for one sequence {error}."
        return CheckFinding(
            "batch", "wrong", text, "No .squeeze() without its axis, and no other axis than the batch.", mistake
        )
    except Exception as error:  # of the user's function
        text = f"A batch of one sequence does not run: {type(error).__name__}: {error}"
        return CheckFinding("batch", "unknown", text, "Read the batch from q.shape[0]; no .squeeze() without its axis.")
    if together.shape != alone.shape:
        text = "The batch changes the shape of an output: some product or sum takes the batch for another axis."
        return CheckFinding("batch", "wrong", text, remedy, mistake)
    if size := _difference(together, alone):
        text = f"A sequence alone has another output than in a batch, by {size:.2g}."
        return CheckFinding("batch", "wrong", text, remedy, mistake)
    return CheckFinding("batch", "right", "Each sequence has the output of a run alone, whatever the others hold.")


def _lost_batch_finding(caller: Caller) -> CheckFinding | None:
    """The mistake of a function without a batch that accepts one, and returns fewer sequences than it got.

    None if it does not make this mistake.
    """
    if "b" in caller.query_axes or "n" not in caller.query_axes:
        return None
    sizes = replace(caller.sizes, batch=2)
    batched = replace(caller, query_axes=f"b{caller.query_axes}", key_axes=f"b{caller.key_axes}", sizes=sizes)
    # the shape (n, d) of the output of one sequence
    own = tuple(caller(*caller.sizes.sample(1, caller.dtype)).output.shape[2:])
    try:
        returned = batched.returned(*sizes.sample(1, caller.dtype))
    except Exception:  # of the user's function: it takes no batch
        return None
    lost = next((x for x in returned if x.ndim == 3 and tuple(x.shape) == (1, *own)), None)
    if lost is None:
        return None
    text = f"For a batch of 2 sequences it returns {tuple(lost.shape)}, the output of one."
    return CheckFinding("batch", "wrong", text, "Keep the batch axis of the output.", "the output has lost sequences")


@torch.no_grad()
def heads_finding(caller: Caller) -> CheckFinding | None:
    """The mistake that one head changes the output of another; None if it is not made.

    None too where heads have no axis, or share heads of the keys.
    """
    if "h" not in caller.query_axes or caller.sizes.key_heads:
        return None
    size = _size_of_mixing(caller, caller.sizes.sample(1, caller.dtype), 1)
    if not size:
        return None
    text = f"A change of the other heads changes the output of a head by {size:.2g}."
    remedy = "Keep the axis of heads: no sum, norm, softmax or roll over it. Talking heads mix them on purpose."
    return CheckFinding("heads", "wrong", text, remedy, "heads mix")


@torch.no_grad()
def channels_finding(caller: Caller) -> CheckFinding | None:
    """Whether a channel of the output has values of other channels; None if not, or if it cannot be said.

    Modules may project the values, and without an argument for values these cannot be changed alone.
    """
    query, key, value = caller.sizes.sample(1, caller.dtype)
    if len(caller.roles.inputs) < 3 or isinstance(caller.function, nn.Module):
        return None
    size = _size_of_mixing(caller, (query, key, value), 3, of_values=True)
    if not size:
        return None
    text = f"A change of the other channels of the values changes a channel of the output by {size:.2g}."
    remedy = (
        "Right if the function projects the values. Else: no sum, norm, softmax or roll of the values over axis -1."
    )
    return CheckFinding("channels", "unknown", text, remedy)


def _size_of_mixing(caller: Caller, inputs: Inputs, axis: int, of_values: bool = False) -> float:
    """How far the output of one entry along an axis of (B, H, n, D) changes if all other entries change.

    The largest change of any entry; 0 if all are roundings. `of_values`: the values alone are changed.
    """
    query, key, value = inputs
    before = caller(*inputs).output
    sizes = [0.0]
    for n in range(min(before.shape[axis], value.shape[axis])):
        other = _with_others(value, axis, n)
        others = (query, key) if of_values else (_with_others(query, axis, n), _with_others(key, axis, n))
        after = caller(*others, other).output
        sizes.append(_difference(before.select(axis, n), after.select(axis, n)))
    return max(sizes)


def _difference(one: Tensor, other: Tensor) -> float:
    """The largest difference: 0 if all are roundings, else infinite if one of them has NaN somewhere."""
    return 0.0 if close(one, other) else float((one - other).abs().nan_to_num(torch.inf).max())


def _changed(inputs: Inputs, tokens: slice) -> Inputs:
    """Copies of the inputs (B, H, n, D) with other numbers at some tokens."""
    query, key, value = (x.clone() for x in inputs)
    for x in (query, key, value):
        x[:, :, tokens] = 1 - 2 * x[:, :, tokens]  # any other numbers
    return query, key, value


@torch.no_grad()
def values_finding(caller: Caller) -> CheckFinding | None:
    """The mistake of an output that is NaN, or that does not depend on the values; None if neither is made."""
    query, key, value = caller.sizes.sample(6, caller.dtype)
    output = caller(query, key, value).output
    if not output.numel():
        return None
    if output.isnan().all():
        remedy = "Look for 0 / 0, inf - inf, log(0), or a mask that hides all keys."
        return CheckFinding("values", "wrong", "Every number of the output is NaN.", remedy, "the output is NaN")
    if len(caller.roles.inputs) < 3 or not close(output, caller(query, key, 1 - 2 * value).output):
        return None
    text = "Other values do not change the output."
    return CheckFinding("values", "wrong", text, "Multiply the weights by the values.", "the values are not used")


@torch.no_grad()
def isolation_finding(caller: Caller) -> CheckFinding | None:
    """The mistake of an output in which no token sees another; None if one does, or if another mistake explains it."""
    inputs = caller.sizes.sample(7, caller.dtype)
    output = caller(*inputs).output
    if not output.numel() or not output.isfinite().all() or values_finding(caller) is not None:
        return None
    is_square = caller.roles.is_self or caller.sizes.queries == caller.sizes.keys
    for i in range(caller.sizes.queries):
        # query i keeps its token; where there are as many keys as queries, key i and value i keep theirs
        others = [_with_others(x, 2, i if is_square or n == 0 else None) for n, x in enumerate(inputs)]
        if not close(output[:, :, i], caller(others[0], others[1], others[2]).output[:, :, i]):
            return None
    text = (
        "The output of each query depends on its own token alone. All other tokens can change, and it stays the same."
    )
    remedy = (
        "Return weights @ v, with one weight for each query and key: (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1). "
        "If there are heads, transpose first: (batch, heads, length, width)."
    )
    return CheckFinding("other tokens", "wrong", text, remedy, "no token attends to another")


def _with_others(x: Tensor, axis: int, kept: int | None) -> Tensor:
    """A copy of `x` (B, H, n, D) with other numbers, but for the entry `kept` along an axis; None keeps none."""
    other = 1 - 2 * x
    if kept is not None:
        other.select(axis, kept).copy_(x.select(axis, kept))
    return other


@torch.no_grad()
def unused_finding(caller: Caller, is_measured: bool) -> CheckFinding | None:
    """The mistake of an output that does not depend on the queries or on the keys; None if it is not made.

    If the keys are not used and the weights could not be measured, the scores compare queries with something else, such
    as the values. If they could (`is_measured`), weights without keys may be meant, as in a Synthesizer.
    """
    inputs = caller.sizes.sample(6, caller.dtype)
    output = caller(*inputs).output
    if len(caller.roles.inputs) < 3 or not output.numel() or not output.isfinite().all():
        return None
    names = {"queries": 0, "keys": 1}
    changed = {name: [1 - 2 * x if i == n else x for n, x in enumerate(inputs)] for name, i in names.items()}
    unused = [name for name, (q, k, v) in changed.items() if close(output, caller(q, k, v).output)]
    if not unused:
        return None
    text = f"Other {' and '.join(unused)} do not change the output."
    remedy = "Compare each query with each key: q @ k.mT."
    if unused == ["queries"] or (unused == ["keys"] and not is_measured):
        return CheckFinding("query and key", "wrong", text, remedy, f"the {unused[0]} are not used")
    return CheckFinding("query and key", "unknown", text, f"Right for a Synthesizer. Else: {remedy}")


@torch.no_grad()
def order_finding(caller: Caller, visible: Tensor | None, mechanism: str | None) -> CheckFinding:
    """Whether the output depends on the order of the keys; for one input, on the order of its tokens.

    It may if some pair is not `visible` (n, n) without a mask, or if the weights are those of a `mechanism` with
    positions.
    """
    hides = visible is not None and not visible.all()
    if hides and visible is not None and not visible.triu(1).any():
        return CheckFinding("order", "right", "The function is causal, so the order of tokens counts.")
    query, key, value = caller.sizes.sample(2, caller.dtype)
    order = torch.arange(caller.sizes.keys).flip(0)
    before = caller(query, key, value).output
    if caller.roles.is_self:
        same = close(before[:, :, order], caller(query[:, :, order], key, value).output)
    else:
        same = close(before, caller(query, key[:, :, order], value[:, :, order]).output)
    if same:
        return CheckFinding("order", "right", "Another order of keys and values does not change the output.")
    if hides:
        return CheckFinding("order", "right", "Pairs are hidden without a mask, so the order of tokens may count.")
    if mechanism is not None:
        return CheckFinding("order", "right", f"The output depends on positions, as in {mechanism}.")
    remedy = "Right if the function encodes positions. Else look for .view or .reshape where .transpose is needed."
    return CheckFinding("order", "unknown", "Another order of keys and values changes the output.", remedy)


def causal_pairs(caller: Caller) -> Tensor:
    """Pairs (B, 1, I, J) with j <= i."""
    s = caller.sizes
    return torch.ones(s.queries, s.keys, dtype=torch.bool).tril().expand(s.batch, 1, -1, -1)


@torch.no_grad()
def leak_finding(caller: Caller, extra: dict[str, Any], how: str) -> CheckFinding | None:
    """Whether later tokens change the outputs of earlier ones; None if queries and keys must differ.

    `extra` are further arguments of the calls, which hide later keys, and `how` says so at the beginning of the text.
    """
    if caller.sizes.queries != caller.sizes.keys:
        return None
    cut = caller.sizes.queries // 2
    inputs = caller.sizes.sample(4, caller.dtype)
    before = caller(*inputs, extra).output[:, :, :cut]
    after = caller(*_changed(inputs, slice(cut, None)), extra).output[:, :, :cut]
    size = _difference(before, after)
    if not size:
        return CheckFinding("leak", "right", f"{how}, later tokens do not change the outputs of earlier ones.")
    text = f"{how}, changed later tokens change earlier outputs by {size:.2g}."
    remedy = "Hide later keys before the softmax, and use no mean or norm over the sequence."
    return CheckFinding("leak", "wrong", text, remedy, "the output leaks the future")


@torch.no_grad()
def padding_finding(caller: Caller, mask: Response) -> CheckFinding:
    """Whether the two last keys change the outputs of real queries where `mask` hides them."""
    s = caller.sizes
    real = torch.ones(s.batch, 1, s.queries, s.keys, dtype=torch.bool)
    real[..., -2:] = False
    extra = {mask.parameter: mask.mask(real, caller.dtype)}
    inputs = s.sample(5, caller.dtype)
    # in a function of one input the hidden tokens are queries too, and their outputs may change
    rows = slice(0, s.keys - 2) if caller.roles.is_self else slice(None)
    before = caller(*inputs, extra).output[:, :, rows]
    query, key, value = _changed(inputs, slice(-2, None))
    after = caller(query if caller.roles.is_self else inputs[0], key, value, extra).output[:, :, rows]
    size = _difference(before, after)
    if not size:
        text = f"The values of keys that {mask.parameter} hides do not change the output."
        return CheckFinding("padding", "right", text)
    text = f"Other values at keys that {mask.parameter} hides change the output by {size:.2g}."
    return CheckFinding("padding", "wrong", text, "Give hidden keys the weight 0.", "hidden keys change the output")


@torch.no_grad()
def empty_row_finding(caller: Caller, mask: Response) -> CheckFinding | None:
    """The output of queries that may attend to no key: all of one sequence, or query 0 of each.

    None if the call raises an error, or if the mask is a padding mask and there is one sequence only.
    """
    s = caller.sizes
    pairs = torch.ones(s.batch, 1, s.queries, s.keys, dtype=torch.bool)
    if mask.form.is_padding and s.batch == 1:
        return None
    # a mask of keys hides the same ones from all queries of a sequence
    empty: Any = (slice(0, 1),) if mask.form.is_padding else (slice(None), slice(None), slice(0, 1))
    pairs[empty] = False
    try:
        output = caller(*s.sample(6, caller.dtype), {mask.parameter: mask.mask(pairs, caller.dtype)}).output
    except Exception:  # of the user's function
        return None
    # the output without the empty rows must not be NaN
    row = output[empty].clone()
    output[empty] = 0.0
    remedy = "If sequences can be empty: weights.masked_fill(~mask, 0.0) after the softmax, or nan_to_num."
    if output.isnan().any():
        text = "A query without any visible key makes the output of others NaN."
        return CheckFinding("empty rows", "wrong", text, remedy, "an empty row spoils other rows")
    content = "NaN" if row.isnan().any() else "a mean of hidden values" if row.any() else "zeros"
    text = f"With {mask.parameter}, a query without any visible key gets {content}."
    if content == "zeros":
        return CheckFinding("empty rows", "right", text)
    return CheckFinding("empty rows", "unknown", text, remedy)


@torch.no_grad()
def dropout_finding(caller: Caller) -> CheckFinding:
    """Whether calls in evaluation with equal inputs give the same output, whatever the seed of torch is.

    Only calls `with_dropout` run torch's dropout. In all other calls of a check it changes nothing.
    """
    inputs = caller.sizes.sample(7, caller.dtype)
    outputs = []
    with torch.random.fork_rng(devices=[]):
        for seed in range(3):
            torch.manual_seed(seed)
            outputs.append(caller(*inputs, with_dropout=True).output)
    if all(close(outputs[0], other) for other in outputs[1:]):
        return CheckFinding("evaluation", "right", "Calls in evaluation with equal inputs give equal outputs.")
    text = "Equal inputs give different outputs, although the module is in evaluation or no training was asked for."
    remedy = "Use nn.Dropout in a module, or F.dropout(weights, p, training=self.training)."
    return CheckFinding("evaluation", "wrong", text, remedy, "dropout is on in evaluation")


@torch.no_grad()
def inputs_finding(caller: Caller) -> CheckFinding:
    """Whether a call leaves its inputs as they are."""
    if not caller(*caller.sizes.sample(7, caller.dtype)).changes_inputs:
        return CheckFinding("inputs", "right", "A call leaves its inputs as they are.")
    remedy = "Write q = q / ... instead of q /= ..., and masked_fill instead of masked_fill_."
    return CheckFinding(
        "inputs", "wrong", "After a call an input has other values.", remedy, "the inputs are changed in place"
    )


def square_caller(caller: Caller) -> Caller:
    """The same call with as many keys as queries."""
    n = min(caller.sizes.queries, caller.sizes.keys) if caller.sizes.queries > 1 else 1
    return replace(caller, sizes=replace(caller.sizes, queries=n, keys=n))
