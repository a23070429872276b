"""`profile` measures every head of a model on one text, in one pass over each map."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from regard.base.checks import Count, checked
from regard.base.errors import RegardError
from regard.base.html_table import html_table
from regard.base.shapes import spread_indices
from regard.maps import AttentionMap, KeyTotals, Reduction, RowLinks, Similarity, TopLinks
from regard.maps.changed_map import HeadMean, ShareMap
from regard.maps.scored_map import ScoredMap
from regard.scores import Dot
from regard.stats.numbering import layer_numbers
from regard.stats.statistics import STATISTICS, Agreement, Allowed, HeadStatistic

#: Names of tokens that models add to a text, such as [CLS], </s> or <|endoftext|>.
SPECIAL_TOKEN = re.compile(r"\[(CLS|SEP|PAD|MASK)\]|</?s>|<(pad|unk|bos|eos|cls|sep|mask)>|<\|\w+\|>")

#: Heads are compared on all queries of short texts; for long texts, on at least this many and fewer than twice as many.
COMPARED = 4096
#: So many columns of a mask are read at once to find the first key.
COLUMNS = 64
#: A layer with more heads is shown as the mean over so many: the channels of Mamba-1, of RWKV, and of convolutions.
MOST_HEADS = 128


@dataclass(frozen=True)
class Link:
    """A link of a head: `query` attends to `key` (both are indices) with `weight`.

    >>> from regard.types import ModelProfile
    >>> from regard.types import Link
    >>> ModelProfile(["the", "cat"], ["the", "cat"], [], []).describe(Link(query=1, key=0, weight=0.75))
    'cat -> the 0.75'
    """

    query: int
    key: int
    weight: float


@dataclass(frozen=True, eq=False)
class LayerProfile:
    """The profile of one attention module: statistics, strongest links of every query, and similarities of heads.

    `values` holds the statistics by name, (H,) each, and `counts` the number of queries that each one averages.
    `links` holds the weights and keys of the strongest links, (H, I, k) each. `received` (H, J) is the weight that each
    key receives. `similarity` (H, H) is the cosine of every two heads' maps (from 8,192 queries on, over evenly
    spaced queries). `allowed` (H, I) is the number of keys that a query may attend to. All are at least float32.
    `number` is the number of the layer in the model, `num_special` the number of special keys, and `also` the results
    of the further reductions of `profile(also=)`. `agreement` (H, H) is the cosine of every two heads' maps without
    special tokens, after the mean row of each map is subtracted: whether heads treat each query alike. `scale` is the
    factor c that was given for the scores c q . k, divided by the usual 1 / sqrt(D), or None. `kind` is the kind of the
    layer, if it is known. Of signed weights all numbers are of their shares |w_ij| / sum_j |w_ij|, and `negative` is
    the share of |weight| that is negative; otherwise it is None. A layer with more than 128 heads is measured as one
    head, the mean over some of them; `averaged` is (number of these heads, number of all heads), otherwise None.
    `first_key` is the index of the first key that a query may attend to: with padding on the left it is not 0.

    >>> import torch, regard as rg
    >>> from regard.stats import profile
    >>> x = 20 * torch.eye(3).expand(1, 1, 3, 3)
    >>> layer = profile({"layers.4": rg.Attention()(x, x, x).weights}, ["a", "b", "c"]).layers[0]
    >>> layer.number, layer.num_heads, layer.links.keys[0, :, 0].tolist(), layer.received.round().tolist()
    (4, 1, [0, 1, 2], [[1.0, 1.0, 1.0]])
    """

    name: str
    values: dict[str, Tensor]
    links: RowLinks
    received: Tensor
    similarity: Tensor
    allowed: Tensor
    counts: dict[str, Tensor] = field(default_factory=dict)
    number: int = 0
    also: tuple[Any, ...] = ()
    num_special: int = 0
    agreement: Tensor | None = None
    scale: float | None = None
    kind: str = ""
    negative: float | None = None
    averaged: tuple[int, int] | None = None
    first_key: int = 0

    def __repr__(self) -> str:
        return f"LayerProfile({self.name!r}, layer {self.number}, {self.num_heads} heads)"

    @property
    def num_heads(self) -> int:
        return len(self.received)

    def strongest(self, head: int, among: Sequence[int] | None = None) -> Link:
        """The strongest link of a head, among the queries `among`; among all of them if there are none in it.

        Queries with a single key are ignored, unless all have a single key: their weight is always 1.
        """
        weights = self.links.weights[head, :, 0]
        queries = torch.arange(len(weights)) if not among else torch.tensor(list(among))
        with_choice = queries[self.allowed[head, queries] > 1]
        queries = with_choice if len(with_choice) else queries
        query = int(queries[weights[queries].argmax()])
        return Link(query, int(self.links.keys[head, query, 0]), float(weights[query]))


@dataclass(frozen=True, eq=False)
class ModelProfile:
    """The statistics of every head of every layer on one text. `print(profile.table())` shows them.

    >>> import torch, regard as rg
    >>> from regard.stats import profile
    >>> x = torch.zeros(1, 2, 4, 8)
    >>> measured = profile({"layer": rg.Attention()(x, x, x).weights}, ["[CLS]", "a", "b", "[SEP]"])
    >>> measured.ordinary, measured.values("special")  # half of the tokens are special
    ([1, 2], [tensor([0.5000, 0.5000])])
    """

    tokens: list[str]
    query_tokens: list[str]
    special: list[int]
    layers: list[LayerProfile]

    @property
    def ordinary(self) -> list[int]:
        """Indices of the queries that are not special tokens."""
        if self.query_tokens != self.tokens:  # `special` are indices of keys
            return [i for i, token in enumerate(self.query_tokens) if not SPECIAL_TOKEN.fullmatch(token)]
        return [i for i in range(len(self.query_tokens)) if i not in set(self.special)]

    @property
    def is_self_attention(self) -> bool:
        """Whether queries and keys are one text: the queries are all its tokens, or the last ones (after a cache)."""
        return self.query_tokens == self.tokens[-len(self.query_tokens) :]

    def values(self, name: str) -> list[Tensor]:
        """The values of one statistic in all layers, (H,) each."""
        known = list(self.layers[0].values)
        if name not in known:
            raise RegardError(f"profile: there is no statistic {name!r}. Known names: {', '.join(known)}.")
        return [layer.values[name] for layer in self.layers]

    def __repr__(self) -> str:
        lines = [f"  {layer!r}" for layer in self.layers[:5]]
        return "\n".join([f"ModelProfile({len(self.layers)} layers, {len(self.tokens)} tokens)", *lines])

    def table(self) -> str:
        """One line of plain text for each head."""
        lines = ["layer head " + " ".join(f"{name:>9}" for name in self._names) + "  strongest link"]
        for layer, head, numbers, link in self._heads():
            lines.append(f"{layer:5d} {head:4d} {' '.join(f'{number:9.3f}' for number in numbers)}  {link}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [(layer, head, *numbers, link) for layer, head, numbers, link in self._heads()]
        return html_table("Statistics of every head", ("layer", "head", *self._names, "strongest link"), rows)

    @property
    def _names(self) -> list[str]:
        """The statistics that have one number for each head."""
        return [name for name, value in self.layers[0].values.items() if value.ndim == 1]

    def _heads(self) -> Iterator[tuple[int, int, list[float], str]]:
        """Layer, head, statistics and strongest link of each head.

        The statistics are in the order of `_names`. Without tokens the link, a text, is "".
        """
        for layer in self.layers:
            for head in range(layer.num_heads):
                link = self.describe(layer.strongest(head, self.ordinary)) if self.query_tokens else ""
                yield layer.number, head, [float(layer.values[name][head]) for name in self._names], link

    def describe(self, link: Link) -> str:
        """A link in words, such as `it -> animal 0.68`. The key is -1 if the query has none (`TopLinks`)."""
        if link.key < 0:
            return "none"
        return f"{self.query_tokens[link.query]} -> {self.tokens[link.key]} {link.weight:.2f}"


@checked
@torch.no_grad()
def profile(
    maps: Mapping[str, AttentionMap],
    tokens: Sequence[str],
    *,
    query_tokens: Sequence[str] | None = None,
    special: Sequence[int] | None = None,
    batch: Count = 0,
    num_links: Count = 8,
    statistics: Sequence[HeadStatistic] = STATISTICS,
    numbers: Sequence[int] | None = None,
    also: Callable[[AttentionMap], Sequence[Reduction]] = lambda weights: (),
    kinds: Mapping[str, str] | None = None,
) -> ModelProfile:
    """Measure every head of every map, in one pass over each map.

    `tokens` are the tokens of the keys, and `query_tokens` those of the queries if they differ (cross-attention).
    `special` are the indices of special keys; by default they are recognized by their names, such as [CLS] or </s>.
    `batch` is the index of one text of a batch. `numbers` are the numbers of the layers; by default they are read
    from the module paths (`layer_numbers`). `also(map)` returns further reductions for a map; they run in the same
    pass, and their results are in `layers[n].also`. `kinds` names the kind of each map, as `seen.kinds` does. Signed
    maps are measured as shares of |weight|.

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 2, 3, 4)
    >>> output = rg.Attention()(x, x, x)
    >>> result = profile({"layer": output.weights}, ["a", "b", "c"])
    >>> result.layers[0].values["evenness"].tolist()
    [1.0, 1.0]
    """
    tokens = list(tokens)
    queries = list(tokens if query_tokens is None else query_tokens)
    if not maps:
        raise RegardError("profile: there are no maps. Watch at least one attention layer.")
    if special is None:
        special = [index for index, token in enumerate(tokens) if SPECIAL_TOKEN.fullmatch(token)]
    for name, weights in maps.items():
        _check(name, weights, queries, tokens)
    texts = {name: one_text("profile", weights, batch) for name, weights in maps.items()}
    layers = [
        replace(
            _layer(name, weights, special, num_links, statistics, also), number=number, kind=(kinds or {}).get(name, "")
        )
        for number, (name, weights) in zip(layer_numbers(maps, numbers), texts.items(), strict=True)
    ]
    return ModelProfile(tokens, queries, list(special), layers)


def _check(name: str, weights: AttentionMap, queries: list[str], tokens: list[str]) -> None:
    """Refuse other numbers of tokens than the map has queries and keys."""
    I, J = weights.shape[2:]
    if len(queries) != I or len(tokens) != J:
        raise RegardError(
            f"profile: the map of {name!r} has {I} queries and {J} keys, but {len(queries)} query tokens and "
            f"{len(tokens)} key tokens were given. Give one token for each key, with special tokens, and "
            "one for each query where the queries are another text."
        )


def one_text(operation: str, weights: AttentionMap, batch: int) -> AttentionMap:
    """The map of one text of a batch, as shares; errors name the operation.

    Of a signed map these are the shares of |weight|. Of a layer with very many heads it is the mean over `MOST_HEADS`
    of them, evenly spaced.
    """
    B, H, _, _ = weights.shape
    if not 0 <= batch < B:
        raise RegardError(f"{operation}: batch {batch} is out of range; the map has {B} text{'s' * (B > 1)}.")
    some = spread_indices(H, MOST_HEADS)
    weights = weights if B == 1 and len(some) == H else weights.select(torch.tensor([batch]), some)
    shares = weights if weights.has_shares else weights.shares()
    return HeadMean(shares, H) if len(some) < H else shares


def _negative(weights: AttentionMap) -> float | None:
    """The share of |weight| that is negative, as the mean over queries and heads; None if no weight can be.

    Rows without weight have no such share. `weights` is a result of `one_text`: a signed map is in a `ShareMap`, whose
    `signs.negative` are sums below 0.
    """
    shares = weights.source if isinstance(weights, HeadMean) else weights
    if not isinstance(shares, ShareMap) or not shares.source.is_signed:
        return None
    has_weight = shares.totals != 0
    negative = -shares.signs.negative[has_weight] / shares.totals[has_weight]
    return float(negative.mean()) if negative.numel() else 0.0


def _layer(
    name: str,
    weights: AttentionMap,
    special: Sequence[int],
    num_links: int,
    statistics: Sequence[HeadStatistic],
    also: Callable[[AttentionMap], Sequence[Reduction]],
) -> LayerProfile:
    """The profile of one text of a layer. All reductions run in one pass: shared, further (`also`), of statistics.

    `name` is the path of the module, `special` are the indices of special keys, and `num_links` is the number of links
    that are kept for each query.
    """
    statistic_reductions: list[tuple[Reduction, ...]] = [s.reductions(weights, special) for s in statistics]
    shared = _shared_reductions(weights, special, num_links)
    further = tuple(also(weights))
    results = weights.summarize(
        *shared, *further, *(reduction for reductions in statistic_reductions for reduction in reductions)
    )
    links, received, similarity, allowed, agreement = results[: len(shared)]
    further_results = results[len(shared) : len(shared) + len(further)]
    statistic_results, values = iter(results[len(shared) + len(further) :]), {}
    for statistic, reductions in zip(statistics, statistic_reductions, strict=True):
        of_statistic = (next(statistic_results) for _ in reductions)
        values[statistic.name] = statistic.per_head(*of_statistic, allowed)[0].cpu()
    links = RowLinks(links.weights[0].cpu(), links.keys[0].cpu())
    received, similarity, allowed, agreement = (r[0].cpu() for r in (received, similarity, allowed, agreement))
    counts = {statistic.name: statistic.counted(allowed) for statistic in statistics}
    return LayerProfile(
        name,
        values,
        links,
        received,
        similarity,
        allowed,
        counts,
        also=further_results,
        num_special=len(special),
        agreement=agreement,
        scale=relative_scale(weights),
        negative=_negative(weights),
        averaged=(weights.source.shape[1], weights.num_channels) if isinstance(weights, HeadMean) else None,
        first_key=_first_key(weights),
    )


def _first_key(weights: AttentionMap) -> int:
    """The index of the first key that a query may attend to; 0 if there is none."""
    mask = weights.attention.mask
    if mask is None:
        return 0
    for first in range(0, weights.shape[3], COLUMNS):
        allowed = mask.allowed(weights.grid.tile(slice(None), slice(first, first + COLUMNS)))
        if bool((is_seen := allowed.flatten(0, -2).any(0)).any()):
            return first + int(is_seen.int().argmax())
    return 0


def _shared_reductions(weights: AttentionMap, special: Sequence[int], num_links: int) -> list[Reduction]:
    """The reductions of every profile. Heads of long texts are compared on some of the rows.

    `special` are the indices of special keys, and `num_links` the number of strongest links that are kept.
    """
    every = max(1, weights.shape[2] // COMPARED)
    return [
        TopLinks(num_links),
        KeyTotals(),
        Similarity(every),
        Allowed(weights),
        Agreement(tuple(int(index) for index in special), every),
    ]


def relative_scale(weights: AttentionMap) -> float | None:
    """The factor that was given for q . k, divided by 1 / sqrt(D); None if none was given, or a learned one."""
    score = weights.attention.score
    factor = score.factor if isinstance(score, Dot) else None
    if factor is None or isinstance(factor, Tensor) or not isinstance(weights, ScoredMap):
        return None
    return factor * weights.score_width**0.5


def token_names(
    weights: AttentionMap, keys: Sequence[str] | None, queries: Sequence[str] | None
) -> tuple[list[str], Sequence[str] | None]:
    """Names of the keys and of the queries of a map, for `profile`; None if the queries are the keys.

    Keys without names are named by their numbers. Queries without names are the last keys, or numbers if there are
    more queries than keys.
    """
    I, J = weights.shape[2:]
    keys = [str(j) for j in range(J)] if keys is None else list(keys)
    if queries is None and I != J:
        queries = keys[J - I :] if I < J else [str(i) for i in range(I)]
    return keys, queries


# Head statistics over many documents: tables that can be merged, because every mean knows its number of queries.


@dataclass(frozen=True, eq=False)
class LayerTable:
    """The statistics of one layer, with the number of that layer in the model.

    For each statistic, `means` holds (H,) or (H, ...) and `counts` (H,) the number of queries that were averaged.

    >>> import torch
    >>> from regard.types import LayerTable
    >>> first = LayerTable("layer", {"reach": torch.tensor([1.0])}, {"reach": torch.tensor([3.0])})
    >>> second = LayerTable("layer", {"reach": torch.tensor([5.0])}, {"reach": torch.tensor([1.0])})
    >>> first.merge(second).means["reach"]  # (3 * 1 + 1 * 5) / 4
    tensor([2.])
    """

    name: str
    means: dict[str, Tensor]
    counts: dict[str, Tensor]
    number: int = 0

    @property
    def num_heads(self) -> int:
        return len(next(iter(self.means.values()), ()))

    def merge(self, other: LayerTable) -> LayerTable:
        """The means over the queries of both tables."""
        means, counts = {}, {}
        for name, mean in self.means.items():
            count, other_count = self.counts[name], other.counts[name]
            of_other = other_count / (count + other_count).clamp_min(1)  # its share of the queries
            of_other = of_other.view(
                -1, *(1,) * (mean.ndim - 1)
            )  # (H, 1, ...), as a mean may be a vector for each head
            means[name] = mean * (1 - of_other) + other.means[name] * of_other
            counts[name] = count + other_count
        return LayerTable(self.name, means, counts, self.number)


@dataclass(frozen=True, eq=False)
class HeadTable:
    """Every statistic of every head, as the mean over the queries of any number of documents.

    m = sum_d n_d m_d / sum_d n_d, with m_d the mean over the n_d queries of document d. This equals the mean over
    all queries, whatever the order of merging. Means and counts are float64: counts are exact up to 2^53
    queries, and one document still changes the means of a large corpus.

    >>> import torch, regard as rg
    >>> from regard.stats import profile
    >>> from regard.types import HeadTable
    >>> def table(n):
    ...     x = torch.zeros(1, 1, n, 4)
    ...     return HeadTable.of(profile({"layer": rg.Attention()(x, x, x).weights}, ["a"] * n))
    >>> round(table(2).merge(table(4)).layers[0].means["itself"].item(), 4)  # (2 * 1/2 + 4 * 1/4) / 6
    0.3333
    """

    layers: list[LayerTable]
    documents: int = 1

    def _repr_html_(self) -> str:
        counted = f"{self.documents} document{'s' * (self.documents != 1)}"
        return html_table(f"Means of every head over {counted}", ("layer", "head", *self._columns), self._rows())

    @property
    def _columns(self) -> list[str]:
        """The statistics with one number for each head. A mean by offset is a vector, and has no column."""
        return [name for name, means in self.layers[0].means.items() if means.ndim == 1] if self.layers else []

    def _rows(self) -> Iterator[tuple[float, ...]]:
        """The layer, the head and the numbers of the columns, for each head."""
        for layer in self.layers:
            for head in range(layer.num_heads):
                yield layer.number, head, *(float(layer.means[name][head]) for name in self._columns)

    @staticmethod
    def of(profile: ModelProfile) -> HeadTable:
        """The table of one document."""
        layers = []
        for layer in profile.layers:
            counts = {name: layer.counts[name].double() for name in layer.values}
            means = {name: values.double() for name, values in layer.values.items()}
            layers.append(LayerTable(layer.name, means, counts, layer.number))
        return HeadTable(layers)

    @staticmethod
    def over(profiles: Iterable[ModelProfile]) -> HeadTable:
        """The table of all documents. The profiles are read one after another, so they may come from a generator."""
        total: HeadTable | None = None
        for profile in profiles:
            table = HeadTable.of(profile)
            total = table if total is None else total.merge(table)
        if total is None:
            raise RegardError("HeadTable.over: there are no profiles. Give at least one document.")
        return total

    def merge(self, other: HeadTable) -> HeadTable:
        """The table of the documents of both tables."""
        if _layout(self) != _layout(other):
            raise RegardError(
                "HeadTable.merge: the two tables differ in layers, heads or statistics. "
                "Merge tables of one model, measured with the same statistics."
            )
        layers = [layer.merge(other_layer) for layer, other_layer in zip(self.layers, other.layers, strict=True)]
        return HeadTable(layers, self.documents + other.documents)

    def values(self, name: str) -> Tensor:
        """One statistic of all heads, (layers, H) or (layers, H, ...)."""
        known = list(self.layers[0].means) if self.layers else []
        if name not in known:
            raise RegardError(f"HeadTable: there is no statistic {name!r}. Known names: {', '.join(known)}.")
        means = [layer.means[name] for layer in self.layers]
        if len({mean.shape for mean in means}) > 1:
            sizes = ", ".join(str(len(mean)) for mean in means)
            raise RegardError(
                f"HeadTable.values: the layers have {sizes} heads, so {name!r} is no tensor (layers, heads). Read the "
                "layers one by one: table.layers[n].means."
            )
        return torch.stack(means)

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers for `json.dumps`. `from_json` restores exactly the same table."""
        layers = [
            {
                "name": layer.name,
                "number": layer.number,
                "means": _listed(layer.means),
                "counts": _listed(layer.counts),
            }
            for layer in self.layers
        ]
        return {"documents": self.documents, "layers": layers}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> HeadTable:
        """The table that `to_json` wrote.

        >>> import torch
        >>> table = HeadTable([LayerTable("a", {"x": torch.tensor([0.1])}, {"x": torch.tensor([3.0])})], documents=2)
        >>> restored = HeadTable.from_json(table.to_json())
        >>> torch.equal(restored.values("x"), table.values("x")), restored.documents
        (True, 2)
        """
        try:
            layers = [
                LayerTable(layer["name"], _tensors(layer["means"]), _tensors(layer["counts"]), int(layer["number"]))
                for layer in data["layers"]
            ]
            _check_layers(layers)
            return HeadTable(layers, int(data["documents"]))
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise RegardError(
                f"HeadTable.from_json: the data are not a table ({type(error).__name__}: {error}). "
                "Give the result of HeadTable.to_json."
            ) from None

    def __repr__(self) -> str:
        return f"HeadTable({len(self.layers)} layers, {self.documents} documents)"

    def table(self) -> str:
        """One line of plain text for each head; statistics with several numbers for each head are left out."""
        lines = [" ".join(["layer head", *(f"{name:>11}" for name in self._columns)])]
        for number, head, *values in self._rows():
            lines.append(" ".join([f"{number:5d} {head:4d}", *(f"{value:11.3f}" for value in values)]))
        return "\n".join(lines)


