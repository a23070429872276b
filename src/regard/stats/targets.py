"""Where the links of a role lie, and the weight that heads put there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.maps import AttentionMap, Fold, Tile
from regard.maps.folds import Shape, State, zeros
from regard.stats.folds import numbers
from regard.stats.of_text import is_punctuation
from regard.stats.probes import special_places

#: Of queries (indices, as a column) and keys (as a row): which pairs are links of a role.
Where = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Text:
    """What roles need to know of a text: its tokens as numbers (n,), which are special, which are punctuation."""

    codes: Tensor
    special: Tensor
    punctuation: Tensor

    @staticmethod
    def of(tokens: Sequence[str | int], special: Sequence[int] | None, device: torch.device) -> Text:
        places = special_places(tokens) if special is None else list(special)
        flags = torch.zeros(len(tokens), dtype=torch.bool)
        flags[torch.tensor(places, dtype=torch.long)] = True
        marks = torch.tensor([isinstance(token, str) and is_punctuation(token) for token in tokens])
        codes = numbers([str(token) for token in tokens])
        return Text(codes.to(device), flags.to(device), (marks & ~flags).to(device))

    def duplicate(self, i: Tensor, j: Tensor) -> Tensor:
        """t_j = t_i elsewhere, neither of them special, j not the first key."""
        return (self.codes[i] == self.codes[j]) & (i != j) & (j > 0) & ~self.special[i] & ~self.special[j]

    def induction(self, i: Tensor, j: Tensor) -> Tensor:
        """t_(j-1) = t_i with j < i: j follows an earlier occurrence of the query's token."""
        before = (j - 1).clamp_min(0)
        return (self.codes[i] == self.codes[before]) & (j > 0) & (j < i) & ~self.special[i] & ~self.special[before]

    def marks(self, i: Tensor, j: Tensor) -> Tensor:
        """t_j is punctuation, another place than i and not the first key."""
        return self.punctuation[j] & (i != j) & (j > 0)

    def resting(self, i: Tensor, j: Tensor) -> Tensor:
        """t_j is special, and not the first key, which is a role of its own."""
        return self.special[j] & (j > 0) & (i != j)


def beginning(i: Tensor, j: Tensor) -> Tensor:
    """The first key, seen from any other place."""
    return (j == 0) & (i > 0)


@dataclass(frozen=True, eq=False)
class TargetMass(Fold):
    """Weight that every query puts on the links of a role, and how many of them it may attend to; (B, H, I) each."""

    weights: AttentionMap
    where: Where

    def init(self, shape: Shape, device: torch.device) -> State:
        return [zeros(device, *shape[:3]), zeros(device, *shape[:3])]

    def add(self, state: State, tile: Tile) -> None:
        i = torch.arange(tile.rows.start, tile.rows.stop, device=tile.weights.device)[:, None]
        j = torch.arange(tile.cols.start, tile.cols.stop, device=tile.weights.device)[None]
        targets = self.where(i, j)
        if targets.any():
            state[0][:, :, tile.rows] += (tile.weights * targets).sum(-1)
            state[1][:, :, tile.rows] += (may_attend(self.weights, tile) & targets).sum(-1)

    def finish(self, state: State) -> tuple[Tensor, Tensor]:
        return state[0], state[1]


@dataclass(frozen=True, eq=False)
class Diagonals(Fold):
    """Weight of every query at chosen offsets j - i, and whether it may attend there; (B, H, offsets, I) each.

    The first key is left out: weight on it is a role of its own.
    """

    weights: AttentionMap
    offsets: tuple[int, ...]

    def init(self, shape: Shape, device: torch.device) -> State:
        B, H, I, _ = shape
        return [zeros(device, B, H, len(self.offsets), I) for _ in range(2)]

    def add(self, state: State, tile: Tile) -> None:
        apart = tile.grid.distance[0, 0]
        low, high = int(apart.min()), int(apart.max())
        beside = torch.arange(tile.cols.start, tile.cols.stop, device=apart.device) > 0
        inside = [(n, offset) for n, offset in enumerate(self.offsets) if low <= offset <= high]
        allowed = may_attend(self.weights, tile).expand(tile.weights.shape) if inside else None
        for number, offset in inside:
            i, j = ((apart == offset) & beside).nonzero(as_tuple=True)
            state[0][:, :, number, tile.rows.start + i] = tile.weights[:, :, i, j].to(state[0].dtype)
            state[1][:, :, number, tile.rows.start + i] = allowed[:, :, i, j].to(state[1].dtype)  # type: ignore[index]

    def finish(self, state: State) -> tuple[Tensor, Tensor]:
        return state[0], state[1]


def may_attend(weights: AttentionMap, tile: Tile) -> Tensor:
    """Which pairs of a tile the mask allows; broadcasts against its weights."""
    mask = weights.attention.mask
    return tile.weights.new_ones((1, 1, 1, 1), dtype=torch.bool) if mask is None else mask.allowed(tile.grid)
