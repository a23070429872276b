"""How a head spreads over a text: local, global, distributed or block-like, each a score from 0 to 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from regard.checks import Count, checked
from regard.errors import RegardError
from regard.maps import AttentionMap, Fold, KeyTotals, Tile
from regard.maps.folds import Shape, State, zeros
from regard.stats.statistics import Allowed
from regard.stats.targets import may_attend

#: Positions to either side that count as local.
NEAR = 2
#: Share of all keys that may be the few that a global head looks at from everywhere (at least one key).
FEW = 0.05
#: Numbers of equal blocks that are tried where no segments are given.
BLOCKS = (2, 4, 8, 16)


@dataclass(frozen=True, eq=False)
class Patterns:
    """The four patterns of every head of one layer, (H,) each, and participation; all from 0 to 1.

    With w the weights, n_i the keys that query i may attend to, and u_ij = 1 / n_i a head that looks
    at all of them alike; a score (s - e) / (1 - e), not below 0, is 0 where s is what e expects:

    - `local`: s the mean weight on keys at most `NEAR` positions away, e that of u.
    - `global_keys`: s the share of all weight on the `FEW` most looked-at keys, e that of u on those keys.
    - `distributed`: mean over queries of (p_i - 1) / (n_i - 1), with p_i = 1 / sum_j w_ij^2 the number of
      keys that a row takes part in (its participation ratio). Queries with one key are left out.
    - `block`: s the share of all weight within the query's own segment, e what the head's own weights by
      offset j - i would put there if segments had no borders: nearness alone is no block.
    - `participation`: mean over queries of p_i / n_i.

    >>> import torch, regard as rg
    >>> from regard.stats import patterns
    >>> x = 1000 * torch.eye(40).expand(1, 1, 40, 40)
    >>> found = patterns(rg.attend(rg.Attention(), x, x, x).weights)  # every query looks at itself alone
    >>> found.local, found.distributed, found.participation
    (tensor([1.]), tensor([0.]), tensor([0.0250]))
    """

    local: Tensor
    global_keys: Tensor
    distributed: Tensor
    block: Tensor
    participation: Tensor

    def table(self) -> str:
        """One line a head, in plain text."""
        names = [field.name for field in fields(self)]
        lines = ["head " + " ".join(f"{name:>13}" for name in names)]
        for head in range(len(self.local)):
            lines.append(f"{head:4d} " + " ".join(f"{float(getattr(self, name)[head]):13.3f}" for name in names))
        return "\n".join(lines)


@checked
def patterns(weights: AttentionMap, segments: Sequence[int] | Tensor | None = None, batch: Count = 0) -> Patterns:
    """The patterns of every head of one self-attention map, in two passes and O(n) memory.

    `segments` are the lengths of the stretches that blocks may be (sentences, say), which add up to the
    length of the text; without them 2, 4, 8 and 16 equal blocks are tried and the best score is told.

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 1, 40, 4)
    >>> found = patterns(rg.attend(rg.Attention(), x, x, x).weights)
    >>> [round(float(score), 3) for score in (found.local, found.global_keys, found.distributed, found.block)]
    [0.0, 0.0, 1.0, 0.0]
    """
    B, H, I, J = weights.shape
    if I != J:
        raise RegardError(f"patterns: queries and keys must be the same text, got {I} queries and {J} keys.")
    if not 0 <= batch < B:
        raise RegardError(f"patterns: batch {batch} is out of range; the map has {B} texts.")
    one = weights.select(torch.tensor([batch]), torch.arange(H))
    divisions = _divisions(I, segments)
    (allowed,) = one.summarize(Allowed(one))
    near, received, squares, offsets, *inside = one.summarize(
        Beside(Near(NEAR), one, allowed),
        Beside(KeyTotals(), one, allowed),
        Squares(),
        OffsetSums(),
        *(Within(_of(lengths)) for lengths in divisions),
    )
    ratio = (1 / squares.clamp_min(torch.finfo(torch.float32).tiny)).clamp(1.0).minimum(allowed.clamp_min(1))
    choice, rows = allowed > 1, (allowed > 0).sum(-1).clamp_min(1)
    spread = ((ratio - 1) / (allowed - 1).clamp_min(1) * choice).sum(-1) / choice.sum(-1).clamp_min(1)
    blocks = torch.stack([_block(mass, offsets, lengths) for mass, lengths in zip(inside, divisions, strict=True)])
    found = (
        _above(near[0].sum(-1) / rows, near[1].sum(-1) / rows),
        _global(*received),
        spread,
        blocks.amax(0),
        (ratio / allowed.clamp_min(1) * (allowed > 0)).sum(-1) / rows,
    )
    return Patterns(*(score[0].cpu() for score in found))


def _divisions(n: int, segments: Sequence[int] | Tensor | None) -> list[list[int]]:
    """Lengths of segments: those given, or equal ones."""
    if segments is not None:
        lengths = _lengths(segments)
        if sum(lengths) != n or min(lengths, default=0) < 1:
            raise RegardError(f"patterns: segments are lengths of at least 1 that add up to {n}, got {lengths}.")
        return [lengths]
    found = [[(k + 1) * n // blocks - k * n // blocks for k in range(blocks)] for blocks in BLOCKS if blocks <= n]
    return found or [[n]]


def _lengths(segments: Sequence[int] | Tensor) -> list[int]:
    if not isinstance(segments, Tensor):
        return [int(length) for length in segments]
    if segments.ndim != 1 or segments.dtype not in (torch.int32, torch.int64) or segments.is_meta:
        raise RegardError(f"patterns: segments are a vector of lengths, got {segments.dtype} {tuple(segments.shape)}.")
    return segments.tolist()


def _of(lengths: list[int]) -> Tensor:
    """The segment of every token."""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def _above(score: Tensor, expected: Tensor) -> Tensor:
    """(s - e) / (1 - e), from 0 to 1; 0 where nothing could be more than expected."""
    room = 1 - expected
    return torch.where(room > 1e-6, (score - expected) / room.clamp_min(1e-6), 0.0).clamp(0.0, 1.0)


def _global(received: Tensor, even: Tensor) -> Tensor:
    count = max(1, round(FEW * received.shape[-1]))
    keys = received.topk(count, -1).indices
    share, expected = (part.gather(-1, keys).sum(-1) / part.sum(-1).clamp_min(1e-12) for part in (received, even))
    return _above(share, expected)


def _block(inside: Tensor, offsets: Tensor, lengths: list[int]) -> Tensor:
    """Weight within segments, against what the offsets alone put there; (B, H)."""
    n = sum(lengths)
    apart = torch.arange(1 - n, n).abs()
    pairs = torch.zeros(2 * n - 1, dtype=torch.float64)
    for length in lengths:
        pairs += (length - apart).clamp_min(0)
    expected = (offsets * (pairs / (n - apart)).to(offsets)).sum(-1)
    total = offsets.sum(-1).clamp_min(1e-12)
    return _above(inside.sum(-1) / total, expected / total)


@dataclass(frozen=True, eq=False)
class Beside(Fold):
    """Another fold, of the weights and of a head that looks at all `allowed` (B, H, I) keys alike."""

    fold: Fold
    weights: AttentionMap
    allowed: Tensor

    def init(self, shape: Shape, device: torch.device) -> State:
        return [*self.fold.init(shape, device), *self.fold.init(shape, device)]

    def add(self, state: State, tile: Tile) -> None:
        half = len(state) // 2
        self.fold.add(state[:half], tile)
        even = may_attend(self.weights, tile) / self.allowed[:, :, tile.rows, None].clamp_min(1)
        even = even.expand(tile.weights.shape).to(tile.weights.dtype)
        self.fold.add(state[half:], replace(tile, weights=even, log_weights=None))

    def finish(self, state: State) -> tuple[Any, Any]:
        half = len(state) // 2
        return self.fold.finish(state[:half]), self.fold.finish(state[half:])


@dataclass(frozen=True)
class Near(Fold):
    """Weight that every query puts on keys at most `by` positions away; (B, H, I)."""

    by: int

    def init(self, shape: Shape, device: torch.device) -> State:
        return [zeros(device, *shape[:3])]

    def add(self, state: State, tile: Tile) -> None:
        state[0][:, :, tile.rows] += (tile.weights * (tile.grid.distance.abs() <= self.by)).sum(-1)


@dataclass(frozen=True)
class Squares(Fold):
    """sum_j w_ij^2, one over the number of keys that a row takes part in; (B, H, I)."""

    def init(self, shape: Shape, device: torch.device) -> State:
        return [zeros(device, *shape[:3])]

    def add(self, state: State, tile: Tile) -> None:
        state[0][:, :, tile.rows] += torch.linalg.vecdot(tile.weights, tile.weights)


@dataclass(frozen=True)
class OffsetSums(Fold):
    """Weight at every offset j - i, from 1 - I to J - 1, by index, summed over queries; (B, H, I + J - 1)."""

    def init(self, shape: Shape, device: torch.device) -> State:
        B, H, I, J = shape
        return [zeros(device, B, H, I + J - 1), torch.tensor(I - 1, device=device)]

    def add(self, state: State, tile: Tile) -> None:
        total, zero = state
        height, width = tile.weights.shape[-2:]
        # A row one longer than the tile's, refilled row by row, brings every diagonal into one column.
        padded = torch.nn.functional.pad(tile.weights.flip(-2), (0, height)).flatten(-2)[..., : -height or None]
        sums = padded.unflatten(-1, (height, width + height - 1)).sum(-2)
        first = tile.cols.start - (tile.rows.stop - 1) + int(zero)
        total[..., first : first + sums.shape[-1]] += sums

    def merge(self, state: State, other: State) -> State:
        return [state[0] + other[0], state[1]]


@dataclass(frozen=True, eq=False)
class Within(Fold):
    """Weight that every query puts on its own segment; `segment` (n,) numbers them; (B, H, I)."""

    segment: Tensor

    def init(self, shape: Shape, device: torch.device) -> State:
        return [zeros(device, *shape[:3]), self.segment.to(device)]

    def add(self, state: State, tile: Tile) -> None:
        same = state[1][tile.rows, None] == state[1][None, tile.cols]
        if same.any():
            state[0][:, :, tile.rows] += (tile.weights * same).sum(-1)

    def merge(self, state: State, other: State) -> State:
        return [state[0] + other[0], state[1]]
