"""Runs: blocks that differ only by a shift, in one call of the fused kernel for each entry, over strided views."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from regard.engine.blocks import Block

#: Bytes of output of one call: an output that still is in the cache is cheap to copy to its place.
CALL_BYTES = 2 << 20


@dataclass(frozen=True)
class BlockRun:
    """`count` blocks, each the previous one shifted by the block size, in queries and in keys."""

    first: Block
    count: int = 1

    @property
    def rows(self) -> slice:
        """The queries of all blocks."""
        return slice(self.first.start, self.first.start + self.count * self.size)

    @property
    def size(self) -> int:
        """The queries of one block."""
        return self.first.stop - self.first.start

    def views(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of one batch entry: queries, keys and values (heads, n, width) -> (count, heads, ..., width).

        The keys of a block overlap those of the next one. They are one interval (`_follows`).
        """
        ((left, right),) = self.first.columns
        keys = (left, right - left)
        return (
            self._view(query, self.first.start, self.size),
            self._view(key, *keys),
            self._view(value, *keys),
        )

    def _view(self, x: Tensor, start: int, length: int) -> Tensor:
        """For each block `length` tokens, from `start` on and `size` further for each next block, without a copy."""
        head_stride, token_stride, channel_stride = x.stride()
        shape = (self.count, x.shape[0], length, x.shape[2])
        strides = (self.size * token_stride, head_stride, token_stride, channel_stride)
        return x.as_strided(shape, strides, x.storage_offset() + start * token_stride)


def runs(blocks: Iterable[Block], most: int) -> Iterator[BlockRun]:
    """Group consecutive blocks that differ only by a shift, at most `most` in one run."""
    run: BlockRun | None = None
    for block in blocks:
        if run is not None and run.count < most and _follows(run, block):
            run = replace(run, count=run.count + 1)
            continue
        if run is not None:
            yield run
        run = BlockRun(block)
    if run is not None:
        yield run


def _follows(run: BlockRun, block: Block) -> bool:
    """Whether the block is the next one of the run: its queries and keys are shifted, and its mask is the same.

    Only a relative mask has the same answers for shifted queries and keys.
    """
    first, shift = run.first, run.count * run.size
    if (block.start, block.stop, block.batch) != (first.start + shift, first.stop + shift, first.batch):
        return False
    if len(block.columns.intervals) != 1 or block.columns != first.columns.shift(shift):
        return False
    if block.full != first.full:
        return False
    return block.full or (block.mask is not None and block.mask.relative and block.mask.is_same(first.mask))
