"""Warnings about masks, from the weights alone: a future or padding that is seen, one mask for a whole batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.checks import checked
from regard.errors import RegardError
from regard.maps import AttentionMap, Fold, KeyTotals, MassOn, Tile
from regard.maps.folds import Shape, State, zeros
from regard.stats.numbering import layer_numbers
from regard.stats.warnings import Finding, ending, name_of

#: Share of a row from which weight counts as seen. A boolean mask gives exactly 0; models that add a large negative
#: number instead may leave a trace in half precision, whose rounding is 1e-3 of a weight.
SEEN = 1e-4


@dataclass(frozen=True)
class Future(Fold):
    """Weight that every query puts on keys after it, sum of w_ij over j > i; (B, H, I)."""

    def init(self, shape: Shape, device: torch.device) -> State:
        return [zeros(device, *shape[:3])]

    def add(self, state: State, tile: Tile) -> None:
        if int(tile.grid.distance.max()) > 0:
            state[0][:, :, tile.rows] += (tile.weights * (tile.grid.distance > 0)).sum(-1)


@checked
def mask_findings(
    maps: Mapping[str, AttentionMap],
    *,
    causal: bool = False,
    real: Tensor | Sequence[int] | None = None,
    numbers: Sequence[int] | None = None,
) -> list[Finding]:
    """Warnings that need no profile, only what the model claims: that it is causal, and which keys are real.

    `real` are lengths (B,) or a boolean (B, J) with True = real, as for `padding`. Found are weight on
    the future ("leak"), weight on padding ("padding"), and real keys that no query sees at all though
    queries see others ("unseen"); where texts of different lengths see the same keys, the sentence says
    that one mask seems to serve the whole batch, which is what broadcasting the wrong axis does.
    `numbers` are those of the layers; without them they are read off the module paths.

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 2, 3, 4)
    >>> [finding.kind for finding in mask_findings({"layer": rg.attend(rg.Attention(), x, x, x).weights}, causal=True)]
    ['leak']
    """
    found = []
    for number, weights in zip(layer_numbers(maps, numbers), maps.values(), strict=True):
        if causal:
            found += leaks(number, weights)
        if real is not None:
            found += broadcasts(number, weights, _real(real, weights.shape))
    return found


def leaks(number: int, weights: AttentionMap) -> Iterator[Finding]:
    """Heads that look at what comes after the query."""
    share = weights.summarize(Future())[0].amax((0, 2))
    heads = tuple((share > SEEN).nonzero().flatten().tolist())
    if heads:
        value = float(share.max())
        yield Finding(
            "leak",
            number,
            heads,
            value,
            f"{name_of(number, heads)} put{ending(heads)} up to {value:.1%} of a row on tokens after the query, in "
            "a model that claims to be causal: the causal mask is missing, transposed or shifted. Scores of this "
            "model on next tokens cannot be trusted.",
        )


def broadcasts(number: int, weights: AttentionMap, real: Tensor) -> Iterator[Finding]:
    """Weight on padding, and real keys that nobody sees; `real` is (B, J)."""
    real = real.to(weights.device)
    padding, received = weights.summarize(MassOn(~real), KeyTotals())
    shared = _shared(received, real)
    why = " Texts of different lengths see the same keys: one mask seems to serve the whole batch." if shared else ""
    I, J = weights.shape[2:]
    queries = real[:, None, J - I :] if I <= J else real.new_ones(1, 1, I)
    share = (padding * queries).amax((0, 2))
    heads = tuple((share > SEEN).nonzero().flatten().tolist())
    if heads:
        value = float(share.max())
        yield Finding(
            "padding",
            number,
            heads,
            value,
            f"{name_of(number, heads)} put{ending(heads)} up to {value:.1%} of a row on padding. The mask seems to be "
            f"missing, inverted, or broadcast along the wrong axis.{why} What padding holds then changes the output.",
        )
    yield from _unseen(number, received, real, why)


def _unseen(number: int, received: Tensor, real: Tensor, why: str) -> Iterator[Finding]:
    """Real keys that get no weight at all, from no query, while others do."""
    blind = (received <= 0) & real[:, None] & (received.amax(-1, keepdim=True) > 0)
    heads = tuple(blind.any(-1).any(0).nonzero().flatten().tolist())
    if heads:
        count = int(blind[:, list(heads)].sum(-1).amax())
        yield Finding(
            "unseen",
            number,
            heads,
            float(count),
            f"{name_of(number, heads)} never look{ending(heads)} at up to {count} real token{'s' * (count > 1)} of a "
            f"text: their weight is exactly 0 for every query.{why} A window or a chunk can do this too.",
        )


def _shared(received: Tensor, real: Tensor) -> bool:
    """Whether all texts of a batch see the same keys although their real keys differ."""
    seen = (received > 0).any(1)
    return bool((real != real[:1]).any()) and bool((seen == seen[:1]).all())


def _real(real: Tensor | Sequence[int], shape: tuple[int, int, int, int]) -> Tensor:
    B, _, _, J = shape
    given = torch.as_tensor(real)
    if given.dtype in (torch.int32, torch.int64) and given.shape == (B,):
        return torch.arange(J, device=given.device) < given[:, None]
    if given.dtype == torch.bool and given.shape == (B, J):
        return given
    raise RegardError(
        f"mask_findings: real are {B} integer lengths or booleans of shape ({B}, {J}) with True = real, "
        f"got {given.dtype} of shape {tuple(given.shape)}. An attention_mask of 0 and 1 becomes mask.bool()."
    )
