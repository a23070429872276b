"""Blocks that differ by a shift alone, given to the fused kernel in one call over strided views."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from regard.engine.blocks import Block
from regard.pieces.mask import Both, Either, Mask, Not

#: Bytes of output that one call may make: what stays in cache is copied to its place for little.
CALL_BYTES = 2 << 20


@dataclass(frozen=True)
class Run:
    """`count` blocks: the first, and each of the others as many queries and keys further as a block has queries."""

    first: Block
    count: int = 1

    @property
    def rows(self) -> slice:
        return slice(self.first.start, self.first.start + self.count * self.size)

    @property
    def size(self) -> int:
        return self.first.stop - self.first.start

    def views(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of one batch entry, (heads, n, width), as (count, heads, ..., width): no copies."""
        ((left, right),) = self.first.columns
        keys = (left, right - left)
        return (
            self._view(query, self.first.start, self.size),
            self._view(key, *keys),
            self._view(value, *keys),
        )

    def _view(self, x: Tensor, start: int, length: int) -> Tensor:
        heads, along, across = x.stride()
        shape = (self.count, x.shape[0], length, x.shape[2])
        strides = (self.size * along, heads, along, across)
        return x.as_strided(shape, strides, x.storage_offset() + start * along)


def runs(blocks: Iterable[Block], most: int) -> Iterator[Run]:
    """Consecutive blocks that differ by a shift alone, at most `most` of them together."""
    run: Run | None = None
    for block in blocks:
        if run is not None and run.count < most and _follows(run, block):
            run = replace(run, count=run.count + 1)
            continue
        if run is not None:
            yield run
        run = Run(block)
    if run is not None:
        yield run


def _follows(run: Run, block: Block) -> bool:
    first, shift = run.first, run.count * run.size
    if (block.start, block.stop, block.batch) != (first.start + shift, first.stop + shift, first.batch):
        return False
    if len(block.columns.intervals) != 1 or block.columns != first.columns.shift(shift):
        return False
    if block.full or first.full:
        return block.full and first.full
    return block.mask is not None and block.mask.relative and _same(block.mask, first.mask)


def _same(one: Mask | None, other: Mask | None) -> bool:
    if isinstance(one, Both | Either) and type(one) is type(other):
        return _same(one.left, other.left) and _same(one.right, other.right)  # type: ignore[union-attr]
    if isinstance(one, Not) and isinstance(other, Not):
        return _same(one.mask, other.mask)
    return one == other
