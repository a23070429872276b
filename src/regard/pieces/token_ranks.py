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
        before = real.cumsum(1) - real.long()  # of the whole sequence
        begun = torch.where(begins, before, 0)
        return TokenRanks(real, before - (begun.cummax(1).values if begun.numel() else begun))
