"""The plan of a mask: for each block of queries, which keys it needs. O(n / block), no n x n."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.pieces.mask import Mask
from regard.positions import Positions
from regard.spans import Spans

#: One stretch of keys is read as a whole where it is at most this much longer than what is needed of it.
HULL_SLACK = 1.25
#: What rows that may attend to nothing read, masked, so that they are rows like any other.
FIRST_KEY = Spans(((0, 1),))


@dataclass(frozen=True)
class Block:
    """Queries [start, stop) need the keys at indices `columns`; `full` says they may attend to all of those."""

    start: int
    stop: int
    columns: Spans
    full: bool

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    def index(self, device: torch.device | str) -> slice | Tensor:
        """The columns as a slice where they are one stretch, so that reading them copies nothing."""
        if len(self.columns.intervals) == 1:
            return slice(*self.columns.intervals[0])
        return self.columns.tensor(device)


def blocks(mask: Mask | None, positions: Positions, num_queries: int, size: int) -> Iterator[Block]:
    """Cut the queries into blocks of `size` and ask the mask what each of them may see."""
    for start in range(0, num_queries, size):
        yield _block(mask, positions, start, min(start + size, num_queries))


def whole(mask: Mask | None, positions: Positions, num_queries: int) -> Block:
    """All queries against all keys, as one block."""
    block = _block(mask, positions, 0, num_queries)
    everything = Spans(((0, len(positions.keys)),))
    return Block(0, num_queries, everything, block.full and block.columns == everything)


def _block(mask: Mask | None, positions: Positions, start: int, stop: int) -> Block:
    everything = Spans(((0, len(positions.keys)),))
    if mask is None:
        return Block(start, stop, everything, True)
    first, last = start + positions.start, stop + positions.start
    columns = positions.columns(mask.may(first, last))
    if len(columns.hull()) <= HULL_SLACK * len(columns):
        columns = columns.hull()
    columns = columns or FIRST_KEY
    return Block(start, stop, columns, positions.columns(mask.all(first, last)).covers(columns))


def mean_width(mask: Mask | None, positions: Positions, num_queries: int, size: int = 64, samples: int = 8) -> float:
    """About how many keys a block of `size` queries needs, from a few blocks."""
    step = max(num_queries // samples, 1)
    starts = range(0, num_queries, step)
    found = [len(_block(mask, positions, s, min(s + size, num_queries)).columns) for s in starts]
    return sum(found) / len(found)
