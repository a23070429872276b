"""The zoom levels of a map: cells of 2^n x 2^n weights, each with the sum over its keys and its largest weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.maps.reductions import Reduction, Shape, State, Tile, zeros


def cells(weights: Tensor, size: int, top: int = 0, left: int = 0) -> tuple[Tensor, Tensor]:
    """Weights (..., i, j) as cells of `size` x `size`: sums, and largest weights.

    The first weight is at (`top`, `left`) of its cell.

    >>> [part.tolist() for part in cells(torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.25, 0.75]]), 2)]
    [[[1.25, 0.75]], [[0.5, 0.75]]]
    """
    if size == 1:
        return weights, weights
    i, j = weights.shape[-2:]
    margins = (left, -(left + j) % size, top, -(top + i) % size)
    padded = F.pad(weights, margins) if any(margins) else weights
    rows = padded.unflatten(-2, (-1, size))  # rows first: sums of whole rows are fast and leave few numbers
    sums, greatest = rows.sum(-2), rows.amax(-2)
    return sums.unflatten(-1, (-1, size)).sum(-1), greatest.unflatten(-1, (-1, size)).amax(-1)


def averaged(sums: Tensor, size: int, num_rows: int, first: int = 0) -> Tensor:
    """Sums of cells divided by their numbers of queries, so that a row of cells sums to the same as a row of weights.

    `first` is the index of the first row of cells in the map; the map has `num_rows` queries.
    """
    starts = torch.arange(first, first + sums.shape[-2], device=sums.device) * size
    return sums / (num_rows - starts).clamp(1, size)[:, None]


@dataclass(frozen=True)
class Pyramid(Reduction):
    """One level: cells of 2^level x 2^level, sums over keys averaged over queries, and maxima; (B, H, i, j) each."""

    level: int

    def init(self, shape: Shape, device: torch.device) -> State:
        B, H, I, J = shape
        rows, cols = (-(-n // (1 << self.level)) for n in (I, J))
        return [*(zeros(device, B, H, rows, cols) for _ in range(2)), torch.tensor(I, device="cpu")]

    def add(self, state: State, tile: Tile) -> None:
        size = 1 << self.level
        row, col = tile.rows.start // size, tile.cols.start // size
        sums, greatest = cells(tile.weights, size, tile.rows.start % size, tile.cols.start % size)
        place = (..., slice(row, row + sums.shape[-2]), slice(col, col + sums.shape[-1]))
        state[0][place] += sums
        state[1][place] = torch.maximum(state[1][place], greatest)

    def merge(self, state: State, other: State) -> State:
        return [state[0] + other[0], torch.maximum(state[1], other[1]), state[2]]

    def finish(self, state: State) -> tuple[Tensor, Tensor]:
        return averaged(state[0], 1 << self.level, int(state[2])), state[1]


def coarser(
    pooled: tuple[Tensor, Tensor], steps: int, level: int, num_rows: int, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Cells of `level + steps` from cells of `level`: 2^steps x 2^steps cells become one. Exact, as if pooled at once.

    `first`, the index of the first row of cells in the map, is a multiple of 2^steps.
    """
    mean, greatest = pooled
    starts = torch.arange(first, first + mean.shape[-2], device=mean.device) * (1 << level)
    sums = mean * (num_rows - starts).clamp(1, 1 << level)[:, None]
    total = cells(sums, 1 << steps)[0]
    return averaged(total, 1 << (level + steps), num_rows, first >> steps), cells(greatest, 1 << steps)[1]
