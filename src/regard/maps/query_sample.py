"""`QuerySample`: some queries of a map, for statistics that are means over queries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from regard.base.checks import checked
from regard.base.shapes import to_device
from regard.base.spans import Spans
from regard.maps.attention_map import AttentionMap
from regard.maps.changed_map import ChangedMap
from regard.maps.gradients import LiveRows, Rows, joined_rows
from regard.maps.indices import Index


class QuerySample(ChangedMap):
    """Some queries of another map: `queries`, ascending indices on the host. No other row is computed.

    >>> import torch, regard as rg
    >>> from regard.maps.query_sample import QuerySample
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
        def combine(parts: list[Any]) -> Rows:
            return lambda queries, keys: parts[0](self.queries[queries], keys)

        return joined_rows([self.source.live_rows()], combine)

    def _weights(self, rows: Tensor | slice, cols: Tensor | slice) -> Tensor:
        return self.source._weights(self.queries[rows], cols)

    def _spans(self, question: str, rows: slice) -> Spans:
        """The mask's answer for all queries from the first to the last of the range."""
        return super()._spans(question, slice(int(self.queries[rows.start]), int(self.queries[rows.stop - 1]) + 1))
