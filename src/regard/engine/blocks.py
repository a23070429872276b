"""The blocks of a mask: for each block of queries, the keys that it needs, in O(n / block) time and memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor

from regard.base.positions import Positions
from regard.base.spans import Spans
from regard.pieces.mask import Mask

#: A block reads one interval of keys if that is at most this many times as long as the needed keys.
HULL_SLACK = 1.25
#: Rows that may attend to no key read this one, masked, so that no block is without keys.
FIRST_KEY = Spans(((0, 1),))
#: A block is cut in two if the halves have at most this share of its pairs.
WORTH_CUTTING = 0.8
#: Largest number of queries in a sample block. Sample blocks show how many keys a block usually needs.
SAMPLE = 64
#: How many sample blocks are looked at.
SAMPLES = 9


@dataclass(frozen=True)
class Block:
    """Queries [start, stop) and the keys at indices `columns` that they need.

    `full` says that each of these queries may attend to each of these keys. `mask` is the sub-mask that still has to
    be evaluated here. `batch` is the batch entry of the block, None for all entries.
    """

    start: int
    stop: int
    columns: Spans
    full: bool
    mask: Mask | None = None
    batch: int | None = None

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def entries(self) -> slice:
        return slice(None) if self.batch is None else slice(self.batch, self.batch + 1)

    @property
    def pairs(self) -> int:
        return (self.stop - self.start) * len(self.columns)

    @property
    def causal_pairs(self) -> int:
        """The pairs of the kernel's causal flag: query i of the block sees its first i + 1 keys."""
        square = min(self.stop - self.start, len(self.columns))
        return square * (square + 1) // 2 + (self.stop - self.start - square) * len(self.columns)

    def index(self, device: torch.device | str) -> slice | Tensor:
        """The columns; a slice if they are one interval, so that indexing copies nothing."""
        if len(self.columns.intervals) == 1:
            return slice(*self.columns.intervals[0])
        return self.columns.tensor(device)


def blocks(
    mask: Mask | None,
    positions: Positions,
    num_queries: int,
    size: int,
    too_large: Callable[[Block], bool] = lambda block: False,
    keep_large: bool = False,
) -> Iterator[Block]:
    """Cut the queries at the edges that the mask names, then into blocks of `size`, each with the keys it needs.

    A few rows that attend to all keys make a block need far more keys than other blocks. Such a block is cut around
    these rows. A block that is `too_large` is cut too, down to a single row. `keep_large` does not split blocks without
    a mask, or that the kernel's causal flag masks: no pair would be saved.
    """
    # a window moves with the queries, so a block needs at most `size` keys more than a small block
    usual = size + usual_width(mask, positions, num_queries, min(size, SAMPLE))
    known: dict[int, Block] = {}  # by the number of queries: see `_shifted`
    for first, last in pairwise(query_edges(mask, positions, num_queries)):
        if keep_large and last - first > size:
            block = _block(mask, positions, first, last)
            if block.full or starts_causal(block, positions):
                yield block
                continue
        for start in range(first, last, size):
            block = _shifted(mask, positions, start, min(start + size, last), known)
            yield from _cut(mask, positions, block, 2 * usual, too_large)


def starts_causal(block: Block, positions: Positions) -> bool:
    """Whether the causal flag of the kernel masks this block: its first query stands at its first key."""
    keys, columns = positions.keys.intervals, block.columns.intervals
    if block.mask is None or len(keys) != 1 or len(columns) != 1:
        return False
    is_aligned = keys[0][0] + columns[0][0] == positions.start + block.start
    return is_aligned and block.mask.is_lower_triangular


def query_edges(mask: Mask | None, positions: Positions, num_queries: int) -> list[int]:
    """Query indices of the first cuts: the edges that the mask names, at least SAMPLE queries apart."""
    edges = [0]
    for edge in () if mask is None else mask.edges(positions.start, positions.start + num_queries):
        if edge - positions.start - edges[-1] >= SAMPLE:
            edges.append(edge - positions.start)
    return [*edges, num_queries]


