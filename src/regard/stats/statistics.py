"""The statistics of heads that a profile contains, one class for each.

A statistic names its reductions and reduces their results to one number for each head. All statistics of a profile
share one pass over the map.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.maps import AttentionMap, Distance, Entropy, MassOn, Reduction, Tile
from regard.maps.compiled_reductions import computes
from regard.maps.reductions import Shape, State, zeros


class HeadStatistic(ABC):
    """The base class of the statistics of heads. A new statistic is one subclass; pass it to `profile(statistics=)`.

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
        """Reduce the results of `reductions`, (B, H, I) each, to (B, H); by default the mean over queries."""
        return results[0].mean(-1)

    def counted(self, allowed: Tensor) -> Tensor:
        """The number of queries that `per_head` averages, (H,); `allowed` (H, I) counts the keys of each query."""
        return torch.full(allowed.shape[:1], float(allowed.shape[1]), dtype=torch.float32)


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

    1 is a uniform row. Queries with a single key are left out; a head without other queries gets 0.
    """

    name: ClassVar[str] = "evenness"
    label: ClassVar[str] = "spread, 0 to 1 (evenness)"
    meaning: ClassVar[str] = "entropy as a share of the largest possible entropy: 1 if all tokens have equal weight"

    def reductions(self, weights: AttentionMap, special: Sequence[int]) -> tuple[Reduction, ...]:
        return Entropy(), Allowed(weights)

    def per_head(self, *results: Any) -> Tensor:
        entropy, allowed = results
        choice = allowed > 1
        share = torch.where(choice, entropy / allowed.clamp_min(2).log(), 0.0)
        return share.sum(-1) / choice.sum(-1).clamp_min(1)

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
        entropy, (mass, part) = results
        return entropy_of_rest(entropy, mass, part).mean(-1)


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
        targets, keys = tile.grid.query + self.by, tile.grid.key
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
