"""Maps of consecutive queries, for example of the steps of a generation, as one map of any family."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from regard.attention import Attention, Prepared
from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import to_device
from regard.base.spans import EMPTY, EVERYTHING, Spans
from regard.maps.attention_map import AttentionMap
from regard.maps.indices import Index
from regard.maps.scored_map import ScoredMap
from regard.pieces.grid import Grid
from regard.pieces.mask import Mask


@dataclass(frozen=True, eq=False)
class MapRows:
    """Some rows of one map, and their place in a joined map.

    `source` returns the map. Its rows `rows` are the rows from `start` on of the joined map, and its first key is key
    `offset` there. `entries` (B,) has the batch entry of the source for each batch entry of the joined map; -1: none.
    """

    source: Callable[[], AttentionMap]
    rows: range
    start: int
    offset: int
    entries: Tensor

    @property
    def stop(self) -> int:
        return self.start + len(self.rows)

    def inside(self, rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
        """Which of these rows and columns of the joined map (indices on the host) this part has: their places."""
        first, size = self.offset, self.source().shape[3]
        own_rows = ((rows >= self.start) & (rows < self.stop)).nonzero().flatten()
        return own_rows, ((cols >= first) & (cols < first + size)).nonzero().flatten()


class JoinedMap(AttentionMap):
    """Rows of several maps as one map.

    Each row is computed by the map that it came from, so every family can be joined. Pairs that no part has weigh 0.
    The first part says what their dtype is.

    >>> import torch, regard as rg
    >>> from regard.maps.joined import JoinedMap, MapRows
    >>> x, attention = torch.zeros(1, 1, 3, 4), rg.Attention(mask=rg.causal())
    >>> first = attention(x[:, :, :2], x[:, :, :2], x[:, :, :2]).weights
    >>> last = attention(x[:, :, 2:], x, x).weights
    >>> entry = torch.zeros(1, dtype=torch.int64)
    >>> parts = [MapRows(lambda: first, range(2), 0, 0, entry), MapRows(lambda: last, range(1), 2, 0, entry)]
    >>> JoinedMap(parts, num_queries=3, num_keys=3)[0, 0]
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """

    _made_of: ClassVar[str] = "made of the rows of several calls: seen.calls(3) has the map of each"

    def __init__(self, parts: Sequence[MapRows], num_queries: int, num_keys: int) -> None:
        self.parts = list(parts)
        source = self.parts[0].source()
        self.positions = Positions.aligned_to_end(num_queries, num_keys)
        num_batch = len(self.parts[0].entries)
        self.grid = Grid.whole(self.positions, num_batch, source.shape[1], num_queries, source.device)
        self.attention = Attention(mask=JoinedMask(self.parts, self.positions)).eval()

    @cached_property
    def _first(self) -> AttentionMap:
        return self.parts[0].source()

    @cached_property
    def is_signed(self) -> bool:  # type: ignore[override]
        return any(part.source().is_signed for part in self.parts)

    @cached_property
    def has_shares(self) -> bool:  # type: ignore[override]
        return all(part.source().has_shares for part in self.parts)

    @property
    def _dtype(self) -> torch.dtype:
        return self._first._dtype

    @property
    def _bytes_per_weight(self) -> int:
        return 2 * self._item_bytes + self._first._bytes_per_weight

    @checked
    def select(self, batch: Index, head: Index) -> JoinedMap:
        """The map of some batch entries and heads (indices), still lazy."""
        b, h = (to_device(index, self.device) for index in self._selected_indices(batch, head))
        chosen = JoinedMap(self.parts, *self.shape[2:])
        chosen.grid = replace(self.grid, batch=self.grid.batch[b], head=self.grid.head[h])
        return chosen

    @property
    def requires_grad(self) -> bool:
        return any(part.source().requires_grad for part in self.parts)

    def detach(self) -> JoinedMap:
        """The same map without the graphs of its parts."""
        if not self.requires_grad:
            return self
        parts = [replace(part, source=part.source().detach) for part in self.parts]
        detached = JoinedMap(parts, *self.shape[2:])
        detached.grid = self.grid
        return detached

    def _weights(self, rows: Tensor | slice, cols: Tensor | slice) -> Tensor:
        """Zeros, filled part by part with the rows, columns and batch entries that the part has."""
        i, j = (_on_host(part, size) for part, size in zip((rows, cols), self.shape[2:], strict=True))
        weights = torch.zeros(*self.shape[:2], len(i), len(j), dtype=self._dtype, device=self.device)
        for part in _overlapping(self.parts, i):
            own_rows, own_cols = part.inside(i, j)
            entries, sources, places = _entries(part, self.grid.batch)
            if not (len(own_rows) and len(own_cols) and len(entries)):
                continue
            tile = self._of_heads(part.source(), sources)._weights(
                i[own_rows] - part.start + part.rows.start, j[own_cols] - part.offset
            )
            where = (n.to(self.device) for n in (entries, torch.arange(self.shape[1]), own_rows, own_cols))
            weights[torch.meshgrid(*where, indexing="ij")] = tile[places.to(tile.device)].to(self._dtype)
        return weights

    def _of_heads(self, source: AttentionMap, entries: Tensor) -> AttentionMap:
        """The source, for the heads of this map and some of its own batch entries."""
        heads = self.grid.head.cpu()
        every_head = len(heads) == source.shape[1] and torch.equal(heads, torch.arange(len(heads)))
        every_entry = torch.equal(entries, torch.arange(source.shape[0]))
        return source if every_head and every_entry else source.select(entries, heads)


class JoinedMask(Mask):
    """The keys that each query of a joined map may attend to: those of the map that its row came from."""

    def __init__(self, parts: Sequence[MapRows], positions: Positions) -> None:
        self.parts, self.positions = list(parts), positions

    def allowed(self, grid: Grid) -> Tensor:
        i, j = grid.query.cpu() - self.positions.start, grid.key.cpu()
        result = torch.zeros(len(grid.batch), 1, len(i), len(j), dtype=torch.bool, device=grid.device)
        for part in _overlapping(self.parts, i):
            own_rows, own_cols = part.inside(i, j)
            entries, sources, places = _entries(part, grid.batch)
            if not (len(own_rows) and len(own_cols) and len(entries)):
                continue
            pairs = _allowed(part, sources[places], grid.head, i[own_rows], j[own_cols])
            if pairs.shape[1] > result.shape[1]:  # the first part whose mask differs between heads
                result = result.expand(-1, pairs.shape[1], -1, -1).clone()
            where = (n.to(grid.device) for n in (entries, torch.arange(result.shape[1]), own_rows, own_cols))
            where = torch.meshgrid(*where, indexing="ij")
            result[where] = pairs.expand(where[0].shape)
        return result

    def any_allowed(self, start: int, stop: int) -> Spans:
        spans = EMPTY
        for part, keys in self._keys("any_allowed", start, stop):
            spans = spans | keys.shift(part.offset)
        return spans & self.positions.keys

    def all_allowed(self, start: int, stop: int) -> Spans:
        """The keys that every part with such queries allows; none if a query, or a batch entry, is in no part."""
        spans, rows = EVERYTHING, EMPTY
        for part, keys in self._keys("all_allowed", start, stop):
            rows |= Spans.of((part.start, part.stop))
            spans &= keys.shift(part.offset) if bool((part.entries >= 0).all()) else EMPTY
        first = self.positions.start
        return spans & self.positions.keys if rows.covers(Spans.of((start - first, stop - first))) else EMPTY

    def _keys(self, question: str, start: int, stop: int) -> Iterator[tuple[MapRows, Spans]]:
        """Each part with some of the queries [start, stop), and the answer of its own mask, as indices of its keys.

        `question` is "any_allowed" or "all_allowed".
        """
        first, last = start - self.positions.start, stop - self.positions.start
        for part in self.parts:
            top, bottom = max(first, part.start), min(last, part.stop)
            if top >= bottom:
                continue
            source = part.source()
            # `shift` leads from a row of the joined map to the position of the query in the source
            mask, shift = source.attention.mask, source.positions.start + part.rows.start - part.start
            keys = EVERYTHING if mask is None else getattr(mask, question)(top + shift, bottom + shift)
            yield part, source.positions.columns(keys)

    def __repr__(self) -> str:
        masks = dict.fromkeys(repr(part.source().attention.mask) for part in (self.parts[0], self.parts[-1]))
        return f"joined({', '.join(masks)})"


def _allowed(part: MapRows, entries: Tensor, heads: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    """What the mask of a part allows, for rows and columns of the joined map that it has."""
    source = part.source()
    if (mask := source.attention.mask) is None:
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=source.device)
    i, j, b = (to_device(n, source.device) for n in (rows - part.start + part.rows.start, cols - part.offset, entries))
    return mask.allowed(Grid(source.grid.batch[b], heads, source.grid.query[i], source.grid.key[j]))


def _overlapping(parts: Sequence[MapRows], rows: Tensor) -> list[MapRows]:
    """The parts that may have some of these rows."""
    if not len(rows):
        return []
    first, last = int(rows.min()), int(rows.max())
    return [part for part in parts if part.start <= last and part.stop > first]


def _entries(part: MapRows, batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which of these entries of the joined map a part has (their places in `batch`), and where its source has them.

    The second tensor has each needed entry of the source once, and the third the place of each entry in the second.
    """
    of_source = part.entries[batch.cpu()]
    entries = (of_source >= 0).nonzero().flatten()
    return entries, *of_source[entries].unique(return_inverse=True)


