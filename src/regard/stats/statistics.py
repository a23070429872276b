"""The statistics of heads that a profile contains, one class for each, and the reductions that only they need.

A statistic names its reductions and reduces their results to one number for each head. All statistics of a profile
share one pass over the map.
"""

from __future__ import annotations

import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.base.checks import Size, checked
from regard.base.errors import RegardError
from regard.base.shapes import as_tensor, to_device
from regard.engine.kernel.similarity import HeadProducts
from regard.maps import AttentionMap, Distance, Entropy, MassOn, Reduction, Tile
from regard.maps.compiled_reductions import computes
from regard.maps.reductions import Shape, State, zeros

# Reductions that sum weights by offset and by equal tokens, and compare the rows of heads.


#: Number of offsets in a tile from which on summing all its diagonals at once is faster than one by one.
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
        # `line` is None if the positions of queries or keys are not consecutive, so that a diagonal has several offsets
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

    Each row is padded to i + j numbers. Read as rows of i + j - 1 numbers, each row begins one place later than the row
    before it, so that a diagonal is a column.
    """
    height, width = weights.shape[-2:]
    padded = torch.nn.functional.pad(weights.flip(-2), (0, height)).flatten(-2)[..., :-height]
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

    adds_rows = True
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
    """The arguments of the compiled kernel (`computes` in `maps/compiled_reductions.py`), which adds to the state."""
    return {"same": state[0], "key_tokens": state[1], "query_tokens": state[2]}


computes(SameToken, _of_same_token)


def _tokens(name: str, tokens: Tensor, B: int, length: int, device: torch.device) -> Tensor:
    """Token numbers (length,) or (B, length) as (B, length) on the device. `name` says in an error which they are."""
    tokens = as_tensor(tokens, device=device)
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

    adds_rows = True
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
        products, sums, is_query, is_key = state  # of rows of every two heads, of rows; both are summed over queries
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
    """The arguments of the compiled kernel, which adds to the state."""
    products, received, is_query, is_key = state
    return {"products": [HeadProducts(is_query, is_key, products, received)]}


computes(Agreement, _of_agreement)


# The statistics of heads that a profile contains, one class for each.


class HeadStatistic(ABC):
    """The base class of the statistics of heads. A new statistic is one subclass; pass it to `profile(statistics=)`.

    A mean over queries leaves out those without a key: an empty row has no weights to describe.

    `name` is the title of its column, `meaning` a phrase for readers, with the unit. `label` is its name in plain words
    on the page. `regard analyze --table` prints it with `digits` decimal places, or not if these are None.

    >>> import torch, regard as rg
    >>> from regard.stats import HeadStatistic, profile
    >>> class Last(HeadStatistic):
    ...     name, meaning = "last", "share of the weight on the last token"
    ...     def reductions(self, weights, special):
    ...         return (rg.maps.MassOn([-1]),)
    >>> x = torch.zeros(1, 2, 4, 8)
    >>> maps = {"layer": rg.Attention()(x, x, x).weights}
    >>> profile(maps, list("abcd"), statistics=[Last()]).layers[0].values
    {'last': tensor([0.2500, 0.2500])}
    """

    name: ClassVar[str]
    meaning: ClassVar[str]
    label: ClassVar[str] = ""
    digits: ClassVar[int | None] = None

    @abstractmethod
    def reductions(self, weights: AttentionMap, special: Sequence[int]) -> tuple[Reduction, ...]:
        """The reductions to compute over the map; `special` are the indices of special keys such as [CLS]."""

    def per_head(self, *results: Any) -> Tensor:
        """Reduce the results of `reductions`, each for all queries (B, H, I), to (B, H).

        The last result counts the keys of each query, (B, H, I). By default this is the mean of the first result over
        the queries that have a key.
        """
        return mean_of_rows(results[0], results[-1])

    def counted(self, allowed: Tensor) -> Tensor:
        """The number of queries that `per_head` averages, (H,); `allowed` (H, I) counts the keys of each query."""
        return (allowed > 0).sum(-1)


def mean_of_rows(rows: Tensor, allowed: Tensor) -> Tensor:
    """The mean of `rows` (..., I) over the queries that have a key; 0 if none has one. `allowed` counts their keys."""
    has_key = allowed > 0
    return rows.where(has_key, 0.0).sum(-1) / has_key.sum(-1).clamp_min(1)


@dataclass(frozen=True)
class MeanEntropy(HeadStatistic):
    """Mean over queries of -sum_j w_ij log w_ij, in nats."""

    name: ClassVar[str] = "entropy"
    label: ClassVar[str] = "spread (entropy)"
    digits: ClassVar[int | None] = 2
    meaning: ClassVar[str] = "entropy of a row in nats: 0 for one token, log n for n tokens of equal weight"

    def reductions(self, weights: AttentionMap, special: Sequence[int]) -> tuple[Reduction, ...]:
        return (Entropy(),)


@dataclass(frozen=True)
class Evenness(HeadStatistic):
    """Mean over queries of entropy / log n_i, with n_i the keys that query i may attend to.

    1 is a uniform row. Queries with a single key are left out too; a head without other queries gets 0.
    """

    name: ClassVar[str] = "evenness"
    label: ClassVar[str] = "spread, 0 to 1 (evenness)"
    meaning: ClassVar[str] = "entropy as a share of the largest possible entropy: 1 if all tokens have equal weight"

    def reductions(self, weights: AttentionMap, special: Sequence[int]) -> tuple[Reduction, ...]:
        return (Entropy(),)

    def per_head(self, *results: Any) -> Tensor:
        entropy, allowed = results
        has_choice = allowed > 1
        share = torch.where(has_choice, entropy / allowed.clamp_min(2).log(), 0.0)
        return share.sum(-1) / has_choice.sum(-1).clamp_min(1)

    def counted(self, allowed: Tensor) -> Tensor:
        return (allowed > 1).sum(-1)


@dataclass(frozen=True)
class Reach(HeadStatistic):
    """Mean over queries of sum_j w_ij |i - j|, in positions."""

    name: ClassVar[str] = "reach"
    label: ClassVar[str] = "distance (reach)"
    digits: ClassVar[int | None] = 1
    meaning: ClassVar[str] = "mean distance between query and key, in tokens"

    def reductions(self, weights: AttentionMap, special: Sequence[int]) -> tuple[Reduction, ...]:
        return (Distance(),)


@dataclass(frozen=True)
class Special(HeadStatistic):
    """Mean over queries of the weight on special tokens such as [CLS] and [SEP]."""

    name: ClassVar[str] = "special"
    label: ClassVar[str] = "weight on special tokens (special)"
    meaning: ClassVar[str] = "share of the weight on special tokens such as [CLS] and [SEP]"

    def reductions(self, weights: AttentionMap, special: Sequence[int]) -> tuple[Reduction, ...]:
        return (MassOn(torch.tensor(list(special), dtype=torch.long)),)


@dataclass(frozen=True)
class First(HeadStatistic):
    """Mean over queries of the weight on the first key."""

    name: ClassVar[str] = "first"
    label: ClassVar[str] = "weight on the first token (first)"
    meaning: ClassVar[str] = "share of the weight on the first token"

    def reductions(self, weights: AttentionMap, special: Sequence[int]) -> tuple[Reduction, ...]:
        return (MassOn([0]),)


@dataclass(frozen=True)
class Elsewhere(HeadStatistic):
    """Mean over queries of sum_j w_ij log((1 - r_i) / w_ij) over keys j other than the first and special ones.

    r_i is the weight of query i on the first key and on special keys. By the chain rule of entropy this is
    (1 - r_i) times the entropy of the other weights, normalized to a distribution.
    """

    name: ClassVar[str] = "elsewhere"
    label: ClassVar[str] = "part of the spread from ordinary tokens (elsewhere)"
    meaning: ClassVar[str] = (
        "the part of the entropy, in nats, that comes from tokens other than the first and special ones: "
        "their weight times the entropy of their weights"
    )

    def reductions(self, weights: AttentionMap, special: Sequence[int]) -> tuple[Reduction, ...]:
        return Entropy(), WeightOnKeys(tuple(sorted({0, *special})))

    def per_head(self, *results: Any) -> Tensor:
        entropy, (mass, part), allowed = results  # part: what the excluded keys contribute to the entropy
        return mean_of_rows(entropy_of_rest(entropy, mass, part), allowed)


def entropy_of_rest(entropy: Tensor, mass: Tensor, part: Tensor) -> Tensor:
    """sum_j w_j log(m / w_j) over the rest of the keys, whose weights sum to m, from the entropy over all keys.

    `mass` is the weight of the excluded keys, `part` their contribution to the entropy; m = 1 - mass.
    """
    rest = (1 - mass).clamp_min(0.0)
    return (entropy - part + torch.xlogy(rest, rest)).clamp_min(0.0)


@dataclass(frozen=True)
class Previous(HeadStatistic):
    """Mean over queries of the weight on the previous token."""

    name: ClassVar[str] = "previous"
    label: ClassVar[str] = "weight on the previous token (previous)"
    meaning: ClassVar[str] = "share of the weight on the previous token"

    def reductions(self, weights: AttentionMap, special: Sequence[int]) -> tuple[Reduction, ...]:
        return (Offset(-1),)


@dataclass(frozen=True)
class Following(HeadStatistic):
    """Mean over queries of the weight on the next token."""

    name: ClassVar[str] = "next"
    label: ClassVar[str] = "weight on the next token (next)"
    meaning: ClassVar[str] = "share of the weight on the next token"

    def reductions(self, weights: AttentionMap, special: Sequence[int]) -> tuple[Reduction, ...]:
        return (Offset(1),)


@dataclass(frozen=True)
class Itself(HeadStatistic):
    """Mean over queries of the weight on the query's own position."""

    name: ClassVar[str] = "itself"
    label: ClassVar[str] = "weight on the token itself (itself)"
    meaning: ClassVar[str] = "share of the weight on the token itself"

    def reductions(self, weights: AttentionMap, special: Sequence[int]) -> tuple[Reduction, ...]:
        return (Offset(0),)


