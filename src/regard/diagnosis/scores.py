"""Findings about the scores, read from the weights: the axis of the softmax, the product of q and k, and its factor."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.diagnosis.cached_calls import JOIN
from regard.diagnosis.calling import Caller, InputSizes
from regard.diagnosis.report import CheckFinding
from regard.diagnosis.weights import TOLERANCE, Measurement, close

AXES = {3: "keys", 2: "queries", 1: "heads", 0: "batch"}
#: Factors are equal if they differ by less than this share.
PRECISION = 1e-3


@dataclass(frozen=True)
class Product:
    """Scores that are a factor times a product: "dot", "swapped" (k_i . q_j), "reversed" (q_i . k_{i-j}), "cosine"."""

    kind: str
    factor: float


def normalized_axis(weights: Tensor) -> int | None:
    """The axis of weights (B, H, I, J) over which they sum to 1; None if there is none.

    3, the keys, comes before others; -1 are queries and keys together. NaN, the weights of a query without any visible
    key, does not count.
    """
    axes = [axis for axis in (3, 2, 1, 0) if weights.shape[axis] > 1]
    sums = {axis: weights.nansum(axis) for axis in axes}
    full = {axis: total[~weights.isnan().any(axis)] for axis, total in sums.items()}
    for axis, total in full.items():
        if total.numel() and close(total, torch.ones_like(total), 1e-3):
            return axis
    together = weights.nansum((2, 3))
    return -1 if close(together, torch.ones_like(together), 1e-3) and weights.shape[2] > 1 else None


def axis_finding(measurement: Measurement) -> CheckFinding:
    """Whether the weights of each query sum to 1 over the keys."""
    axis = normalized_axis(measurement.weights)
    remedy = "Take the softmax over the last axis of the scores (..., queries, keys): scores.softmax(dim=-1)."
    if axis == 3:
        return CheckFinding("softmax axis", "right", "The weights of each query sum to 1 over the keys.")
    if axis is None:
        sums = measurement.weights.sum(-1)
        text = f"The weights of a query sum to {sums.nanmean():.2f} on average, and not to 1 over any axis."
        return CheckFinding(
            "softmax axis", "unknown", text, "Right for a sink or sigmoid attention; else divide by the sum."
        )
    name = "queries and keys together" if axis == -1 else AXES[axis]
    sum_over_keys = measurement.weights.sum(-1).nanmean()
    text = f"Weights sum to 1 over the {name}, and over the keys to {sum_over_keys:.2f} on average."
    return CheckFinding("softmax axis", "wrong", text, remedy, f"the softmax is over the {name}")


def unmeasured_finding(caller: Caller) -> CheckFinding:
    """What was tried to measure the weights, and what the user can pass instead."""
    tried = ["the output as weights times values", "keys and values swapped", "heads split by .view", "a residual"]
    remedy = (
        "Return the attention alone: without norm, feed-forward layer or anything that is not linear in the values."
    )
    if isinstance(caller.function, nn.Module):
        tried.append("a copy with identities for matrices and norms")
        parts = [
            name
            for name, module in caller.function.named_modules()
            if name and "attention" in type(module).__name__.lower()
        ]
        remedy += f" Check its part: regard.check(module.{parts[0]})." if parts else ""
    text = f"The output is not weights times values, so its weights cannot be measured. Tried: {'; '.join(tried)}."
    return CheckFinding("scores", "unknown", text, remedy)


def product_of(measurement: Measurement) -> Product | None:
    """The product whose softmax the weights are, fitted to their logarithms; None if it is none of them."""
    axis = normalized_axis(measurement.weights)
    query, key = measurement.query.double(), measurement.key.double()
    if axis is None or query.shape[-1] != key.shape[-1]:
        return None
    products = {"dot": query @ key.mT}
    if query.shape[2] == key.shape[2]:
        products["swapped"] = key @ query.mT
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])
    # key i - j in the place of key j: a cache whose newest token is the first
    products["reversed"] = products["dot"].gather(-1, (distance % key.shape[2]).expand_as(products["dot"]))
    products["cosine"] = torch.cosine_similarity(query[..., :, None, :], key[..., None, :, :], -1)
    for kind, product in products.items():
        factor = _fit(measurement.weights.double(), product, (2, 3) if axis == -1 else (axis,))
        if factor is not None:
            return Product(kind, factor)
    return None


def _fit(weights: Tensor, product: Tensor, axes: tuple[int, ...]) -> float | None:
    """The factor c in log w = c product + constant along `axes`, by least squares; None if this does not hold.

    `weights` w and `product` are (B, H, I, J).
    """
    valid = (weights > 1e-12) & ~weights.isnan()
    logs, product = _centered(weights.clamp(min=1e-12).log(), valid, axes), _centered(product, valid, axes)
    if not product.any():
        return None
    factor = (logs * product).sum() / product.square().sum()
    off = (logs - factor * product).abs().max()
    return float(factor) if off < 1e-2 * logs.abs().max().clamp(min=TOLERANCE) and factor.abs() > 1e-6 else None


def _centered(x: Tensor, valid: Tensor, axes: tuple[int, ...]) -> Tensor:
    """`x` minus its mean along `axes` over the valid pairs; 0 at the others."""
    x = x.nan_to_num().masked_fill(~valid, 0.0)
    mean = x.sum(axes, keepdim=True) / valid.sum(axes, keepdim=True).clamp(min=1)
    return (x - mean).masked_fill(~valid, 0.0)


def scale_finding(
    measurement: Measurement, sizes: InputSizes, scale: float | None, mechanism: str | None
) -> CheckFinding:
    """Whether scores are divided by the root of the width of a head, or have the factor that the user means.

    `scale` is that factor, None if the user named none. `mechanism` is a known one that the weights equal.
    """
    product, width = product_of(measurement), measurement.query.shape[-1]
    expected = 1 / math.sqrt(width) if scale is None else scale
    if product is None or product.kind == "cosine":
        factor = f" with factor {product.factor:.4g}" if product else ""
        known = mechanism or ("cosine" if product else None)
        text = f"The scores are those of {known}{factor}." if known else "The scores are no multiple of q . k."
        return CheckFinding("scale", "right" if known else "unknown", text)
    wanted = f"{expected:.4g}" + (f" = 1/sqrt({width}), {width} channels" if scale is None else "")
    if math.isclose(product.factor, expected, rel_tol=PRECISION):
        return CheckFinding("scale", "right", f"The scores are q . k times {wanted}.")
    text = f"The scores are q . k times {product.factor:.4g}, not {wanted}."
    return CheckFinding(
        "scale", "wrong", text, _scale_remedy(product.factor, scale), _scale_mistake(product.factor, width, sizes)
    )


def _scale_remedy(factor: float, wanted: float | None) -> str:
    """What to write; `wanted` is the factor that the user names, if there is one."""
    remedy = "Divide the scores by math.sqrt(q.shape[-1]), the width of a head."
    if wanted is not None:
        remedy = f"Multiply the products by {wanted:.4g}." if wanted != 1 else "Leave the factor out."
    if math.isclose(factor, 1.0, rel_tol=PRECISION):
        return f"{remedy} If no factor is intended, as in Luong's dot score, say so: like='luong_dot'."
    return f"{remedy} If {factor:.4g} is intended, say so: scale={factor:.4g}."


def _scale_mistake(factor: float, width: int, sizes: InputSizes) -> str:
    """The first usual mistake with this factor. `width` is that of a head, `sizes.width` that of the input."""
    named = {
        "the scores are not scaled": 1.0,
        "the scores are divided by d instead of sqrt(d)": 1 / width,
        "the scores are multiplied by sqrt(d)": math.sqrt(width),
        "the scores are scaled": 1 / math.sqrt(width),  # if another factor is expected
        "the scores are divided by the root of the whole width instead of that of a head": 1 / math.sqrt(sizes.width),
        "the scores are divided by the root of the number of queries": 1 / math.sqrt(sizes.queries),
        "the scores are divided by the root of the number of keys": 1 / math.sqrt(sizes.keys),
        "the scores are divided by the root of the number of heads": 1 / math.sqrt(sizes.heads),
        "the scores are divided by the root of the batch": 1 / math.sqrt(sizes.batch),
        "the scores have the opposite sign": -1 / math.sqrt(width),
    }
    fits = (name for name, value in named.items() if math.isclose(factor, value, rel_tol=PRECISION))
    return next(fits, "the scores have another factor")


def roles_finding(measurement: Measurement, is_known: bool) -> CheckFinding:
    """Whether the weight of query i on key j comes from q_i and k_j; `is_known`: the weights are known ones."""
    product = product_of(measurement)
    if product is not None and product.kind == "swapped":
        text = "The score of query i and key j is k_i . q_j: the matrix of scores is transposed."
        return CheckFinding(
            "query and key", "wrong", text, "Compute q @ k.mT, (..., queries, keys).", "query and key are swapped"
        )
    if product is not None and product.kind == "reversed":
        text = "Query i gives value j the weight of key i - j: one of them has the newest token first."
        mistake = "the cache joins keys and values in different orders"
        return CheckFinding("query and key", "wrong", text, JOIN, mistake)
    if product is None and not is_known:
        text = "The weights are not the softmax of a product of q_i and k_j."
        return CheckFinding("query and key", "unknown", text)
    return CheckFinding("query and key", "right", "The score of query i and key j is that of q_i and k_j.")