def _on_host(part: Tensor | slice, size: int) -> Tensor:
    """Rows or columns of a map as indices on the host; `size` is that of the axis."""
    return torch.arange(*part.indices(size)) if isinstance(part, slice) else part.cpu()


def joined(maps: Sequence[AttentionMap]) -> AttentionMap:
    """One map from maps of consecutive queries: the rows of each map, over the keys of the last map.

    All maps must have the same batch and heads. Each must begin at the query after the last query of the previous one.
    If the last map dropped keys, as those of a `RingCache` do, the rows before it lose the weights of these keys.

    >>> import torch, regard as rg
    >>> attention, q, k = rg.Attention(mask=rg.causal()), torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    >>> steps = [attention(q[:, :, i : i + 1], k[:, :, : i + 1], k[:, :, : i + 1]) for i in range(3)]
    >>> joined([step.weights for step in steps])
    AttentionMap(1 x 2 heads x 3 queries x 3 keys)
    """
    if not maps:
        raise RegardError("joined: there are no maps to join.")
    last, place = maps[-1], maps[0].positions.start
    for part in maps:
        if part.positions.start != place or part.shape[:2] != last.shape[:2]:
            raise RegardError(
                f"joined: the maps must have consecutive queries and equal (batch, heads). Query {place} and "
                f"{last.shape[:2]} were expected, got query {part.positions.start} and {part.shape[:2]}. Watch one "
                "sequence of calls at a time."
            )
        place += part.shape[2]
    keys = last.positions.keys
    keeps_keys = all(keys.covers(part.positions.keys) for part in maps)
    scored = [part for part in maps if keeps_keys and type(part) is ScoredMap and not part.requires_grad]
    return _one_scored_map(scored) if len(scored) == len(maps) else _of_any_family(maps)