def _check_layers(layers: list[LayerTable]) -> None:
    """Refuse layers of other statistics than the first, and means without a count of at least 0 for each head."""
    if not layers or not layers[0].means:
        raise ValueError("it has no statistics")
    for layer in layers:
        if not layers[0].means.keys() == layer.means.keys() == layer.counts.keys():
            raise ValueError(f"the statistics of {layer.name!r} are others than those of the first layer")
        sizes = {(len(mean), *layer.counts[name].shape) for name, mean in layer.means.items()}
        if len(sizes) > 1 or any(len(size) != 2 or size[0] != size[1] for size in sizes):
            raise ValueError(f"the means and counts of {layer.name!r} are not of the same heads")
        if not all(bool((count >= 0).all()) for count in layer.counts.values()):
            raise ValueError(f"a count of {layer.name!r} is below 0")


def _layout(table: HeadTable) -> list[tuple[str, dict[str, torch.Size]]]:
    """What two tables must have in common to be merged: layers, statistics, and the shapes of their means."""
    return [(layer.name, {name: mean.shape for name, mean in layer.means.items()}) for layer in table.layers]


def _listed(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Tensors as lists for JSON, with their dtypes, from which `_tensors` makes the same tensors."""
    return {name: {"dtype": str(t.dtype).removeprefix("torch."), "values": t.tolist()} for name, t in tensors.items()}


def _tensors(listed: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that `_listed` wrote."""
    return {name: torch.tensor(part["values"], dtype=getattr(torch, part["dtype"])) for name, part in listed.items()}
