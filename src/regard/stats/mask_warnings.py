"""Warnings about wrong masks: weight on future tokens or on padding, or one mask for texts of different lengths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.maps import AttentionMap, KeyTotals, MassOn, MassWhere
from regard.pieces import mask
from regard.stats.numbering import layer_numbers
from regard.stats.warnings import Finding, ending, head_names

#: Said if the weights of texts of different lengths are positive on the same keys.
ONE_MASK = "Texts of different lengths attend to the same keys: one mask seems to be used for the whole batch."
#: Weight on masked keys is reported above this share of a row. A boolean mask gives exactly 0. Models that add a large
#: negative number instead may leave a little weight in half precision, where a weight is rounded to 1e-3 of its value.
NEGLIGIBLE = 1e-4


@checked
def mask_findings(
    maps: Mapping[str, AttentionMap],
    *,
    causal: bool = False,
    real: Tensor | Sequence[int] | None = None,
    numbers: Sequence[int] | None = None,
) -> list[Finding]:
    """Warnings about masks, checked against what should hold: that the model is causal, and which keys are real.

    `real` is lengths (B,) or a boolean (B, J) with True = real, as for `padding`. The kinds of findings are "leak"
    (weight on future tokens), "padding" (weight on padding) and "unseen" (real keys with weight 0 for every query,
    while other keys have weight). If texts of different lengths attend to the same keys, the sentence adds that one
    mask seems to be used for the whole batch; broadcasting along the wrong axis causes this. Of signed weights, shares
    of |weight| are read, so that opposite signs do not cancel. `numbers` are the
    numbers of the layers; by default they are read from the module paths (`layer_numbers`).

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 2, 3, 4)
    >>> [finding.kind for finding in mask_findings({"layer": rg.Attention()(x, x, x).weights}, causal=True)]
    ['leak']
    """
    found = []
    for number, weights in zip(layer_numbers(maps, numbers), maps.values(), strict=True):
        weights = weights if weights.has_shares else weights.shares()
        if causal:
            found += leaks(number, weights)
        if real is not None:
            found += broadcasts(number, weights, _real(real, weights.shape))
    return found


def leaks(number: int, weights: AttentionMap) -> Iterator[Finding]:
    """Heads with weight on tokens after the query."""
    share = weights.summarize(MassWhere(~mask.causal()))[0].amax((0, 2))
    heads = tuple((share > NEGLIGIBLE).nonzero().flatten().tolist())
    if heads:
        value = float(share.max())
        names, s = head_names(number, heads), ending(heads)
        yield Finding(
            "leak",
            number,
            heads,
            value,
            f"{names} put{s} up to {value:.1%} of a row on tokens after the query, but the "
            "model should be causal: the causal mask is missing, transposed or shifted. Do not trust next-token scores "
            "of this model.",
        )


def broadcasts(number: int, weights: AttentionMap, real: Tensor) -> Iterator[Finding]:
    """Heads with weight on padding, and heads with weight 0 on real keys; `real` is (B, J)."""
    real = real.to(weights.device)
    padding, received = weights.summarize(MassOn(~real), KeyTotals())
    shared = _shared(received, real)
    why = f" {ONE_MASK}" if shared else ""
    I, J = weights.shape[2:]
    queries = real[:, None, J - I :] if I <= J else real.new_ones(1, 1, I)
    share = (padding * queries).amax((0, 2))
    heads = tuple((share > NEGLIGIBLE).nonzero().flatten().tolist())
    if heads:
        value = float(share.max())
        names, s = head_names(number, heads), ending(heads)
        yield Finding(
            "padding",
            number,
            heads,
            value,
            f"{names} put{s} up to {value:.1%} of a row on padding. The mask seems to be "
            f"missing, inverted, or broadcast along the wrong axis.{why} The output then depends on the padding.",
        )
    yield from _unseen(number, received, real, why)


def _unseen(number: int, received: Tensor, real: Tensor, why: str) -> Iterator[Finding]:
    """Heads with weight 0 on some real keys for every query, and positive weight on others."""
    unseen = (received <= 0) & real[:, None] & (received.amax(-1, keepdim=True) > 0)
    heads = tuple(unseen.any(-1).any(0).nonzero().flatten().tolist())
    if heads:
        count = int(unseen[:, list(heads)].sum(-1).amax())
        names, s = head_names(number, heads), ending(heads)
        yield Finding(
            "unseen",
            number,
            heads,
            float(count),
            f"{names} never attend{s} to up to {count} real token{'s' * (count > 1)} of a "
            f"text: their weight is exactly 0 for every query.{why} A window or a chunk can cause this too.",
        )


def _shared(received: Tensor, real: Tensor) -> bool:
    """Whether the texts of a batch attend to the same keys although their real keys differ."""
    attended = (received > 0).any(1)
    return bool((real != real[:1]).any()) and bool((attended == attended[:1]).all())


def _real(real: Tensor | Sequence[int], shape: tuple[int, int, int, int]) -> Tensor:
    B, _, _, J = shape
    real = torch.as_tensor(real)
    if real.dtype in (torch.int32, torch.int64) and real.shape == (B,):
        return torch.arange(J, device=real.device) < real[:, None]
    if real.dtype == torch.bool and real.shape == (B, J):
        return real
    raise RegardError(
        f"mask_findings: real are {B} integer lengths or booleans of shape ({B}, {J}) with True = real, "
        f"got {real.dtype} of shape {tuple(real.shape)}. An attention_mask of 0 and 1 becomes mask.bool()."
    )
