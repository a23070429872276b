"""A mask as the kernels read it: tiles of queries, each with segments of keys; bytes only where a segment needs them.

The part of a mask that depends on j - i alone becomes a range of distances, and the kernel compares indices. For the
rest, `any_allowed` and `all_allowed` are asked once for each tile: keys that all queries may attend to become segments
without bytes, the other keys segments with one byte a pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, reduce
from itertools import pairwise
from operator import and_

import torch
from torch import Tensor

from regard.base.positions import Positions
from regard.base.shapes import Sizes
from regard.base.spans import EMPTY, Spans
from regard.engine.blocks import query_edges
from regard.engine.kernel.layouts import MARGIN, TILE_QUERIES
from regard.pieces.grid import Grid
from regard.pieces.mask import Mask, conjuncts, distance_range, leaves

#: Indices that no query or key reaches, small enough for sums of three.
FAR = 1 << 40
#: Fewest keys of a segment without bytes; shorter intervals belong to segments with bytes.
LEAST_FULL = 32
#: Most bytes of a mask that are kept from one call to the next.
KEPT_BYTES = 4 << 20


@dataclass(frozen=True)
class Segment:
    """Keys [first, stop) of a tile; `is_full`: every query of the tile may attend to all of them."""

    first: int
    stop: int
    is_full: bool


@dataclass(frozen=True)
class Tile:
    """Queries [first, stop) of a batch entry (None: of every entry), with the segments of their keys."""

    entry: int | None
    first: int
    stop: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, eq=False)
class Layout:
    """Tiles of all queries, and the distances j - i of indices, [low, high), that the mask allows.

    `distances` is the relative part of the mask if a range does not express it, else None. `rest` is the other part by
    batch entry, under None if all entries have the same; empty if there is no other part.
    """

    sizes: Sizes
    grid: Grid
    low: int
    high: int
    distances: Mask | None
    rest: dict[int | None, Mask] = field(repr=False)
    tiles: list[Tile] = field(repr=False)

    @staticmethod
    def of(mask: Mask | None, positions: Positions, sizes: Sizes, tile_queries: int = TILE_QUERIES) -> Layout:
        """The layout of a mask. If the mask holds no tensor, the layout is kept for later calls."""
        new = _kept_layout if _is_value(mask) else Layout._new
        return new(mask, positions, sizes, tile_queries)

    @staticmethod
    def _new(mask: Mask | None, positions: Positions, sizes: Sizes, tile_queries: int) -> Layout:
        """The layout of a mask: its relative part as a range, and of the rest the tiles of each batch entry.

        A tile has at most `tile_queries` queries.
        """
        grid = Grid.whole(positions, sizes.B, sizes.H, sizes.I)
        relative, rest = _parts(mask, len(positions.keys.intervals) == 1)
        low, high, distances = _range(relative, positions)
        rest_of_entry = _entry_masks(rest, grid, sizes.B)
        tiles = [
            Tile(entry, *ends, _segments(*_keys_of_tile(part, ends, positions, sizes, low, high)))
            for entry, part in rest_of_entry.items()
            for ends in _tile_edges(part, positions, sizes.I, tile_queries)
        ]
        masks = {entry: part for entry, part in rest_of_entry.items() if part is not None}
        return Layout(sizes, grid, low, high, distances, masks, tiles)

    @property
    def has_entries(self) -> bool:
        """Whether each batch entry has tiles of its own."""
        return None not in self.rest and bool(self.rest)

    @cached_property
    def num_pairs(self) -> int:
        """Pairs of one head, in all batch entries, that are scored: an estimate from the middle of each tile."""
        pairs = sum(self._tile_pairs(tile) for tile in self.tiles)
        return pairs if self.has_entries else pairs * self.sizes.B

    def _tile_pairs(self, tile: Tile) -> int:
        """The pairs of a tile, as if all its queries had the keys of the query in the middle."""
        middle = (tile.first + tile.stop) // 2
        widths = (
            min(segment.stop, middle + self.high) - max(segment.first, middle + self.low) for segment in tile.segments
        )
        return (tile.stop - tile.first) * sum(max(0, width) for width in widths)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the flags of all pairs, for one head: one for each pair of a segment that needs them."""
        return sum((t.stop - t.first) * (s.stop - s.first) for t in self.tiles for s in t.segments if not s.is_full)

    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tiles and segments as rows of integers, and the bytes of all segments that need them, (H or 1, ...).

        The rows have the fields of `Tile` and `Segment` of kernels/regard.h.
        """
        return self._kept_tables if self.num_bytes <= KEPT_BYTES else self._new_tables()

    @cached_property
    def _kept_tables(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._new_tables()

    def _new_tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tables of `tables`, computed anew."""
        tiles, segments, parts, used = [], [], [], MARGIN  # the bytes begin after a margin, which kernels may read
        for tile in self.tiles:
            first_segment = len(segments)
            for segment in tile.segments:
                width = segment.stop - segment.first
                if segment.is_full:
                    segments.append((segment.first, segment.stop, -1, 0))
                else:
                    segments.append((segment.first, segment.stop, used, width))
                    parts.append(self._allowed(tile, segment))
                    used += (tile.stop - tile.first) * width
            entry = -1 if tile.entry is None else tile.entry
            tiles.append((entry, tile.first, tile.stop, first_segment, len(segments)))
        return _integers(tiles, 5), _integers(segments, 4), _joined(parts)

    def _allowed(self, tile: Tile, segment: Segment) -> Tensor:
        """Whether the rest of the mask allows each pair, as bytes (H or 1, pairs of the segment), query by query."""
        keys = Spans(((segment.first, segment.stop),))
        grid = self.grid.tile(slice(tile.first, tile.stop), keys)
        if tile.entry is not None:
            grid = grid.entries(slice(tile.entry, tile.entry + 1))
        allowed = self.rest[tile.entry].allowed(grid)
        return allowed[0].expand(-1, tile.stop - tile.first, len(keys)).flatten(1).to(torch.uint8)


