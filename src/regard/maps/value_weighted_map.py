"""`ValueWeightedMap`: the norms |w_ij| ||v_j W|| of the vectors that keys send to queries, as a map."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.base.shapes import at_least_float32, to_device
from regard.maps.attention_map import AttentionMap
from regard.maps.changed_map import ChangedMap
from regard.maps.compiled_reductions import computes
from regard.maps.gradients import LiveRows, Rows, given, joined_rows
from regard.maps.indices import Index, indices
from regard.maps.reductions import Reduction, Shape, State, Tile, zeros


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
        b = to_device(indices("weights.select", "batch", batch, self.shape[0]), self.device)
        h = to_device(indices("weights.select", "head", head, self.shape[1]), self.device)
        return ValueWeightedMap(self.source.select(batch, head), self.norms[b][:, h])

    def carried(self) -> Tensor:
        """sum_j ||w_ij v_j W_O||: how much every query receives from all keys; (B, H, I)."""
        if self.source.is_signed or self.norms.requires_grad:
            return self.summarize(Carried(torch.ones_like(self.norms)))[0]
        return self.source.summarize(Carried(self.norms))[0]

    def received(self) -> Tensor:
        """sum_i ||w_ij v_j W_O||: how much all queries receive from each key; (B, H, J)."""
        return super().received() if self.source.is_signed else self.source.received() * self.norms

    def per_head(self) -> Tensor:
        """Mean over queries of `carried`, an upper bound on the mean norm of the head's output; (B, H)."""
        return self.carried().mean(-1)

    def _scaled(self, weights: Tensor, cols: Tensor | slice, norms: Tensor | None = None) -> Tensor:
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
        def combine(parts: list[Any]) -> Rows:
            rows, (norms,) = parts
            return lambda queries, keys: (self._scaled(rows(queries, keys)[0], keys.tensor("cpu"), norms), None)

        return joined_rows([self.source.live_rows(), given([self.norms])], combine)

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
