"""`GradientMap`: weight x gradient, w_ij (g_i . v_j), computed on demand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.base.shapes import at_least_float32, grouped_scores, to_device
from regard.maps.attention_map import AttentionMap
from regard.maps.changed_map import ChangedMap, OfSource
from regard.maps.gradients import LiveRows, Rows, given, joined_rows, mapped_rows
from regard.maps.indices import Index, indices
from regard.maps.reductions import Tile
from regard.pieces.contents import versions_of


class GradientMap(OfSource):
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

    def __init__(self, source: AttentionMap, gradient: Tensor, value: Tensor) -> None:
        _check(source, gradient, value)
        super().__init__(source)
        self.gradient, self._value = gradient.detach(), value.detach()
        inputs = (gradient, value)
        self._live = inputs if torch.is_grad_enabled() and any(t.requires_grad for t in inputs) else None
        self._versions = self._current_versions()

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

    def _current_versions(self) -> list[int]:
        return versions_of((self.gradient, self.value))

    def _check_unchanged(self) -> None:
        """Refuse after a change in place: the gradient would belong to other values."""
        if self._current_versions() != self._versions:
            raise RegardError(
                "weights: the values or their gradients were changed in place since the model ran, so weight x "
                "gradient cannot be computed. Read the map before the change, or compute it again."
            )

    def __getstate__(self) -> dict[str, Any]:
        """All fields but the versions, since a copy has its own tensors."""
        self._check_unchanged()
        return {name: value for name, value in super().__getstate__().items() if name != "_versions"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._versions = self._current_versions()

    @checked
    def select(self, batch: Index, head: Index) -> GradientMap:
        """The map of some batch entries and heads (indices), still lazy."""
        self._check_unchanged()
        b = to_device(indices("weights.select", "batch", batch, self.shape[0]), self.device)
        h = to_device(indices("weights.select", "head", head, self.shape[1]), self.device)
        groups = h // (self.shape[1] // self.value.shape[1])
        gradient, value = self._tensors
        return GradientMap(self.source.select(batch, head), gradient[b][:, h], value[b][:, groups])

    @property
    def _tensors(self) -> tuple[Tensor, Tensor]:
        return self._live or (self.gradient, self.value)

    @property
    def requires_grad(self) -> bool:
        return self.source.requires_grad or self._live is not None

    def live_rows(self) -> LiveRows:
        def combine(parts: list[Any]) -> Rows:
            rows, tensors = parts
            return lambda i, keys: (rows(i, keys)[0] * self._slopes(i, keys.tensor("cpu"), *tensors), None)

        return joined_rows([self.source.live_rows(), given(self._tensors)], combine)

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


def _check(source: AttentionMap, gradient: Tensor, value: Tensor) -> None:
    B, H, I, J = source.shape
    shapes = f"weights {source.shape}, gradient {tuple(gradient.shape)}, values {tuple(value.shape)}"
    fits = gradient.ndim == value.ndim == 4 and gradient.shape[:3] == (B, H, I)
    fits = fits and value.shape[::2] == (B, J) and value.shape[3] == gradient.shape[3] and H % value.shape[1] == 0
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
    >>> from regard.maps.gradient_map import PositiveMap
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
