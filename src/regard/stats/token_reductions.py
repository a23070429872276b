"""Reductions that sum weights by offset and by equal tokens, and compare the rows of heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.base.checks import Size, checked
from regard.base.errors import RegardError
from regard.base.shapes import to_device
from regard.engine.kernel.similarity import HeadProducts
from regard.maps import Reduction, Tile
from regard.maps.compiled_reductions import computes
from regard.maps.reductions import Shape, State, zeros

#: Offsets in a tile, from which on the sums of all its diagonals are faster than reading them one by one.
MANY = 64


@checked
@dataclass(frozen=True)
class Offsets(Reduction[Tensor]):
    """Weight at every relative offset j - i from `first` to `last`, summed over queries; (B, H, last - first + 1).

    Offset -1 is the previous token, 1 the next token. Add the sums of several documents and divide by
    their number of queries to get means.

    >>> import torch, regard as rg
    >>> from regard.stats import Offsets
    >>> x = torch.zeros(1, 1, 4, 2)
    >>> rg.Attention()(x, x, x).weights.summarize(Offsets(-1, 1))[0]
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
        line, distances = tile.grid.distances(), tile.grid.distance[0, 0]
        low, high = max(self.first, int(distances.min())), min(self.last, int(distances.max()))
        if line is not None and high - low >= MANY:
            sums = _sums_of_diagonals(tile.weights)[..., low - line.start : high + 1 - line.start]
            state[0][:, :, low - self.first : high + 1 - self.first] += sums
            return
        for offset in range(low, high + 1):
            i, j = (distances == offset).nonzero(as_tuple=True)
            state[0][:, :, offset - self.first] += tile.weights[:, :, i, j].sum(-1)


def _sums_of_diagonals(weights: Tensor) -> Tensor:
    """The sum of each diagonal of a matrix (..., i, j), from the lower left to the upper right; (..., i + j - 1).

    Padding and reshaping to rows of i + j - 1 numbers moves each diagonal into one column.
    """
    height, width = weights.shape[-2:]
    padded = torch.nn.functional.pad(weights.flip(-2), (0, height)).flatten(-2)[..., : -height or None]
    return padded.unflatten(-1, (height, width + height - 1)).sum(-2)


computes(Offsets, lambda reduction, state, _: {"offset_sums": state[0], "first_offset": reduction.first})


@checked
@dataclass(frozen=True, eq=False)
class SameToken(Reduction[Tensor]):
    """Weight of every query on other occurrences of its token: sum of w_ij over t_j = t_i, j != i; (B, H, I).

    `keys` holds the token numbers of the keys, (J,) or (B, J), and `queries` those of the queries. By default
    the queries are the last keys.

    >>> import torch, regard as rg
    >>> from regard.stats import SameToken
    >>> x = torch.zeros(1, 1, 4, 2)
    >>> rg.Attention()(x, x, x).weights.summarize(SameToken(torch.tensor([7, 5, 7, 7])))[0]
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


def _of_same_token(_reduction: SameToken, state: State, _sizes: object) -> dict[str, Tensor]:
    return {"same": state[0], "key_tokens": state[1], "query_tokens": state[2]}


computes(SameToken, _of_same_token)


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


#: A head has a pattern if at least this share of its squared weights remains after subtracting its mean row.
NO_PATTERN = 1e-3


@checked
@dataclass(frozen=True)
class Agreement(Reduction[Tensor]):
    """The cosine of every two heads' maps after the mean row of each map is subtracted; (B, H, H).

    Heads that give the same keys weight from every query have similar maps, but no agreement: it says whether heads
    treat each query alike. A head whose rows are all equal agrees with no head: 0. `special` are keys that are left
    out, in self-attention also as queries, and `every=n` uses every n-th query only.

    >>> import torch, regard as rg
    >>> x = torch.randn(1, 1, 4, 8).expand(1, 2, 4, 8)  # two equal heads
    >>> rg.Attention()(x, x, x).weights.summarize(Agreement())[0].round(decimals=3)
    tensor([[[1., 1.],
             [1., 1.]]])
    """

    special: tuple[int, ...] = ()
    every: Size = 1

    def init(self, shape: Shape, device: torch.device) -> State:
        B, H, I, J = shape
        is_query = torch.arange(I) % self.every == 0
        is_key = torch.ones(J, dtype=torch.bool)
        is_key[list(self.special)] = False
        chosen = [is_query & is_key if I == J else is_query, is_key]
        return [zeros(device, B, H, H), zeros(device, B, H, J), *(to_device(each, device) for each in chosen)]

    def add(self, state: State, tile: Tile) -> None:
        products, sums, is_query, is_key = state
        weights = tile.weights * is_query[tile.rows, None] * is_key[tile.cols]
        flat = weights.flatten(2)
        products += flat @ flat.mT
        sums[:, :, tile.cols] += weights.sum(-2)

    def finish(self, state: State) -> Tensor:
        products, sums, is_query, _ = state
        centered = products - sums @ sums.mT / is_query.sum().clamp_min(1)
        squares = centered.diagonal(dim1=-2, dim2=-1).clamp_min(0.0)
        has_pattern = squares > NO_PATTERN * products.diagonal(dim1=-2, dim2=-1)
        lengths = squares.sqrt().clamp_min(1e-12)
        cosines = centered / (lengths[..., None] * lengths[..., None, :])
        return cosines.where(has_pattern[..., None] & has_pattern[..., None, :], 0.0)

    def merge(self, state: State, other: State) -> State:
        return [state[0] + other[0], state[1] + other[1], *state[2:]]


def _of_agreement(_reduction: Agreement, state: State, _sizes: object) -> dict[str, list[HeadProducts]]:
    products, received, is_query, is_key = state
    return {"products": [HeadProducts(is_query, is_key, products, received)]}


computes(Agreement, _of_agreement)
