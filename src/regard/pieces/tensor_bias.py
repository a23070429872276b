"""Biases that hold a tensor which a model or a call adds to its scores."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.base.positions import Positions
from regard.base.shapes import has_numbers
from regard.pieces.bias import AdditiveBias, State, prepared_part
from regard.pieces.grid import Grid, at

#: The axes of a tensor of scores.
AXES = ("batch entries", "heads", "queries", "keys")


@dataclass(frozen=True, eq=False)
class DiagonalBias(AdditiveBias):
    """A number for each head and distance j - i: the table (H or 1, I + J - 1) begins at the lowest distance."""

    table: Tensor = field(repr=False)
    lowest: int
    relative = True

    def term(self, grid: Grid, rows: Tensor | None, cols: Tensor | None) -> Tensor:
        heads = self.table if len(self.table) == 1 else at("DiagonalBias", "heads", self.table, 0, grid.head)
        return heads[:, grid.distance[0, 0] - self.lowest][None]


@dataclass(frozen=True, eq=False)
class TensorBias(AdditiveBias):
    """A tensor (B or 1, H or 1, I or 1, J or 1), kept whole.

    `start` is the position of its first query, `first` that of its first key.
    """

    tensor: Tensor = field(repr=False)
    start: int
    first: int = field(default=0, repr=False)

    def term(self, grid: Grid, rows: Tensor | None, cols: Tensor | None) -> Tensor:
        t = self.tensor
        indices = grid.batch, grid.head, grid.query - self.start, grid.key - self.first
        for axis, (name, index) in enumerate(zip(AXES, indices, strict=True)):
            t = t if t.shape[axis] == 1 else at("TensorBias", name, t, axis, index)
        return t


@dataclass(frozen=True, eq=False)
class LearnedBias(AdditiveBias):
    """A tensor (B or 1, H or 1, I, J) that receives gradients: engines slice its rows together with the queries.

    `positions` are those of its rows and columns. Keys are consecutive.
    """

    tensor: Tensor = field(repr=False)
    positions: Positions

    def prepare(self, query: Tensor, key: Tensor, positions: Positions) -> State:
        return self.tensor.expand(-1, query.shape[1], query.shape[2], key.shape[2]), None

    def term(self, grid: Grid, rows: Tensor | None, cols: Tensor | None) -> Tensor:
        rows = prepared_part("LearnedBias", rows)
        return rows[..., grid.key - self.positions.keys.intervals[0][0]]


def bias_of(tensor: Tensor, positions: Positions, num_queries: int, num_keys: int) -> AdditiveBias:
    """The bias that adds a (B or 1, H or 1, I, J) tensor; O(I + J) memory if it depends on head and j - i alone.

    >>> bias_of(torch.arange(3.0).expand(1, 1, 3, 3), Positions.of(0, 3, 3), 3, 3)
    TensorBias(start=0)
    """
    tensor = tensor.detach()
    may_be_diagonal = tensor.shape[2:] == (num_queries, num_keys) and tensor.shape[0] == 1 and has_numbers(tensor)
    if may_be_diagonal and torch.equal(tensor[:, :, 1:, 1:], tensor[:, :, :-1, :-1]):
        # the first column from the last query to the first, then the rest of the first row: ascending j - i
        table = torch.cat((tensor[0, :, :, 0].flip(-1), tensor[0, :, 0, 1:]), -1)
        return DiagonalBias(table, positions.keys.intervals[0][0] - positions.start - num_queries + 1)
    return TensorBias(tensor, positions.start, positions.keys.intervals[0][0])
