"""Maps that change another map pair by pair (shares, gradients, norms of values), its mean over heads, some queries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.base.shapes import at_least_float32, grouped_scores, to_device, without_zeros
from regard.base.spans import Spans
from regard.maps.attention_map import AttentionMap, RecomputedMap
from regard.maps.compiled_reductions import computes
from regard.maps.gradients import LiveRows, Rows, extra_tensors, joined_rows, mapped_rows
from regard.maps.indices import Index, indices
from regard.maps.reductions import Reduction, Shape, SignedMass, Signs, State, Tile, zeros
from regard.pieces.contents import autograd_records, versions_of

# `OfSource` and `ChangedMap`: bases of maps over the queries and keys of another map, and of those that change it.


class OfSource(AttentionMap):
    """A map with the same heads, queries and keys as its `source`."""

    def __init__(self, source: AttentionMap) -> None:
        self.source = source
        self.attention, self.positions, self.grid = source.attention, source.positions, source.grid

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.source.shape

    @property
    def query(self) -> Tensor:
        return self.source.query

    @property
    def key(self) -> Tensor:
        return self.source.key


class ChangedMap(OfSource):
    """A map whose weights are those of its `source`, changed pair by pair; a subclass says how.

    It requires grad if its source does, so a subclass also defines `live_rows`.
    """

    @property
    def value(self) -> Tensor:
        return self.source.value if self._values is None else super().value

    @property
    def _dtype(self) -> torch.dtype:
        return self.source._dtype

    @property
    def requires_grad(self) -> bool:
        return self.source.requires_grad


# `ShareMap`: the shares |w_ij| / sum_j |w_ij| of another map.


class ShareMap(ChangedMap):
    """|w_ij| / sum_j |w_ij| of another map; a row of zeros stays zero.

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 1, 3, 4)
    >>> rg.Attention()(x, x, x).weights.shares().entropy().exp().round(decimals=4)
    tensor([[[3., 3., 3.]]])
    """

    has_shares: ClassVar[bool] = True

    def __init__(self, source: AttentionMap, signs: Signs | None = None) -> None:
        """`signs`: the sums of the weights of each sign; computed in one pass at the first look if not given."""
        super().__init__(source)
        self._signs = signs

    @property
    def signs(self) -> Signs:
        """The sums of the positive and of the negative weights of every row, (B, H, I) each."""
        if self._signs is None:
            with torch.no_grad():  # rows with gradients compute their own totals
                (self._signs,) = self.source.summarize(SignedMass())
        return self._signs

    @property
    def totals(self) -> Tensor:
        """sum_j |w_ij| of every row, (B, H, I)."""
        return self.signs.positive - self.signs.negative

    @property
    def _bytes_per_weight(self) -> int:
        return self.source._bytes_per_weight

    @checked
    def select(self, batch: Index, head: Index) -> ShareMap:
        """The map of some batch entries and heads (indices), still lazy."""
        b, h = (to_device(index, self.device) for index in self._selected_indices(batch, head))
        return ShareMap(self.source.select(batch, head), Signs(*(part[b][:, h] for part in self.signs)))

    def live_rows(self) -> LiveRows:
        return mapped_rows(self.source.live_rows(), _shares_of_rows)

    def _shares(self, weights: Tensor, rows: Tensor | slice) -> Tensor:
        """The shares of some weights (B, H, I', J') of these rows."""
        rows = rows if isinstance(rows, slice) else to_device(rows, self.device)
        totals = self.totals[:, :, rows, None].to(weights.dtype)
        return weights.abs() / without_zeros(totals)

    def _weights(self, rows: Tensor | slice, cols: Tensor | slice) -> Tensor:
        return self._shares(self.source._weights(rows, cols), rows)

    @torch.no_grad()
    def tiles(self) -> Iterator[Tile]:
        """Every tile of the other map, with shares in place of weights."""
        for tile in self.source.tiles():
            yield replace(tile, weights=self._shares(tile.weights, tile.rows), log_weights=None)


def _shares_of_rows(weights: Tensor, _queries: slice | Tensor, _keys: Spans) -> Tensor:
    """The shares of whole rows."""
    sizes = weights.abs()
    totals = sizes.sum(-1, keepdim=True)
    return sizes / without_zeros(totals)


AttentionMap._shares_of = ShareMap


# `GradientMap`: weight x gradient, w_ij (g_i . v_j), computed on demand.


class GradientMap(OfSource, RecomputedMap):
    """w_ij dL/dw_ij = w_ij (g_i . v_j): how much each weight of a map contributes to L, to first order.

    The output of a head is o_i = sum_j w_ij v_j, so with g_i = dL/do_i the derivative of L is dL/dw_ij = g_i . v_j. The
    map keeps the map of the weights, `gradient` g (B, H, I, E) and `value` v (B, G, J, E), so it takes O(n) memory.
    Weights are signed: a link with a positive one raises L. Each row has the sum g_i . o_i. L is a sum over the texts
    of a batch, or g holds the gradients of several such numbers.

    >>> import torch, regard as rg
    >>> q, k, v = torch.randn(3, 1, 2, 5, 4)
    >>> seen = rg.Attention(mask=rg.causal())(q, k, v)
    >>> gradient = torch.randn(1, 2, 5, 4)
    >>> links = rg.maps.GradientMap(seen.weights, gradient, v)
    >>> links, torch.allclose(links.dense().sum(-1), (gradient * seen.output).sum(-1), atol=1e-5)
    (AttentionMap(1 x 2 heads x 5 queries x 5 keys, signed), True)
    """

    is_signed: ClassVar[bool] = True
    _stale: ClassVar[str] = (
        "weights: the values or their gradients were changed in place since the model ran, so weight x gradient "
        "cannot be computed. Read the map before the change, or compute it again."
    )

    def __init__(self, source: AttentionMap, gradient: Tensor, value: Tensor) -> None:
        _check_tensors(source, gradient, value)
        super().__init__(source)
        self.gradient, self._value = gradient.detach(), value.detach()
        inputs = (gradient, value)
        self._live = inputs if autograd_records(inputs) else None
        self._versions = versions_of(self._shared_tensors())

    def _shared_tensors(self) -> tuple[Tensor, ...]:
        return self.gradient, self.value

    @property
    def value(self) -> Tensor:
        """The values (B, G, J, E), without their graph."""
        return self._value

    @property
    def _dtype(self) -> torch.dtype:
        return torch.promote_types(self.source._dtype, at_least_float32(self.value).dtype)

    @property
    def _bytes_per_weight(self) -> int:
        return 2 * self._item_bytes + self.source._bytes_per_weight

    @checked
    def select(self, batch: Index, head: Index) -> GradientMap:
        """The map of some batch entries and heads (indices), still lazy."""
        self._check_unchanged()
        b, h = (to_device(index, self.device) for index in self._selected_indices(batch, head))
        groups = h // (self.shape[1] // self.value.shape[1])
        gradient, value = self._tensors
        return GradientMap(self.source.select(batch, head), gradient[b][:, h], value[b][:, groups])

    @property
    def _tensors(self) -> tuple[Tensor, Tensor]:
        """The gradient and the values, with their graphs if the map was made in grad mode."""
        return self._live or (self.gradient, self.value)

    @property
    def requires_grad(self) -> bool:
        return self.source.requires_grad or self._live is not None

    def live_rows(self) -> LiveRows:
        """The live rows of the weights, times their derivatives from the gradient and the values with their graphs."""

        def combine(parts: list[Any]) -> Rows:
            rows, tensors = parts
            return lambda i, keys: (rows(i, keys)[0] * self._slopes(i, keys.tensor("cpu"), *tensors), None)

        return joined_rows([self.source.live_rows(), extra_tensors(self._tensors)], combine)

    def _slopes(self, rows: Tensor | slice, cols: Tensor | slice, gradient: Tensor, value: Tensor) -> Tensor:
        """dL/dw_ij = g_i . v_j of a tile (B, H, I', J')."""
        i, j = (x if isinstance(x, slice) else to_device(x, self.device) for x in (rows, cols))
        return grouped_scores(gradient[:, :, i].to(self._dtype), value[:, :, j].to(self._dtype))

    def _weights(self, rows: Tensor | slice, cols: Tensor | slice) -> Tensor:
        self._check_unchanged()
        return self.source._weights(rows, cols) * self._slopes(rows, cols, self.gradient, self.value)

    @torch.no_grad()
    def tiles(self) -> Iterator[Tile]:
        """Every tile of the weights, times its derivatives."""
        self._check_unchanged()
        for tile in self.source.tiles():
            weights = tile.weights * self._slopes(tile.rows, tile.cols, self.gradient, self.value)
            yield replace(tile, weights=weights, log_weights=None)


def _check_tensors(source: AttentionMap, gradient: Tensor, value: Tensor) -> None:
    """Refuse gradients and values that do not fit the map of the weights."""
    B, H, I, J = source.shape
    shapes = f"weights {source.shape}, gradient {tuple(gradient.shape)}, values {tuple(value.shape)}"
    fits = gradient.ndim == value.ndim == 4 and gradient.shape[:3] == (B, H, I)
    fits = fits and value.shape[::2] == (B, J) and value.shape[3] == gradient.shape[3]
    groups = value.shape[1] if fits else 0
    fits = fits and (H % groups == 0 if groups else H == 0)  # a selection of no head has no values either
    if not fits:
        raise RegardError(
            f"GradientMap: {shapes}. With weights (B, H, I, J), gradients of the output are (B, H, I, E), and values "
            "(B, G, J, E), where the number of value heads G divides H."
        )
    if not (gradient.is_floating_point() and value.is_floating_point()):
        raise RegardError(f"GradientMap: gradients and values are floats, got {gradient.dtype} and {value.dtype}.")
    if len({source.device, gradient.device, value.device}) > 1:
        raise RegardError(
            f"GradientMap: the weights are on {source.device}, the gradient on {gradient.device}, the values on "
            f"{value.device}. Move them to one device."
        )


class PositiveMap(ChangedMap):
    """max(w_ij, 0) of another map, for rules that keep positive contributions only (Chefer et al. 2021).

    >>> import torch, regard as rg
    >>> from regard.maps.changed_map import PositiveMap
    >>> PositiveMap(rg.maps.DenseMap(torch.tensor([[[[1.0, -2.0]]]])))[0, 0, 0]
    tensor([1., 0.])
    """

    @property
    def _bytes_per_weight(self) -> int:
        return self.source._bytes_per_weight + self._item_bytes

    @checked
    def select(self, batch: Index, head: Index) -> PositiveMap:
        """The map of some batch entries and heads (indices), still lazy."""
        return PositiveMap(self.source.select(batch, head))

    def _weights(self, rows: Tensor | slice, cols: Tensor | slice) -> Tensor:
        return self.source._weights(rows, cols).clamp_min(0.0)

    def live_rows(self) -> LiveRows:
        return mapped_rows(self.source.live_rows(), lambda weights, _queries, _keys: weights.clamp_min(0.0))

    @torch.no_grad()
    def tiles(self) -> Iterator[Tile]:
        """Every tile of the other map, without its negative weights."""
        for tile in self.source.tiles():
            yield replace(tile, weights=tile.weights.clamp_min(0.0), log_weights=None)


# `ValueWeightedMap`: the norms |w_ij| ||v_j W|| of the vectors that keys send to queries, as a map.


class ValueWeightedMap(ChangedMap):
    """||w_ij v_j W_O|| = |w_ij| c_j, where `norms` (B, H, J) holds c_j = ||v_j W_O|| of every key and head.

    It is what a key sends, and not only how much the query looks at it (Kobayashi et al. 2020, arXiv:2004.10102). Rows
    may have any sum, so statistics that need shares are those of `shares()`.

    >>> import torch, regard as rg
    >>> from regard.stats import value_weighted
    >>> x, value = torch.zeros(1, 1, 2, 2), torch.tensor([[[[3.0, 4.0], [0.0, 0.0]]]])
    >>> sent = value_weighted(rg.Attention()(x, x, value).weights, value, torch.eye(2))
    >>> sent.carried().tolist(), sent.received().tolist()  # the value of the second key is zero
    ([[[2.5, 2.5]]], [[[5.0, 0.0]]])
    """

    is_signed: ClassVar[bool] = True

    def __init__(self, map: AttentionMap, norms: Tensor) -> None:
        B, H, _, J = map.shape
        if norms.shape != (B, H, J):
            raise RegardError(
                f"ValueWeightedMap: the map has (B, H, J) = {(B, H, J)}, the norms have shape {tuple(norms.shape)}. "
                "Give "
                "one number for each batch entry, head and key."
            )
        norms = norms if torch.is_grad_enabled() else norms.detach()
        super().__init__(map)
        self.norms = at_least_float32(norms).to(map.device)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.promote_types(self.source._dtype, self.norms.dtype)

    @property
    def _bytes_per_weight(self) -> int:
        return self._item_bytes + self.source._bytes_per_weight

    @checked
    def select(self, batch: Index, head: Index) -> ValueWeightedMap:
        """The map of some batch entries and heads (indices), still lazy."""
        b, h = (to_device(index, self.device) for index in self._selected_indices(batch, head))
        return ValueWeightedMap(self.source.select(batch, head), self.norms[b][:, h])

    def carried(self) -> Tensor:
        """sum_j ||w_ij v_j W_O||: how much every query receives from all keys; (B, H, I)."""
        if self.source.is_signed or self.norms.requires_grad:
            return self.summarize(Carried(torch.ones_like(self.norms)))[0]
        return self.source.summarize(Carried(self.norms))[0]  # |w| = w: kernels may compute it

    def received(self) -> Tensor:
        """sum_i ||w_ij v_j W_O||: how much all queries receive from each key; (B, H, J)."""
        return super().received() if self.source.is_signed else self.source.received() * self.norms

    def per_head(self) -> Tensor:
        """Mean over queries of `carried`, an upper bound on the mean norm of the head's output; (B, H)."""
        return self.carried().mean(-1)

    def _scaled(self, weights: Tensor, cols: Tensor | slice, norms: Tensor | None = None) -> Tensor:
        """|w_ij| c_j of some weights on these keys, with `norms` c (by default those of the map, without a graph)."""
        cols = cols if isinstance(cols, slice) else to_device(cols, self.device)
        norms = self.norms.detach() if norms is None else norms
        return (weights.abs() if self.source.is_signed else weights) * norms[:, :, None, cols]

    def _weights(self, rows: Tensor | slice, cols: Tensor | slice) -> Tensor:
        return self._scaled(self.source._weights(rows, cols), cols)

    @property
    def requires_grad(self) -> bool:
        """Whether the weights or the norms are in the autograd graph."""
        return self.source.requires_grad or self.norms.requires_grad

    def live_rows(self) -> LiveRows:
        """The live rows of the other map, times the norms with their graph."""

        def combine(parts: list[Any]) -> Rows:
            rows, (norms,) = parts
            return lambda queries, keys: (self._scaled(rows(queries, keys)[0], keys.tensor("cpu"), norms), None)

        return joined_rows([self.source.live_rows(), extra_tensors([self.norms])], combine)

    @torch.no_grad()
    def tiles(self) -> Iterator[Tile]:
        """Every tile of the other map, with its columns multiplied."""
        for tile in self.source.tiles():
            yield replace(tile, weights=self._scaled(tile.weights, tile.cols), log_weights=None)

    def __repr__(self) -> str:
        B, H, I, J = self.shape
        return f"ValueWeightedMap({B} x {H} heads x {I} queries x {J} keys)"


