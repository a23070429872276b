"""`patterns` scores how local, global, distributed and block-like every head is, each from 0 to 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from regard.base.checks import Count, checked
from regard.base.errors import RegardError
from regard.maps import AttentionMap, KeyTotals, MassWhere, Reduction, Tile
from regard.maps.reductions import Shape, State, zeros
from regard.pieces.data_masks import documents
from regard.pieces.mask import window
from regard.stats.profile import one_text
from regard.stats.statistics import Allowed
from regard.stats.targets import may_attend
from regard.stats.token_reductions import Offsets

#: Positions to either side that count as local.
NEAR = 2
#: Share of all keys that a global head may attend to from everywhere (at least one key).
FEW = 0.05
#: Numbers of equal blocks that `patterns` tries if no segments are given.
BLOCKS = (2, 4, 8, 16)


@dataclass(frozen=True, eq=False)
class LayerPatterns:
    """Four scores and the participation of every head of one layer, (H,) each; all from 0 to 1.

    With w the weights, n_i the number of keys that query i may attend to, and u_ij = 1 / n_i equal weights.
    Scores with s and e are max(0, (s - e) / (1 - e)): 0 if s is as expected (e), 1 if s is 1.

    - `local`: s the mean weight on keys at most `NEAR` positions away, e that of u.
    - `global_keys`: s the share of all weight on the `FEW` keys that receive most weight, e that of u on these keys.
    - `distributed`: mean over queries of (p_i - 1) / (n_i - 1), with p_i = 1 / sum_j w_ij^2 the effective
      number of keys of a row (its participation ratio). Queries with one key are left out.
    - `block`: s the share of all weight within the query's own segment, e the share that a head with
      the same total weight at each offset j - i, but without regard to segments, puts there. So a head that is only
      local scores 0.
    - `participation`: mean over queries of p_i / n_i.

    >>> import torch, regard as rg
    >>> from regard.stats import patterns
    >>> x = 1000 * torch.eye(40).expand(1, 1, 40, 40)
    >>> scores = patterns(rg.Attention()(x, x, x).weights)  # every query attends to itself only
    >>> scores.local, scores.distributed, scores.participation
    (tensor([1.]), tensor([0.]), tensor([0.0250]))
    """

    local: Tensor
    global_keys: Tensor
    distributed: Tensor
    block: Tensor
    participation: Tensor

    def table(self) -> str:
        """One line of plain text for each head."""
        names = [field.name for field in fields(self)]
        lines = ["head " + " ".join(f"{name:>13}" for name in names)]
        for head in range(len(self.local)):
            lines.append(f"{head:4d} " + " ".join(f"{float(getattr(self, name)[head]):13.3f}" for name in names))
        return "\n".join(lines)


@checked
def patterns(weights: AttentionMap, segments: Sequence[int] | Tensor | None = None, batch: Count = 0) -> LayerPatterns:
    """The patterns of every head of one self-attention map, in two passes and O(n) memory.

    `segments` are the lengths of the segments for `block`, such as sentences; they add up to the length of the
    text. By default `block` is the best score of 2, 4, 8 and 16 equal segments.

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 1, 40, 4)
    >>> scores = patterns(rg.Attention()(x, x, x).weights)
    >>> [round(float(score), 3) for score in (scores.local, scores.global_keys, scores.distributed, scores.block)]
    [0.0, 0.0, 1.0, 0.0]
    """
    I, J = weights.shape[2:]
    if I != J:
        raise RegardError(f"patterns: queries and keys must be the same text, got {I} queries and {J} keys.")
    text_map = one_text("patterns", weights, batch)
    divisions = _divisions(I, segments)
    (allowed,) = text_map.summarize(Allowed(text_map))
    near, received, squares, offsets, *inside = text_map.summarize(
        WithEqualWeights(MassWhere(window(NEAR + 1)), text_map, allowed),
        WithEqualWeights(KeyTotals(), text_map, allowed),
        Squares(),
        Offsets(1 - I, I - 1),
        *(MassWhere(documents(lengths)) for lengths in divisions),
    )
    ratio = (1 / squares.clamp_min(torch.finfo(torch.float32).tiny)).clamp(1.0).minimum(allowed.clamp_min(1))
    choice, rows = allowed > 1, (allowed > 0).sum(-1).clamp_min(1)
    spread = ((ratio - 1) / (allowed - 1).clamp_min(1) * choice).sum(-1) / choice.sum(-1).clamp_min(1)
    blocks = torch.stack([_block(mass, offsets, lengths) for mass, lengths in zip(inside, divisions, strict=True)])
    scores = (
        _above(near[0].sum(-1) / rows, near[1].sum(-1) / rows),
        _global(*received),
        spread,
        blocks.amax(0),
        (ratio / allowed.clamp_min(1) * (allowed > 0)).sum(-1) / rows,
    )
    return LayerPatterns(*(score[0].cpu() for score in scores))


def _divisions(n: int, segments: Sequence[int] | Tensor | None) -> list[list[int]]:
    """Lengths of segments for each division to try: the given lengths, or equal lengths."""
    if segments is not None:
        lengths = _lengths(segments)
        if sum(lengths) != n or min(lengths, default=0) < 1:
            raise RegardError(f"patterns: segments are lengths of at least 1 that add up to {n}, got {lengths}.")
        return [lengths]
    divisions = [[(k + 1) * n // blocks - k * n // blocks for k in range(blocks)] for blocks in BLOCKS if blocks <= n]
    return divisions or [[n]]


def _lengths(segments: Sequence[int] | Tensor) -> list[int]:
    if not isinstance(segments, Tensor):
        return [int(length) for length in segments]
    if segments.ndim != 1 or segments.dtype not in (torch.int32, torch.int64) or segments.is_meta:
        raise RegardError(f"patterns: segments are a vector of lengths, got {segments.dtype} {tuple(segments.shape)}.")
    return segments.tolist()


def _above(score: Tensor, expected: Tensor) -> Tensor:
    """(s - e) / (1 - e), from 0 to 1; 0 if the expected score is already 1."""
    room = 1 - expected
    return torch.where(room > 1e-6, (score - expected) / room.clamp_min(1e-6), 0.0).clamp(0.0, 1.0)


def _global(received: Tensor, received_equal: Tensor) -> Tensor:
    count = max(1, round(FEW * received.shape[-1]))
    keys = received.topk(count, -1).indices
    share, expected = (
        part.gather(-1, keys).sum(-1) / part.sum(-1).clamp_min(1e-12) for part in (received, received_equal)
    )
    return _above(share, expected)


def _block(inside: Tensor, offsets: Tensor, lengths: list[int]) -> Tensor:
    """The score of weight within segments, compared with the weight expected from the offsets; (B, H)."""
    n = sum(lengths)
    distances = torch.arange(1 - n, n).abs()
    pairs = torch.zeros(2 * n - 1, dtype=torch.float64)
    for length in lengths:
        pairs += (length - distances).clamp_min(0)
    expected = (offsets * (pairs / (n - distances)).to(offsets)).sum(-1)
    total = offsets.sum(-1).clamp_min(1e-12)
    return _above(inside.sum(-1) / total, expected / total)


@dataclass(frozen=True, eq=False)
class WithEqualWeights(Reduction):
    """Another reduction, computed for the weights and for equal weights on all `allowed` (B, H, I) keys."""

    reduction: Reduction
    weights: AttentionMap
    allowed: Tensor

    def init(self, shape: Shape, device: torch.device) -> State:
        return [*self.reduction.init(shape, device), *self.reduction.init(shape, device)]

    def add(self, state: State, tile: Tile) -> None:
        half = len(state) // 2
        self.reduction.add(state[:half], tile)
        equal = may_attend(self.weights, tile) / self.allowed[:, :, tile.rows, None].clamp_min(1)
        equal = equal.expand(tile.weights.shape).to(tile.weights.dtype)
        self.reduction.add(state[half:], replace(tile, weights=equal, log_weights=None))

    def finish(self, state: State) -> tuple[Any, Any]:
        half = len(state) // 2
        return self.reduction.finish(state[:half]), self.reduction.finish(state[half:])


@dataclass(frozen=True)
class Squares(Reduction):
    """sum_j w_ij^2, the inverse of the participation ratio of a row; (B, H, I)."""

    def init(self, shape: Shape, device: torch.device) -> State:
        return [zeros(device, *shape[:3])]

    def add(self, state: State, tile: Tile) -> None:
        state[0][:, :, tile.rows] += torch.linalg.vecdot(tile.weights, tile.weights)
