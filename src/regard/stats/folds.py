"""Folds that sum weights by offset and by equal tokens; sums of several documents can be added."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.checks import checked
from regard.errors import RegardError
from regard.maps import Fold, Tile
from regard.maps.folds import Shape, State, zeros


@checked
@dataclass(frozen=True)
class Offsets(Fold[Tensor]):
    """Weight at every relative offset j - i from `first` to `last`, summed over queries; (B, H, last - first + 1).

    Offset -1 is the previous token, 1 the next token. Add the sums of several documents and divide by
    their number of queries to get means.

    >>> import torch, regard as rg
    >>> from regard.stats import Offsets
    >>> x = torch.zeros(1, 1, 4, 2)
    >>> rg.attend(rg.Attention(), x, x, x).weights.summarize(Offsets(-1, 1))[0]
    tensor([[[0.7500, 1.0000, 0.7500]]])
    """

    first: int = -8
    last: int = 8

    def __post_init__(self) -> None:
        if self.first > self.last:
            raise RegardError(
                f"Offsets({self.first}, {self.last}): the first offset must not be greater than the last."
            )

    def init(self, shape: Shape, device: torch.device) -> State:
        return [zeros(device, *shape[:2], self.last - self.first + 1)]

    def add(self, state: State, tile: Tile) -> None:
        distances = tile.grid.distance[0, 0]
        low, high = max(self.first, int(distances.min())), min(self.last, int(distances.max()))
        for offset in range(low, high + 1):
            i, j = (distances == offset).nonzero(as_tuple=True)
            state[0][:, :, offset - self.first] += tile.weights[:, :, i, j].sum(-1)


@checked
@dataclass(frozen=True, eq=False)
class SameToken(Fold[Tensor]):
    """Weight of every query on other occurrences of its token: sum of w_ij over t_j = t_i, j != i; (B, H, I).

    `keys` holds the token numbers of the keys, (J,) or (B, J), and `queries` those of the queries. By default
    the queries are the last keys.

    >>> import torch, regard as rg
    >>> from regard.stats import SameToken
    >>> x = torch.zeros(1, 1, 4, 2)
    >>> rg.attend(rg.Attention(), x, x, x).weights.summarize(SameToken(torch.tensor([7, 5, 7, 7])))[0]
    tensor([[[0.5000, 0.0000, 0.5000, 0.5000]]])
    """

    keys: Tensor
    queries: Tensor | None = None

    def init(self, shape: Shape, device: torch.device) -> State:
        B, _, I, J = shape
        keys = _tokens("keys", self.keys, B, J, device)
        queries = keys[:, J - I :] if self.queries is None else _tokens("queries", self.queries, B, I, device)
        return [zeros(device, *shape[:3]), keys, queries]

    def add(self, state: State, tile: Tile) -> None:
        total, keys, queries = state
        same = queries[:, None, tile.rows, None] == keys[:, None, None, tile.cols]
        total[:, :, tile.rows] += (tile.weights * (same & (tile.grid.distance != 0))).sum(-1)

    def merge(self, state: State, other: State) -> State:
        return [state[0] + other[0], *state[1:]]


def _tokens(name: str, tokens: Tensor, B: int, length: int, device: torch.device) -> Tensor:
    tokens = torch.as_tensor(tokens, device=device)
    if tokens.is_floating_point() or tokens.shape not in ((length,), (B, length)):
        raise RegardError(
            f"SameToken: {name} are integer token numbers of shape ({length},) or ({B}, {length}), "
            f"got {tokens.dtype} of shape {tuple(tokens.shape)}."
        )
    return tokens.expand(B, length)


def numbers(tokens: list[str]) -> Tensor:
    """Token numbers; equal tokens have equal numbers; (len(tokens),).

    >>> numbers(["a", "b", "a"])
    tensor([0, 1, 0])
    """
    known: dict[str, int] = {}
    return torch.tensor([known.setdefault(token, len(known)) for token in tokens], dtype=torch.long)
