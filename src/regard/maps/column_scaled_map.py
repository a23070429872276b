"""`ColumnScaledMap`: a map whose columns are multiplied by a number for each head and key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from regard.checks import checked
from regard.errors import RegardError
from regard.maps.attention_map import AttentionMap
from regard.maps.folds import Tile
from regard.maps.indices import Index, indices
from regard.shapes import at_least_float32, to_device


class ColumnScaledMap(AttentionMap):
    """w_ij c_j of another map, with a number c (B, H, J) for each batch entry, head and key.

    With the norms of the values it is the norm of each part of an output: what a key sends, and not only how much the
    query attends to it (Kobayashi et al. 2020, arXiv:2004.10102). Rows may have any sum, so statistics that need shares
    are those of `shares()`.

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 1, 2, 4)
    >>> rg.ColumnScaledMap(rg.attend(rg.Attention(), x, x, x).weights, torch.tensor([[[1.0, 3.0]]]))[0, 0]
    tensor([[0.5000, 1.5000],
            [0.5000, 1.5000]])
    """

    is_signed: ClassVar[bool] = True

    def __init__(self, source: AttentionMap, factors: Tensor) -> None:
        B, H, _, J = source.shape
        if factors.shape != (B, H, J):
            raise RegardError(
                f"ColumnScaledMap: the map has (B, H, J) = {(B, H, J)}, the factors have shape "
                f"{tuple(factors.shape)}. Give one number for each batch entry, head and key."
            )
        self.source, self.factors = source, at_least_float32(factors.detach()).to(source.device)
        self.attention, self.positions, self.grid = source.attention, source.positions, source.grid

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.source.shape

    @property
    def _dtype(self) -> torch.dtype:
        return torch.promote_types(self.source._dtype, self.factors.dtype)

    @property
    def _bytes_per_weight(self) -> int:
        return self._item_bytes + self.source._bytes_per_weight

    @checked
    def select(self, batch: Index, head: Index) -> ColumnScaledMap:
        """The map of some batch entries and heads (indices), still lazy."""
        b = to_device(indices("weights.select", "batch", batch, self.shape[0]), self.device)
        h = to_device(indices("weights.select", "head", head, self.shape[1]), self.device)
        return ColumnScaledMap(self.source.select(batch, head), self.factors[b][:, h])

    def _scaled(self, weights: Tensor, cols: Tensor | slice) -> Tensor:
        cols = cols if isinstance(cols, slice) else to_device(cols, self.device)
        return weights * self.factors[:, :, None, cols]

    def _weights(self, rows: Tensor | slice, cols: Tensor | slice) -> Tensor:
        return self._scaled(self.source._weights(rows, cols), cols)

    @torch.no_grad()
    def tiles(self) -> Iterator[Tile]:
        """Every tile of the other map, with its columns multiplied."""
        for tile in self.source.tiles():
            yield replace(tile, weights=self._scaled(tile.weights, tile.cols), log_weights=None)

    def __repr__(self) -> str:
        B, H, I, J = self.shape
        return f"AttentionMap({B} x {H} heads x {I} queries x {J} keys, columns scaled)"