@dataclass(frozen=True, eq=False)
class Carried(Reduction):
    """sum_j w_ij x_j, where `numbers` (B, H, J) holds x_j for each key and head; (B, H, I)."""

    numbers: Tensor

    def init(self, shape: Shape, device: torch.device) -> State:
        return [zeros(device, *shape[:3])]

    def add(self, state: State, tile: Tile) -> None:
        numbers = self.numbers[:, :, tile.cols, None].to(tile.weights)
        state[0][:, :, tile.rows] += (tile.weights @ numbers).squeeze(-1)


computes(Carried, lambda reduction, state, _: {"numbers": [(reduction.numbers, state[0])]})


# `HeadMean`: the mean over the heads of a map, as a map with one head.


class HeadMean(AttentionMap):
    """mean_h w_hij of another map, which may have some of the `num_channels` heads of a layer.

    Layers of channels (Mamba-1, RWKV, convolutions) have thousands of heads.

    >>> import torch, regard as rg
    >>> from regard.maps.changed_map import HeadMean
    >>> weights = rg.Attention()(*torch.randn(3, 1, 4, 5, 8)).weights
    >>> HeadMean(weights)
    AttentionMap(1 x 1 heads x 5 queries x 5 keys)
    >>> torch.allclose(HeadMean(weights).dense()[:, 0], weights.dense().mean(1))
    True
    """

    _made_of: ClassVar[str] = "the mean over the heads of weights.source"

    def __init__(self, source: AttentionMap, num_channels: int | None = None) -> None:
        self.source = source
        self.is_signed, self.has_shares = source.is_signed, source.has_shares  # type: ignore[misc]
        self.num_channels = source.shape[1] if num_channels is None else num_channels
        self.attention, self.positions = source.attention, source.positions
        self.grid = replace(source.grid, head=source.grid.head[:1])

    @property
    def _dtype(self) -> torch.dtype:
        return self.source._dtype

    @property
    def _bytes_per_weight(self) -> int:
        return self.source._bytes_per_weight * self.source.shape[1]

    @checked
    def select(self, batch: Index, head: Index) -> AttentionMap:
        """The map of some batch entries, still lazy; its only head is head 0."""
        selected = HeadMean(self.source.select(batch, torch.arange(self.source.shape[1])), self.num_channels)
        selected.grid = replace(selected.grid, head=selected.grid.head[indices("weights.select", "head", head, 1)])
        return selected

    def _weights(self, rows: Tensor | slice, cols: Tensor | slice) -> Tensor:
        return self._of_heads(self.source._weights(rows, cols))

    def _of_heads(self, weights: Tensor) -> Tensor:
        """The mean, once for each selected head: a selection may name the only head several times, or not at all."""
        return weights.mean(1, keepdim=True).expand(-1, len(self.grid.head), -1, -1)

    @property
    def requires_grad(self) -> bool:
        return self.source.requires_grad

    def live_rows(self) -> LiveRows:
        return mapped_rows(self.source.live_rows(), lambda weights, _queries, _keys: self._of_heads(weights))

    @torch.no_grad()
    def tiles(self) -> Iterator[Tile]:
        """Every tile of the other map, with the mean over its heads."""
        for tile in self.source.tiles():
            mean, grid = self._of_heads(tile.weights), self.grid.tile(tile.rows, tile.cols)
            yield replace(tile, weights=mean, log_weights=None, grid=grid)