#: The statistics of `profile` by default, in the order of its table.
STATISTICS: tuple[HeadStatistic, ...] = (
    MeanEntropy(),
    Evenness(),
    Reach(),
    Special(),
    First(),
    Elsewhere(),
    Previous(),
    Following(),
    Itself(),
)


@dataclass(frozen=True)
class Offset(Reduction):
    """Weight of every query on the key `by` positions after it; (B, H, I)."""

    by: int

    def init(self, shape: Shape, device: torch.device) -> State:
        return [zeros(device, *shape[:3])]

    def add(self, state: State, tile: Tile) -> None:
        targets, keys = tile.grid.query + self.by, tile.grid.key  # positions; those of keys ascend
        index = torch.searchsorted(keys, targets).clamp_max(len(keys) - 1)
        queries = (keys[index] == targets).nonzero().flatten()  # few queries have their target in the same tile
        if len(queries):
            state[0][:, :, tile.rows][:, :, queries] += tile.weights[:, :, queries, index[queries]]


computes(Offset, lambda reduction, state, _: {"offsets": [(reduction.by, state[0])]})


@dataclass(frozen=True)
class WeightOnKeys(Reduction):
    """Weight of every query on chosen keys (indices), and their contribution to its entropy; (B, H, I) each."""

    keys: tuple[int, ...]

    def init(self, shape: Shape, device: torch.device) -> State:
        return [zeros(device, *shape[:3]) for _ in range(2)]

    def add(self, state: State, tile: Tile) -> None:
        inside = [key - tile.cols.start for key in self.keys if tile.cols.start <= key < tile.cols.stop]
        if inside:
            weights = tile.weights[..., inside]
            state[0][:, :, tile.rows] += weights.sum(-1)
            state[1][:, :, tile.rows] -= torch.xlogy(weights, weights).sum(-1)

    def finish(self, state: State) -> tuple[Tensor, Tensor]:
        return state[0], state[1]


