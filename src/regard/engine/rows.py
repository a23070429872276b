"""From scores to output for some rows of queries: what `dense` does once and `blocked` block by block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.attention import Attention, Prepared, scores
from regard.pieces.dropout import kept
from regard.pieces.grid import Grid
from regard.pieces.normalizer import Statistic
from regard.shapes import at_least_float32, grouped_values


def solve_rows(
    attention: Attention,
    tile: Prepared,
    value: Tensor,
    grid: Grid,
    columns: Tensor,
    *,
    masked: bool = True,
    dropout: float = 0.0,
    seed: int = 0,
) -> tuple[Tensor, Statistic]:
    """Whole rows: every key they may attend to is in `tile`, at key indices `columns`."""
    s = scores(attention, tile, grid, masked)
    statistic = attention.normalizer.statistic(s, columns)
    weights = attention.normalizer.weights(s, statistic, columns)
    if dropout:
        weights = weights * kept(grid, dropout, seed) / (1 - dropout)
    output = grouped_values(weights, at_least_float32(value)).to(value.dtype)
    return output, tuple(t.detach() for t in statistic)


def join(parts: Sequence[Tensor]) -> Tensor:
    """Statistics of all blocks along the rows; kept indices of narrower blocks are filled up with -1."""
    if parts[0].ndim == 4:
        width = max(p.shape[-1] for p in parts)
        parts = [F.pad(p, (0, width - p.shape[-1]), value=-1) for p in parts]
    return torch.cat(list(parts), dim=2)
