"""Which pairs of query and key are links of a role, and the weight that heads put on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.maps import AttentionMap, Reduction, Tile
from regard.maps.reductions import Shape, State, zeros
from regard.stats.probes import special_positions
from regard.stats.token_reductions import numbers
from regard.stats.token_statistics import is_punctuation

#: Takes indices of queries (a column) and of keys (a row); returns which pairs are links of a role.
IsLink = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Text:
    """The tokens of a text as numbers, and flags for special tokens and for punctuation; (n,) each."""

    numbers: Tensor
    special: Tensor
    punctuation: Tensor

    @staticmethod
    def of(tokens: Sequence[str | int], special: Sequence[int] | None, device: torch.device) -> Text:
        positions = special_positions(tokens) if special is None else list(special)
        flags = torch.zeros(len(tokens), dtype=torch.bool)
        flags[torch.tensor(positions, dtype=torch.long)] = True
        punctuation = torch.tensor([isinstance(token, str) and is_punctuation(token) for token in tokens])
        token_numbers = numbers([str(token) for token in tokens])
        return Text(token_numbers.to(device), flags.to(device), (punctuation & ~flags).to(device))

    def duplicate(self, i: Tensor, j: Tensor) -> Tensor:
        """t_j = t_i and j != i, neither token is special, and j is not the first key."""
        return (self.numbers[i] == self.numbers[j]) & (i != j) & (j > 0) & ~self.special[i] & ~self.special[j]

    def induction(self, i: Tensor, j: Tensor) -> Tensor:
        """t_(j-1) = t_i with j < i: j follows an earlier occurrence of the query's token."""
        before = (j - 1).clamp_min(0)
        return (self.numbers[i] == self.numbers[before]) & (j > 0) & (j < i) & ~self.special[i] & ~self.special[before]

    def punctuation_mark(self, i: Tensor, j: Tensor) -> Tensor:
        """t_j is punctuation, j != i, and j is not the first key."""
        return self.punctuation[j] & (i != j) & (j > 0)

    def special_token(self, i: Tensor, j: Tensor) -> Tensor:
        """t_j is special, j != i, and j is not the first key, which has a role of its own."""
        return self.special[j] & (j > 0) & (i != j)


def first_token(i: Tensor, j: Tensor) -> Tensor:
    """j is the first key and i is not the first query."""
    return (j == 0) & (i > 0)


@dataclass(frozen=True, eq=False)
class TargetMass(Reduction):
    """For every query, the weight on links of a role, and the number of links that the mask allows; (B, H, I) each.

    `queries` are the indices in the text of the queries of the map, if it has not all of them.
    """

    weights: AttentionMap
    is_link: IsLink
    queries: Tensor | None = None

    def init(self, shape: Shape, device: torch.device) -> State:
        return [zeros(device, *shape[:3]), zeros(device, *shape[:3])]

    def add(self, state: State, tile: Tile) -> None:
        i = torch.arange(tile.rows.start, tile.rows.stop, device=tile.weights.device)
        j = torch.arange(tile.cols.start, tile.cols.stop, device=tile.weights.device)
        targets = self.is_link((i if self.queries is None else self.queries[i])[:, None], j[None])
        if targets.any():
            i, j = targets.nonzero(as_tuple=True)  # few pairs of a long text are links
            allowed = may_attend(self.weights, tile).expand(tile.weights.shape)
            for total, values in zip(state, (tile.weights, allowed), strict=True):
                total.index_add_(2, tile.rows.start + i, values[:, :, i, j].to(total.dtype))

    def finish(self, state: State) -> tuple[Tensor, Tensor]:
        return state[0], state[1]


@dataclass(frozen=True, eq=False)
class Diagonals(Reduction):
    """For every query, the weight at offsets j - i, and 1 where the mask allows it; (B, H, offsets, I) each.

    The first key is left out, because weight on it has a role of its own.
    """

    weights: AttentionMap
    offsets: tuple[int, ...]

    def init(self, shape: Shape, device: torch.device) -> State:
        B, H, I, _ = shape
        return [zeros(device, B, H, len(self.offsets), I) for _ in range(2)]

    def add(self, state: State, tile: Tile) -> None:
        keys, order = tile.grid.key.sort()
        allowed = may_attend(self.weights, tile).expand(tile.weights.shape)
        for number, offset in enumerate(self.offsets):
            wanted = tile.grid.query + offset
            place = torch.searchsorted(keys, wanted).clamp_max(len(keys) - 1)
            j = order[place]
            i = ((keys[place] == wanted) & (tile.cols.start + j > 0)).nonzero()[:, 0]
            for total, values in zip(state, (tile.weights, allowed), strict=True):
                total[:, :, number, tile.rows.start + i] = values[:, :, i, j[i]].to(total.dtype)

    def finish(self, state: State) -> tuple[Tensor, Tensor]:
        return state[0], state[1]


def may_attend(weights: AttentionMap, tile: Tile) -> Tensor:
    """Which pairs of a tile the mask allows; the shape broadcasts against that of the weights."""
    mask = weights.attention.mask if len(tile.undecided) else None
    return tile.weights.new_ones((1, 1, 1, 1), dtype=torch.bool) if mask is None else mask.allowed(tile.grid)