def _on_keys(reduction: WeightOnKeys, state: State, _sizes: object) -> dict[str, Tensor]:
    """The arguments of the compiled kernel, which adds to the state."""
    keys = torch.tensor(sorted(reduction.keys), dtype=torch.int64, device="cpu")
    return {"chosen": keys, "chosen_mass": state[0], "chosen_entropy": state[1]}


computes(WeightOnKeys, _on_keys)


@dataclass(frozen=True, eq=False)
class Allowed(Reduction):
    """The number of keys that every query may attend to; (B, H, I)."""

    reads_weights: ClassVar[bool] = False
    weights: AttentionMap

    def init(self, shape: Shape, device: torch.device) -> State:
        return [zeros(device, *shape[:3])]

    def add(self, state: State, tile: Tile) -> None:
        mask, counts = self.weights.attention.mask, state[0][:, :, tile.rows]
        if mask is None:
            counts += tile.weights.shape[-1]
            return
        counts += tile.weights.shape[-1] - len(tile.undecided)
        for first, last in tile.undecided:
            grid = tile.grid.tile(slice(None), slice(first - tile.cols.start, last - tile.cols.start))
            counts += mask.allowed(grid).expand(-1, -1, len(tile.grid.query), last - first).sum(-1)


# Head statistics that need the tokens of a text: weight on punctuation, equal tokens, offsets or chosen tokens.


