"""The coordinates of a tile of scores: its batch entries, heads, queries and keys, and what tensors hold for them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import has_numbers
from regard.base.spans import EMPTY, Spans


def along_diagonals(by_distance: Tensor, num_queries: int) -> Tensor:
    """(..., I + J - 1), one number for each j - i -> (..., I, J) with the queries in reverse order, without a copy.

    A matrix whose entries depend on j - i alone is a Toeplitz matrix. Each row holds the numbers of the row below it,
    shifted by one. In reverse order the rows are windows of the one vector `by_distance`.

    >>> along_diagonals(torch.tensor([-1, 0, 1, 2]), num_queries=2).flip(0)  # i = 0 and 1, j = 0, 1, 2
    tensor([[ 0,  1,  2],
            [-1,  0,  1]])
    """
    return by_distance.unfold(-1, by_distance.shape[-1] - num_queries + 1, 1)


@dataclass(frozen=True, eq=False)
class Grid:
    """Coordinates of a tile. `b`, `h`, `i`, `j` broadcast against a (B, H, I, J) tile of scores.

    `i` and `j` are positions, so `grid.j <= grid.i` is the causal mask for any chunk and any cache. `positions` are the
    same positions on the host, if the host knows them: to read the tensors it would have to wait for the device.

    >>> import regard as rg
    >>> grid = rg.types.Grid.whole(rg.types.Positions.aligned_to_end(2, 3), B=1, H=1, I=2)
    >>> grid.i.flatten().tolist(), grid.distance[0, 0].tolist()  # j - i
    ([1, 2], [[-1, 0, 1], [-2, -1, 0]])
    """

    batch: Tensor
    head: Tensor
    query: Tensor
    key: Tensor
    positions: Positions | None = None

    @staticmethod
    def whole(positions: Positions, B: int, H: int, I: int, device: torch.device | str = "cpu") -> Grid:
        """The coordinates of a whole call: B entries, H heads, I queries and all keys of the positions."""
        return Grid(
            torch.arange(B, device=device),
            torch.arange(H, device=device),
            positions.query(slice(0, I), device),
            positions.key(device),
            positions,
        )

    def placed(self, owner: str) -> Positions:
        """The positions; an error that begins with `owner` if the host does not know them."""
        if self.positions is None:
            raise RegardError(
                f"{owner}: the grid has no positions, which say where queries and keys are. Make it with Grid.whole("
                "positions, B, H, I)."
            )
        return self.positions

    def first_pair(self) -> Grid:
        """The first query and the first key, for all entries and heads: answers that differ between these show it."""
        return self.tile(slice(0, 1), slice(0, 1))

    def tile(self, rows: slice | Tensor, cols: slice | Tensor | Spans) -> Grid:
        """The tile of some queries and keys, by their indices."""
        columns = cols.tensor(self.device) if isinstance(cols, Spans) else cols
        return replace(self, query=self.query[rows], key=self.key[columns], positions=self._at(rows, cols))

    def _at(self, rows: slice | Tensor, cols: slice | Tensor | Spans) -> Positions | None:
        """The positions of the queries and keys at these indices; None if the host does not know them."""
        if self.positions is None or isinstance(rows, Tensor) or isinstance(cols, Tensor):
            return None
        queries = range(len(self.query))[rows]
        if isinstance(cols, slice):
            keys = range(len(self.key))[cols]
            cols = Spans.of((keys.start, keys.stop)) if keys.step == 1 else EMPTY
        if queries.step != 1 or not cols:
            return None
        return Positions(self.positions.start + queries.start, self.positions.at(cols))

    def entries(self, entries: slice) -> Grid:
        """The same tile for some batch entries."""
        return replace(self, batch=self.batch[entries])

    def line(self, distances: range) -> Grid:
        """A tile with one query, at position 0, and one key for each of the distances j - i."""
        positions = Positions(0, Spans(((distances.start, distances.stop),)))
        single_query = Grid.whole(positions, 1, 1, 1, self.device)
        return replace(single_query, batch=self.batch, head=self.head)

    def distances(self) -> range | None:
        """All j - i, if the host knows them and both queries and keys have consecutive positions; else None."""
        if self.positions is not None:
            is_contiguous = len(self.positions.keys.intervals) == 1
            return self.positions.distances(len(self.query)) if is_contiguous else None
        if self.device.type != "cpu":
            return None
        if not (len(self.query) and len(self.key)):
            return None
        for positions in (self.query, self.key):
            if not torch.equal(positions, torch.arange(len(positions), device="cpu") + positions[0]):
                return None
        return range(int(self.key[0] - self.query[-1]), int(self.key[-1] - self.query[0]) + 1)

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


def at(piece: str, axis: str, tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    """What a tensor of a piece holds for the batch entries, heads, queries or keys of a tile, by number on axis `dim`.

    `index_select` refuses negative numbers, which indexing would count from the end. Axis 3 is indexed, because that is
    faster for many short rows: it has keys, whose negative positions `check` refuses before a call.
    """
    try:
        return tensor[..., index] if dim == 3 else tensor.index_select(dim, index)
    except (IndexError, RuntimeError):
        check_inside(piece, axis, index, tensor.shape[dim], f"its tensor {tuple(tensor.shape)}")
        raise


def check_inside(piece: str, axis: str, index: Tensor, size: int, holder: str = "it") -> None:
    """Refuse numbers outside [0, `size`) of batch entries, heads, queries or keys.

    `holder` is what has so many, for the error.
    """
    if not index.numel() or not has_numbers(index):
        return
    first, last = (int(end) for end in index.aminmax())
    if first < 0 or last >= size:
        raise RegardError(
            f"{piece}: {holder} has {size} {axis}, 0 to {size - 1}; {axis} {first} to {last} were asked for. Ask for "
            f"those that it has, or make it for all {axis}."
        ) from None
