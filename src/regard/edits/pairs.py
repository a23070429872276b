"""The pairs that an edit selects in one layer, as a mask that forbids them and as a bias that adds to their scores."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from regard.base.shapes import widest_float
from regard.base.spans import EVERYTHING, Spans
from regard.edits.indices import EVERY, Indices
from regard.pieces.bias import AdditiveBias
from regard.pieces.grid import Grid
from regard.pieces.mask import Mask


@dataclass(frozen=True)
class Pairs:
    """Heads, queries and keys: every query of the set with every key of the set.

    Queries and keys are numbered in the whole sequence. An attention may number them otherwise (a window of a cache):
    the number of a query is its position + `query_shift`, that of a key its position + `key_shift`.
    """

    heads: Indices = EVERY
    queries: Indices = EVERY
    keys: Indices = EVERY
    query_shift: int = 0
    key_shift: int = 0

    def rows(self, grid: Grid) -> Tensor:
        """For each row of a tile, whether its head and its query are selected: (1, H or 1, I, 1)."""
        queries = self.queries.contain(grid.i + self.query_shift)
        return queries if self.heads.is_everything else self.heads.contain(grid.h) & queries

    def columns(self, grid: Grid) -> Tensor:
        """For each key of a tile, whether it is selected: (1, 1, 1, J)."""
        return self.keys.contain(grid.j + self.key_shift)

    def cells(self, grid: Grid) -> Tensor:
        """For each pair of a tile, whether it is selected: (1, H or 1, I, J)."""
        return self.rows(grid) & self.columns(grid)


@dataclass(frozen=True)
class KnockedOut(Mask):
    """All pairs but the selected ones.

    >>> import regard as rg
    >>> pairs = Pairs(queries=Indices.of(2), keys=Indices.of(0, 1))
    >>> KnockedOut(pairs).dense(3).int().tolist()
    [[1, 1, 1], [1, 1, 1], [0, 0, 1]]
    """

    pairs: Pairs
    batched = False

    def allowed(self, grid: Grid) -> Tensor:
        return ~self.pairs.cells(grid)

    def any_allowed(self, start: int, stop: int) -> Spans:
        pairs, queries = self.pairs, Spans.of((start, stop)).shift(self.pairs.query_shift)
        if pairs.heads.is_everything and pairs.queries.core().covers(queries):
            return ~pairs.keys.core().shift(-pairs.key_shift)
        return EVERYTHING

    def all_allowed(self, start: int, stop: int) -> Spans:
        pairs, queries = self.pairs, Spans.of((start, stop)).shift(self.pairs.query_shift)
        if not pairs.queries.hull() & queries:
            return EVERYTHING
        return ~pairs.keys.hull().shift(-pairs.key_shift)

    def __repr__(self) -> str:
        return "knocked-out pairs"


@dataclass(frozen=True)
class AddedToScores(AdditiveBias):
    """A number that is added to the scores of the selected pairs."""

    pairs: Pairs
    amount: float

    def term(self, grid: Grid, rows: Tensor | None, cols: Tensor | None) -> Tensor:
        return self.pairs.cells(grid).to(widest_float(grid.device)) * self.amount