# `QuerySample`: some queries of a map, for statistics that are means over queries.


class QuerySample(ChangedMap):
    """Some queries of another map: `queries`, ascending indices on the host. No other row is computed.

    >>> import torch, regard as rg
    >>> from regard.maps.changed_map import QuerySample
    >>> x = torch.zeros(1, 1, 4, 8)
    >>> sample = QuerySample(rg.Attention(mask=rg.causal())(x, x, x).weights, torch.tensor([1, 3]))
    >>> sample, sample[0, 0, 0]
    (AttentionMap(1 x 1 heads x 2 queries x 4 keys), tensor([0.5000, 0.5000, 0.0000, 0.0000]))
    """

    def __init__(self, source: AttentionMap, queries: Tensor) -> None:
        super().__init__(source)
        self.queries = queries
        self.is_signed, self.has_shares = source.is_signed, source.has_shares  # type: ignore[misc]
        query = source.grid.query[to_device(queries, source.device)]
        self.grid = replace(source.grid, query=query, positions=None)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        B, H, _, J = self.source.shape
        return B, H, len(self.queries), J

    @property
    def query(self) -> Tensor:
        return self.source.query[:, :, to_device(self.queries, self.device)]

    @property
    def _bytes_per_weight(self) -> int:
        return self.source._bytes_per_weight

    @checked
    def select(self, batch: Index, head: Index) -> AttentionMap:
        """The map of some batch entries and heads, still lazy."""
        return QuerySample(self.source.select(batch, head), self.queries)

    def live_rows(self) -> LiveRows:
        """Some of the live rows of the other map: `queries` count here, `self.queries` there."""

        def combine(parts: list[Any]) -> Rows:
            (rows,) = parts
            return lambda queries, keys: rows(self.queries[queries], keys)

        return joined_rows([self.source.live_rows()], combine)

    def _weights(self, rows: Tensor | slice, cols: Tensor | slice) -> Tensor:
        return self.source._weights(self.queries[rows], cols)

    def _spans(self, question: str, rows: slice) -> Spans:
        """The mask's answer for all queries from the first to the last of the range."""
        return super()._spans(question, slice(int(self.queries[rows.start]), int(self.queries[rows.stop - 1]) + 1))
