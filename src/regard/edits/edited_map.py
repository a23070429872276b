"""`EditedMap`: the weights of an attention after edits of its weights."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from regard.base.checks import checked
from regard.base.shapes import to_device
from regard.edits.layer_edits import EditedTile, LayerEdits
from regard.maps.attention_map import AttentionMap
from regard.maps.changed_map import ChangedMap
from regard.maps.gradients import LiveRows, mapped_rows
from regard.maps.indices import Index


class EditedMap(ChangedMap):
    """The weights of another map, scaled, replaced or removed where edits say so; computed on demand.

    >>> import torch, regard as rg
    >>> from regard.edits.layer_edits import LayerEdit
    >>> from regard.edits.pairs import Pairs
    >>> x, half = torch.zeros(1, 1, 2, 4), rg.edits.ScaleWeights(rg.Where(keys=0), 0.5)
    >>> pairs = Pairs(keys=half.where.indices("keys"))
    >>> EditedMap(rg.Attention()(x, x, x).weights, LayerEdits((LayerEdit(half, pairs),)))[0, 0, 1]
    tensor([0.2500, 0.5000])
    """

    def __init__(self, source: AttentionMap, edits: LayerEdits) -> None:
        super().__init__(source)
        self.edits = edits

    @property
    def is_signed(self) -> bool:  # type: ignore[override]
        return self.source.is_signed or any(edit.gives_negative for edit in self.edits.edits)

    @property
    def has_shares(self) -> bool:  # type: ignore[override]
        return self.source.has_shares and all(edit.keeps_shares for edit in self.edits.edits)

    @property
    def _bytes_per_weight(self) -> int:
        return 3 * self.source._bytes_per_weight

    @checked
    def select(self, batch: Index, head: Index) -> EditedMap:
        """The map of some batch entries and heads (indices), still lazy."""
        return EditedMap(self.source.select(batch, head), self.edits)

    def live_rows(self) -> LiveRows:
        return mapped_rows(
            self.source.live_rows(), lambda weights, i, keys: self._edited(weights, i, keys.tensor("cpu"))
        )

    def _weights(self, rows: Tensor | slice, cols: Tensor | slice) -> Tensor:
        return self._edited(self.source._weights(rows, cols), rows, cols)

    def _edited(self, weights: Tensor, rows: Tensor | slice, cols: Tensor | slice) -> Tensor:
        i = rows if isinstance(rows, slice) else to_device(rows, self.device)
        j = cols if isinstance(cols, slice) else to_device(cols, self.device)
        grid = replace(self.grid, query=self.grid.query[i], key=self.grid.key[j], positions=None)
        tile = EditedTile(grid, self.grid, self.attention.mask, self.attention.normalizer.row_sum)
        return self.edits.weights(weights, tile)
