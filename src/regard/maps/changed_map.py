"""`OfSource` and `ChangedMap`: bases of maps over the queries and keys of another map, and of those that change it."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.maps.attention_map import AttentionMap


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
