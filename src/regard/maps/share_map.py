"""`ShareMap`: the shares |w_ij| / sum_j |w_ij| of another map."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from regard.base.checks import checked
from regard.base.shapes import to_device
from regard.base.spans import Spans
from regard.maps.attention_map import AttentionMap
from regard.maps.changed_map import ChangedMap
from regard.maps.gradients import LiveRows, mapped_rows
from regard.maps.indices import Index, indices
from regard.maps.reductions import SignedMass, Signs, Tile


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
        b = to_device(indices("weights.select", "batch", batch, self.shape[0]), self.device)
        h = to_device(indices("weights.select", "head", head, self.shape[1]), self.device)
        return ShareMap(self.source.select(batch, head), Signs(*(part[b][:, h] for part in self.signs)))

    def live_rows(self) -> LiveRows:
        return mapped_rows(self.source.live_rows(), _shares_of_rows)

    def _shares(self, weights: Tensor, rows: Tensor | slice) -> Tensor:
        rows = rows if isinstance(rows, slice) else to_device(rows, self.device)
        totals = self.totals[:, :, rows, None].to(weights.dtype)
        return weights.abs() / totals.masked_fill(totals == 0, 1.0)

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
    return sizes / totals.masked_fill(totals == 0, 1.0)


AttentionMap._shares_of = ShareMap
