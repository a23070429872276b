"""The place of each token in its document: blocks and groups of keys begin anew with a document, and skip padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.pieces.grid import Grid
from regard.pieces.mask import Mask, conjuncts


@dataclass(frozen=True)
class TokenRanks:
    """Which keys are real, and how many real keys of its document are before each: both (B or 1, J)."""

    is_real: Tensor
    rank: Tensor

    @staticmethod
    def of(mask: Mask | None, grid: Grid) -> TokenRanks:
        """Padding and packed documents are read from the masks that `&` joins; other masks have neither.

        >>> import regard as rg
        >>> grid = rg.types.Grid.whole(rg.types.Positions.aligned_to_end(5, 5), 1, 1, 5)
        >>> real = torch.tensor([[False, True, True, True, True]])
        >>> TokenRanks.of(rg.documents([3, 2]) & rg.padding(real), grid).rank.tolist()
        [[0, 0, 1, 0, 1]]
        """
        real = torch.ones(1, len(grid.key), dtype=torch.bool, device=grid.device)
        begins = ~real
        one_row = Grid(grid.batch, grid.head, grid.key.new_zeros(1), grid.key)
        for part in () if mask is None else conjuncts(mask):
            if part.keys_only and (allowed := part.allowed(one_row)).shape[1] == 1:
                real = real & allowed[:, 0, 0]
            elif (numbers := part.numbers(one_row)) is not None:
                of_keys = numbers[1].view(-1, len(grid.key))
                begins = begins | F.pad(of_keys.diff() != 0, (1, 0))
        num_before = real.cumsum(1) - real.long()  # real keys of the whole sequence before each key
        # the same number where the document of the key begins: it never falls, so it is the greatest so far
        at_begin = torch.where(begins, num_before, 0)
        return TokenRanks(real, num_before - (at_begin.cummax(1).values if at_begin.numel() else at_begin))

    def groups(self, size: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Groups of `size` real keys of one document. They begin at its first, and at each `step`-th real key after it.

        Returns the M groups that some entry of the batch has: `keys` (B or 1, M, size), the indices of the keys of each
        group; `last` (M,), the index of its last key, which is the same in all entries; `is_own` (B or 1, M), whether
        the entry has the group. Where it does not, `keys` means nothing.

        >>> ranks = TokenRanks(torch.tensor([[True, True, False, True, True]]), torch.tensor([[0, 1, 2, 2, 3]]))
        >>> keys, last, is_own = ranks.groups(2, 2)
        >>> keys.tolist(), last.tolist(), is_own.tolist()
        ([[[0, 1], [3, 4]]], [1, 4], [[True, True]])
        """
        is_real, rank = torch.broadcast_tensors(self.is_real, self.rank)
        is_last = is_real & (rank + 1 >= size) & ((rank + 1 - size) % step == 0)
        last = is_last.any(0).nonzero().flatten()
        real_keys = (~is_real).int().argsort(dim=1, stable=True)  # of each entry, in their order; padding comes after
        first = (is_real.cumsum(1) - size)[:, last, None]  # place in `real_keys`; below 0 where there is no group
        places = (first + torch.arange(size, device=is_real.device)).clamp(min=0)
        return real_keys.gather(1, places.flatten(1)).unflatten(1, (-1, size)), last, is_last[:, last]
