"""`KeyBlocks`: the blocks of keys that a selection compares."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.pieces.grid import Grid
from regard.pieces.mask import Mask
from regard.pieces.token_ranks import TokenRanks


@dataclass(frozen=True)
class KeyBlocks:
    """Blocks of `size` keys. They begin anew with each packed document, and padding is in none of them.

    So a packed document, or a padded text, has the blocks that it has alone. The authors' code of MoBA and that of NSA
    in flash-linear-attention cut packed sequences in this way. Other masks move no border of a block.

    `table` has the block of each position up to the last key or query, (B or 1, n). Of each block `num_keys` is the
    number of keys, `end` the position after the last, `place` its number in the document: (B or 1, M). `of_keys` and
    `is_real` tell of each key its block and whether it is no padding, (B or 1, J).
    """

    size: int
    table: Tensor
    num_keys: Tensor
    end: Tensor
    place: Tensor
    of_keys: Tensor
    is_real: Tensor

    @staticmethod
    def of(size: int, mask: Mask | None, grid: Grid) -> KeyBlocks:
        """The blocks of a call. Those of keys that a cache has forgotten count too."""
        num_keys, last_query = (int(x[-1]) + 1 if len(x) else 0 for x in (grid.key, grid.query))
        position = torch.arange(max(num_keys, last_query, 0), device=grid.device)
        ranks = TokenRanks.of(mask, Grid(grid.batch, grid.head, grid.query, position[:num_keys]))
        is_real = F.pad(ranks.is_real, (0, len(position) - num_keys), value=True)  # queries after the last key
        rank = torch.cat((ranks.rank, position[num_keys:].expand(len(ranks.rank), -1)), 1)
        is_real, rank = torch.broadcast_tensors(is_real, rank)
        table = ((is_real & (rank % size == 0)).cumsum(1) - 1).clamp(min=0)
        none = table.new_zeros(len(table), int(table.max()) + 1 if table.numel() else 0)
        end, place = (none.scatter_reduce(1, table, x * is_real, "amax") for x in (position + 1, rank // size))
        counts = none.scatter_add(1, table, is_real.long())
        return KeyBlocks(size, table, counts, end, place, table[:, grid.key], is_real[:, grid.key])

    @property
    def count(self) -> int:
        return self.num_keys.shape[1]

    @property
    def irregular(self) -> Tensor | None:
        """The table, unless the block of every position is position // size."""
        position = torch.arange(self.table.shape[1], device=self.table.device)
        return None if bool((self.table == position // self.size).all()) else self.table

    def of_queries(self, positions: Tensor) -> Tensor:
        """The block of each query, (B or 1, rows); -1 before position 0."""
        return self.table[:, positions.clamp(min=0)].masked_fill(positions < 0, -1)

    def sums(self, x: Tensor, axis: int, keys: Tensor | slice = slice(None)) -> Tensor:
        """Sums over the keys of each block: `axis` of `x` (B or 1, ...) runs over `keys`, and then over blocks."""
        blocks, shape = self.of_keys[:, keys], [*x.shape]
        shape[axis] = self.count
        if len(blocks) == 1:
            return x.new_zeros(shape).index_add_(axis, blocks[0], x)
        index = blocks.view(len(blocks), *(-1 if a == axis else 1 for a in range(1, x.ndim)))
        shape[0] = max(shape[0], len(blocks))
        x, index = torch.broadcast_tensors(x, index)
        return x.new_zeros(shape).scatter_add_(axis, index, x)
