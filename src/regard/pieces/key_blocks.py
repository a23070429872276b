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

    `table` has the number of the block of each position up to the last key or query, (B or 1, n). Of each block
    `num_keys` is the number of keys, `end` the position after the last, `place` its number in its document, from 0:
    (B or 1, M). `of_keys` has the block of each key, and `is_real` is False for padding, (B or 1, J).
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
        """The blocks of a call. Those of keys that a cache has forgotten count too.

        The rank of a token is the number of real tokens of its document before it (`token_ranks.py`), so a block begins
        at each real token whose rank is a multiple of the size.
        """
        key_stop, query_stop = (int(x[-1]) + 1 if len(x) else 0 for x in (grid.key, grid.query))
        position = torch.arange(max(key_stop, query_stop, 0), device=grid.device)
        ranks = TokenRanks.of(mask, Grid(grid.batch, grid.head, grid.query, position[:key_stop]))
        is_real = F.pad(ranks.is_real, (0, len(position) - key_stop), value=True)  # queries after the last key
        rank = torch.cat((ranks.rank, position[key_stop:].expand(len(ranks.rank), -1)), 1)
        is_real, rank = torch.broadcast_tensors(is_real, rank)
        table = ((is_real & (rank % size == 0)).cumsum(1) - 1).clamp(min=0)  # padding: the block before it, or 0
        zeros = table.new_zeros(len(table), int(table.max()) + 1 if table.numel() else 0)
        end, place = (zeros.scatter_reduce(1, table, x * is_real, "amax") for x in (position + 1, rank // size))
        num_keys = zeros.scatter_add(1, table, is_real.long())
        return KeyBlocks(size, table, num_keys, end, place, table[:, grid.key], is_real[:, grid.key])

    @property
    def count(self) -> int:
        """The number of blocks, of the batch entry that has the most."""
        return self.num_keys.shape[1]

    @property
    def irregular(self) -> Tensor | None:
        """The table; None if the block of every position is position // size."""
        position = torch.arange(self.table.shape[1], device=self.table.device)
        return None if bool((self.table == position // self.size).all()) else self.table

    def of_queries(self, positions: Tensor) -> Tensor:
        """The block of each query at these positions (rows,): (B or 1, rows); -1 before position 0."""
        return self.table[:, positions.clamp(min=0)].masked_fill(positions < 0, -1)

    def sums(self, x: Tensor, axis: int, keys: Tensor | slice = slice(None)) -> Tensor:
        """Sums over the keys of each block: `axis` of `x` (B or 1, ...) runs over keys, that of the result over blocks.

        `keys` are indices of keys, by default all. The result has a row for each batch entry if the blocks have one.
        """
        blocks, shape = self.of_keys[:, keys], [*x.shape]
        shape[axis] = self.count
        if len(blocks) == 1:
            return x.new_zeros(shape).index_add_(axis, blocks[0], x)
        index = blocks.view(len(blocks), *(-1 if a == axis else 1 for a in range(1, x.ndim)))
        shape[0] = max(shape[0], len(blocks))
        x, index = torch.broadcast_tensors(x, index)
        return x.new_zeros(shape).scatter_add_(axis, index, x)