@lru_cache(maxsize=32)
def _kept_layout(mask: Mask | None, positions: Positions, sizes: Sizes, tile_queries: int) -> Layout:
    return Layout._new(mask, positions, sizes, tile_queries)


def _is_value(mask: Mask | None) -> bool:
    """Whether the mask consists of masks of this package that are compared by value, so none holds a tensor."""
    return all(
        type(leaf).__module__.startswith("regard.") and type(leaf).__hash__ is not object.__hash__
        for leaf in leaves(mask)
    )


def _integers(rows: list[tuple[int, ...]], width: int) -> Tensor:
    """Rows of `width` integers as a table, which may have no row."""
    return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, width)


def _joined(parts: list[Tensor]) -> Tensor:
    """The bytes of all segments side by side, (H or 1, ...), between two margins."""
    num_heads = max((len(part) for part in parts), default=1)
    margin = torch.zeros(num_heads, MARGIN, dtype=torch.uint8, device="cpu")
    return torch.cat([margin, *(part.expand(num_heads, -1) for part in parts), margin], 1)


def _parts(mask: Mask | None, splits: bool) -> tuple[Mask | None, Mask | None]:
    """The mask as a conjunction of a part that depends on j - i alone, and the rest; without `splits` all is the rest.

    With gaps between keys, a difference of positions is no difference of indices, so nothing is split off.
    """
    relative: list[Mask] = []
    rest: list[Mask] = []
    for part in () if mask is None else conjuncts(mask):
        (relative if part.relative and splits else rest).append(part)
    return reduce(and_, relative) if relative else None, reduce(and_, rest) if rest else None


def _range(relative: Mask | None, positions: Positions) -> tuple[int, int, Mask | None]:
    """The allowed distances of indices as a range, and the mask itself if a range does not express it.

    Masks compare positions: j - i of indices is that of positions plus `shift`.
    """
    if relative is None:
        return -FAR, FAR, None
    low, high, is_whole = distance_range(relative)
    shift = positions.start - positions.keys.intervals[0][0]
    if low >= high:
        return 0, 0, None
    return max(low + shift, -FAR), min(high + shift, FAR), None if is_whole else relative


def _entry_masks(rest: Mask | None, grid: Grid, num_entries: int) -> dict[int | None, Mask | None]:
    """The rest of the mask for each batch entry; one mask under None if it is the same for all entries.

    The mask of an entry has narrower spans than that of all entries. Only a mask with one answer for all has no axis of
    entries.
    """
    if rest is None:
        return {None: None}
    by_entry = [rest.of_entry(entry) for entry in range(num_entries)]
    if all(part is rest for part in by_entry) and rest.allowed(grid.first_pair()).shape[0] == 1:
        return {None: rest}
    return dict(enumerate(by_entry))


def _tile_edges(rest: Mask | None, positions: Positions, num_queries: int, height: int) -> Iterator[tuple[int, int]]:
    """The queries [first, stop) of each tile."""
    for first_edge, last_edge in pairwise(query_edges(rest, positions, num_queries)):
        for first in range(first_edge, last_edge, height):
            yield first, min(first + height, last_edge)


def _keys_of_tile(
    rest: Mask | None, ends: tuple[int, int], positions: Positions, sizes: Sizes, low: int, high: int
) -> tuple[Spans, Spans]:
    """The keys that some query of a tile may attend to, and those that the rest of the mask allows to every query.

    `ends` are the first and stop query of the tile, [low, high) the allowed distances of indices.
    """
    first, stop = ends
    reach = Spans.of((max(0, first + low), min(sizes.J, stop - 1 + high)))
    if rest is None:
        return reach, Spans(((0, sizes.J),))
    ends = first + positions.start, stop + positions.start
    return positions.columns(rest.any_allowed(*ends)) & reach, positions.columns(rest.all_allowed(*ends))


def _segments(candidates: Spans, full: Spans) -> tuple[Segment, ...]:
    """Segments, in order, of the keys that some query may attend to; without bytes where every query may: `full`.

    A short interval of full keys gets bytes, since one more segment costs more.
    """
    if candidates and full.covers(candidates):
        return tuple(Segment(*interval, True) for interval in candidates)
    long = Spans(tuple(ends for ends in candidates & full if ends[1] - ends[0] >= LEAST_FULL)) if full else EMPTY
    segments = [*(Segment(*ends, True) for ends in long), *(Segment(*ends, False) for ends in candidates & ~long)]
    return tuple(sorted(segments, key=lambda segment: segment.first))
