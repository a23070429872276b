"""`HeadMean`: the mean over the heads of a map, as a map with one head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from regard.base.checks import checked
from regard.maps.attention_map import AttentionMap
from regard.maps.gradients import LiveRows, mapped_rows
from regard.maps.indices import Index, indices
from regard.maps.reductions import Tile


class HeadMean(AttentionMap):
    """mean_h w_hij of another map, which may have some of the `num_channels` heads of a layer.

    Layers of channels (Mamba-1, RWKV, convolutions) have thousands of heads.

    >>> import torch, regard as rg
    >>> from regard.maps.head_mean import HeadMean
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