def _one_scored_map(maps: Sequence[ScoredMap]) -> ScoredMap:
    """One map of all queries and the last keys; every call has the pieces of the last one."""
    last, parts = maps[-1], [part._prepared for part in maps]
    rows = tuple(None if r is None else torch.cat([p.rows[n] for p in parts], 2) for n, r in enumerate(parts[0].rows))  # type: ignore[misc]
    prepared = Prepared(torch.cat([p.query for p in parts], 2), parts[-1].key, rows, parts[-1].cols)
    positions = Positions(maps[0].positions.start, last.positions.keys)
    grid = Grid(last.grid.batch, last.grid.head, torch.cat([part.grid.query for part in maps]), last.grid.key)
    return ScoredMap(last.attention, prepared, positions, grid, None)


def _of_any_family(maps: Sequence[AttentionMap]) -> JoinedMap:
    """One map of the rows of each map, with the columns of the last one.

    `offset` is the column of a part's first key: below 0 if the last map dropped keys that the part had.
    """
    entries, parts, start = torch.arange(maps[0].shape[0]), [], 0
    if any(len(part.positions.keys.intervals) > 1 for part in maps):
        raise RegardError(
            f"joined: the keys have gaps between their positions ({maps[-1].positions.keys}), as after the sinks of a "
            "RingCache, and other keys in each call. Read the map of each call, or use a GrowingCache."
        )
    first_key = _first_key(maps[-1])
    for part in maps:
        offset = _first_key(part) - first_key
        parts.append(MapRows(lambda part=part: part, range(part.shape[2]), start, offset, entries))
        start += part.shape[2]
    return JoinedMap(parts, start, maps[-1].shape[3])


def _first_key(weights: AttentionMap) -> int:
    """The position of the first key; 0 without keys."""
    return next((first for first, _ in weights.positions.keys.intervals), 0)