def _cut(
    mask: Mask | None, positions: Positions, block: Block, most_keys: float, too_large: Callable[[Block], bool]
) -> Iterator[Block]:
    """The block; or its halves, cut again, if it is too large, or has more than `most_keys` and halves save pairs."""
    rows, large = block.stop - block.start, too_large(block)
    if rows == 1 or not (large or len(block.columns) > most_keys):
        yield block
        return
    middle = block.start + rows // 2
    halves = [_block(mask, positions, *ends) for ends in ((block.start, middle), (middle, block.stop))]
    if not large and sum(half.pairs for half in halves) > WORTH_CUTTING * block.pairs:
        yield block
        return
    for half in halves:
        yield from _cut(mask, positions, half, most_keys, too_large)


def whole(mask: Mask | None, positions: Positions, num_queries: int) -> Block:
    """All queries against all keys, as one block, also if the mask needs fewer keys."""
    block = _block(mask, positions, 0, num_queries)
    everything = Spans(((0, len(positions.keys)),))
    full = block.full and block.columns == everything
    return Block(0, num_queries, everything, full, block.mask if block.columns == everything else mask)


def _block(mask: Mask | None, positions: Positions, start: int, stop: int) -> Block:
    """The block of queries [start, stop), from the answers of the mask.

    Indices of keys are shifted positions only if the positions are consecutive. With gaps the whole mask remains.
    """
    everything = Spans(((0, len(positions.keys)),))
    if mask is None:
        return Block(start, stop, everything, True)
    first, last = start + positions.start, stop + positions.start
    columns = positions.columns(mask.any_allowed(first, last))
    if len(columns.hull()) <= HULL_SLACK * len(columns):
        columns = columns.hull()
    columns = columns or FIRST_KEY
    if len(positions.keys.intervals) != 1:
        full = positions.columns(mask.all_allowed(first, last)).covers(columns)
        return Block(start, stop, columns, full, None if full else mask)
    remaining = mask.remaining(first, last, columns.shift(positions.keys.intervals[0][0]))
    return Block(start, stop, columns, remaining is None, remaining)


def _shifted(mask: Mask | None, positions: Positions, start: int, stop: int, known: dict[int, Block]) -> Block:
    """The block of queries [start, stop).

    For a relative mask, reuse an earlier block, shifted, if its keys stay inside the sequence. `known` holds the last
    block of each size whose keys the ends of the sequence do not cut off: such a block is no pattern for others.
    """
    if mask is None or not mask.relative or len(positions.keys.intervals) != 1:
        return _block(mask, positions, start, stop)
    size = stop - start
    earlier = known.get(size)
    if earlier is not None:
        columns = earlier.columns.shift(start - earlier.start)
        if columns.intervals[0][0] >= 0 and columns.intervals[-1][1] <= len(positions.keys):
            return Block(start, stop, columns, earlier.full, earlier.mask)
    block = _block(mask, positions, start, stop)
    if (
        positions.keys.covers(mask.any_allowed(start + positions.start, stop + positions.start))
        and block.columns != FIRST_KEY
    ):
        known[size] = block
    return block


def usual_width(mask: Mask | None, positions: Positions, num_queries: int, size: int) -> float:
    """Number of keys that a block of `size` queries needs: the median over sample blocks."""
    edges = query_edges(mask, positions, num_queries)
    return median(len(block.columns) for block in _samples(mask, positions, edges, size))


def cheapest_size(
    mask: Mask | None,
    positions: Positions,
    num_queries: int,
    sizes: Sequence[int],
    call: float,
    pace: Callable[[int], float],
) -> int:
    """The one of these block sizes with the least cost: pairs times `pace(size)`, plus `call` for each block.

    Costs are in pairs of one head.
    """
    edges = query_edges(mask, positions, num_queries)

    def cost(size: int) -> float:
        samples = _samples(mask, positions, edges, size)
        return median(len(block.columns) * pace(size) + call / (block.stop - block.start) for block in samples)

    return min(sizes, key=cost)


def _samples(mask: Mask | None, positions: Positions, edges: list[int], size: int) -> Iterator[Block]:
    """At most SAMPLES blocks of `size` queries, spread evenly along the sequence.

    `edges` are the queries at which a block must begin, with the ends of the sequence.
    """
    ends = set()
    for number in range(SAMPLES):
        place = (2 * number + 1) * edges[-1] // (2 * SAMPLES)
        at = bisect_right(edges, place) - 1
        first = edges[at] + (place - edges[at]) // size * size
        ends.add((first, min(first + size, edges[at + 1])))  # the block that holds the query `place`
    for start, stop in sorted(ends):
        yield _block(mask, positions, start, stop)
