"""`ChangedMap`: the base of maps whose weights are those of another map, changed pair by pair."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.maps.attention_map import AttentionMap


class ChangedMap(AttentionMap):
    """A map with the same heads, queries and keys as its `source`; a subclass says how the weights change.

    It requires grad if its source does, so a subclass also defines `live_rows`.
    """

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

    @property
    def value(self) -> Tensor:
        return self.source.value if self._values is None else super().value

    @property
    def _dtype(self) -> torch.dtype:
        return self.source._dtype

    @property
    def requires_grad(self) -> bool:
        return self.source.requires_grad
