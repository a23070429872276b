"""The plan of a mask: for each block of queries, which keys it needs. O(n / block), no n x n."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from regard.pieces.mask import Mask
from regard.positions import Positions
from regard.spans import Spans

#: One stretch of keys is read as a whole where it is at most this much longer than what is needed of it.
HULL_SLACK = 1.25
#: What rows that may attend to nothing read, masked, so that they are rows like any other.
FIRST_KEY = Spans(((0, 1),))


#: A block is cut in two where that leaves at most this share of its pairs.
WORTH_CUTTING = 0.8
#: Queries of the blocks that are looked at to learn what is usual.
SAMPLE = 64


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

    @property
    def pairs(self) -> int:
        return (self.stop - self.start) * len(self.columns)

    def index(self, device: torch.device | str) -> slice | Tensor:
        """The columns as a slice where they are one stretch, so that reading them copies nothing."""
        if len(self.columns.intervals) == 1:
            return slice(*self.columns.intervals[0])
        return self.columns.tensor(device)


def blocks(
    mask: Mask | None, positions: Positions, num_queries: int, size: int, most_pairs: int | None = None
) -> Iterator[Block]:
    """Cut the queries into blocks of `size` and ask the mask what each of them may see.

    A block that needs far more keys than most, because of a few rows that see everything, is cut
    around those rows; none holds more than `most_pairs` pairs, unless it is a single row.
    """
    usual = size + usual_width(mask, positions, num_queries, min(size, SAMPLE))
    for start in range(0, num_queries, size):
        block = _block(mask, positions, start, min(start + size, num_queries))
        yield from _cut(mask, positions, block, 2 * usual, most_pairs)


def _cut(
    mask: Mask | None, positions: Positions, block: Block, usual: float, most_pairs: int | None
) -> Iterator[Block]:
    rows = block.stop - block.start
    if rows == 1 or not (len(block.columns) > usual or (most_pairs and rows * len(block.columns) > most_pairs)):
        yield block
        return
    middle = block.start + rows // 2
    halves = [_block(mask, positions, *ends) for ends in ((block.start, middle), (middle, block.stop))]
    too_large = most_pairs is not None and block.pairs > most_pairs
    if not too_large and sum(half.pairs for half in halves) > WORTH_CUTTING * block.pairs:
        yield block
        return
    for half in halves:
        yield from _cut(mask, positions, half, usual, most_pairs)


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


def usual_width(mask: Mask | None, positions: Positions, num_queries: int, size: int) -> float:
    """How many keys a block of `size` queries needs: the median over blocks spread along the sequence."""
    return median(len(block.columns) for block in _samples(mask, positions, num_queries, size))


def cheapest_size(mask: Mask | None, positions: Positions, num_queries: int, sizes: Sequence[int], call: float) -> int:
    """The size of block for which pairs, and `call` pairs' worth of work for each block, are fewest."""

    def cost(size: int) -> float:
        return (size * usual_width(mask, positions, num_queries, size) + call) / size

    return min(sizes, key=cost)


def _samples(mask: Mask | None, positions: Positions, num_queries: int, size: int, count: int = 9) -> Iterator[Block]:
    blocks = -(-num_queries // size)
    for number in sorted({(2 * n + 1) * blocks // (2 * count) for n in range(count)}):
        yield _block(mask, positions, number * size, min((number + 1) * size, num_queries))
