"""Where a tile of scores stands: which batch entries, heads, queries and keys it holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.positions import Positions


@dataclass(frozen=True, eq=False)
class Grid:
    """Coordinates of a tile. `b`, `h`, `i`, `j` broadcast against a (B, H, I, J) tile of scores.

    `i` and `j` are positions, so `grid.j <= grid.i` is causality whatever the chunk or cache.

    >>> import regard as rg
    >>> grid = rg.Grid.whole(rg.Positions.aligned_to_end(2, 3), B=1, H=1, I=2)
    >>> grid.i.flatten().tolist(), grid.distance[0, 0].tolist()  # j - i
    ([1, 2], [[-1, 0, 1], [-2, -1, 0]])
    """

    batch: Tensor
    head: Tensor
    query: Tensor
    key: Tensor

    @staticmethod
    def whole(positions: Positions, B: int, H: int, I: int, device: torch.device | str = "cpu") -> Grid:
        return Grid(
            torch.arange(B, device=device),
            torch.arange(H, device=device),
            positions.query(slice(0, I), device),
            positions.key(device),
        )

    def tile(self, rows: slice | Tensor, cols: slice | Tensor) -> Grid:
        return Grid(self.batch, self.head, self.query[rows], self.key[cols])

    def entries(self, entries: slice) -> Grid:
        """The same tile of some batch entries."""
        return Grid(self.batch[entries], self.head, self.query, self.key)

    @property
    def b(self) -> Tensor:
        return self.batch.view(-1, 1, 1, 1)

    @property
    def h(self) -> Tensor:
        return self.head.view(1, -1, 1, 1)

    @property
    def i(self) -> Tensor:
        return self.query.view(1, 1, -1, 1)

    @property
    def j(self) -> Tensor:
        return self.key.view(1, 1, 1, -1)

    @property
    def distance(self) -> Tensor:
        """j - i: negative to the past, positive to the future; (1, 1, I, J)."""
        return self.j - self.i

    @property
    def device(self) -> torch.device:
        return self.query.device