def is_punctuation(token: str) -> bool:
    """Whether a token consists of punctuation only; prefixes that tokenizers add (##, Ġ, ▁) are ignored.

    >>> [is_punctuation(token) for token in [".", "Ġ,", "▁?!", "##'", "it's", "", "[SEP]"]]
    [True, True, True, True, False, False, False]
    """
    bare = (token.removeprefix("##") or token).lstrip("Ġ▁").strip()
    return bool(bare) and all(unicodedata.category(character).startswith("P") for character in bare)


@dataclass(frozen=True)
class Chosen(HeadStatistic):
    """Mean over queries of the weight on chosen keys (indices)."""

    keys: tuple[int, ...]
    name: ClassVar[str] = "chosen"
    meaning: ClassVar[str] = "share of the weight on the chosen tokens"

    def reductions(self, weights: AttentionMap, special: Sequence[int]) -> tuple[Reduction, ...]:
        return (MassOn(torch.tensor(self.keys, dtype=torch.long)),)


@dataclass(frozen=True)
class Punctuation(Chosen):
    """Mean over queries of the weight on punctuation; `keys` are its indices, without the first key."""

    name: ClassVar[str] = "punctuation"
    meaning: ClassVar[str] = "share of the weight on punctuation other than the first token"


@dataclass(frozen=True, eq=False)
class Same(HeadStatistic):
    """Mean over queries of the weight on other occurrences of the query's token, except for the first key."""

    ids: Tensor
    name: ClassVar[str] = "same"
    meaning: ClassVar[str] = "share of the weight on other occurrences of the same token"

    def reductions(self, weights: AttentionMap, special: Sequence[int]) -> tuple[Reduction, ...]:
        keys = self.ids.clone()
        keys[:1] = -1  # equals no token number
        return (SameToken(keys, self.ids),)


@dataclass(frozen=True)
class AtOffsets(HeadStatistic):
    """Mean over queries of the weight at offsets -8 to 8: 17 numbers for each head."""

    name: ClassVar[str] = "offsets"
    meaning: ClassVar[str] = "share of the weight at offsets -8 to 8"

    def reductions(self, weights: AttentionMap, special: Sequence[int]) -> tuple[Reduction, ...]:
        return (Offsets(),)

    def per_head(self, *results: Tensor) -> Tensor:
        offsets, allowed = results  # offsets are sums over the queries
        return offsets / (allowed > 0).sum(-1, keepdim=True).clamp_min(1)


@checked
def text_statistics(tokens: Sequence[str], chosen: Sequence[int] | None = None) -> tuple[HeadStatistic, ...]:
    """All statistics of a text: `STATISTICS` and those that need its tokens. For `profile(..., statistics=)`.

    `chosen` are indices of keys; the statistic "chosen" is the share of the weight on them. Weight on the first key
    counts for the statistic "first" only, whatever its token is.

    >>> [statistic.name for statistic in text_statistics(["a", "."])][-3:]
    ['punctuation', 'same', 'offsets']
    """
    punctuation = tuple(index for index, token in enumerate(tokens) if index and is_punctuation(token))
    extra: list[HeadStatistic] = [Punctuation(punctuation), Same(numbers(list(tokens))), AtOffsets()]
    if chosen is not None:
        extra.append(Chosen(tuple(chosen)))
    return (*STATISTICS, *extra)
