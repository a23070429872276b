"""Masks of tokens that lie on a line, in an image or in a video: neighborhoods, and sliding tiles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import Sizes, to_device
from regard.base.spans import EMPTY, Spans
from regard.pieces.grid import Grid, check_inside
from regard.pieces.mask import Mask
from regard.pieces.mask_checks import check_covers, integers

#: One number for all axes, or one for each.
Axes = int | Sequence[int]


@checked
@dataclass(frozen=True)
class neighborhood(Mask):
    """The `size` nearest keys along each axis of an image or a video (Neighborhood Attention, arXiv:2204.07143).

    Tokens are the points of a grid of the given `shape`, row by row: (W,), (H, W) or (T, H, W). At a border the window
    is shifted inside, so every query has the same number of keys. If `size` is even, one more key is before the query
    than after it. `dilation` puts gaps into the window (arXiv:2209.15001). `stride` queries side by side share the
    window of the one in their middle (arXiv:2504.16922). On a causal axis, `is_causal`, the window ends at the query
    and is not shifted. The semantics are those of NATTEN. Each argument is one number for all axes or one for each.

    >>> import regard as rg
    >>> rg.masks.neighborhood((5,), 3).dense(5).int().tolist()
    [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 0, 1, 1, 1]]
    >>> rg.masks.neighborhood((8, 8), 3).dense(64)[0].nonzero().flatten().tolist()  # the query in the first corner
    [0, 1, 2, 8, 9, 10, 16, 17, 18]
    """

    shape: tuple[int, ...]
    size: tuple[int, ...]
    dilation: tuple[int, ...] = (1,)
    stride: tuple[int, ...] = (1,)
    is_causal: tuple[bool, ...] = (False,)
    batched = False

    def __init__(
        self, shape: Sequence[int], size: Axes, dilation: Axes = 1, stride: Axes = 1, is_causal: object = False
    ) -> None:
        axes = integers("neighborhood", "shape", shape)
        if not axes or min(axes) < 1:
            raise RegardError(f"neighborhood(shape={axes}): give the length of each axis, at least 1.")
        named = {"size": size, "dilation": dilation, "stride": stride}
        numbers = {name: _for_axes("neighborhood", name, given, len(axes)) for name, given in named.items()}
        vars(self).update(shape=axes, is_causal=_flags(is_causal, len(axes)), **numbers)
        for length, width, gap, step in zip(axes, *numbers.values(), strict=True):
            if width * gap > length:
                raise RegardError(
                    f"neighborhood(size={width}, dilation={gap}): an axis of {length} has no window of {width} keys "
                    f"{gap} apart; size times dilation is at most {length}."
                )
            if step > width:
                raise RegardError(
                    f"neighborhood(size={width}, stride={step}): queries that share a window lie inside it, so stride "
                    "is at most size."
                )

    def allowed(self, grid: Grid) -> Tensor:
        _check_on_grid(f"neighborhood of {self.shape}", grid, self.shape)
        return self.of_pairs(grid.query, grid.key)

    def of_pairs(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Whether the key is in the window of the query, and not in a gap of it, on every axis: (1, 1, I, J)."""
        allowed = torch.ones(1, 1, dtype=torch.bool, device=queries.device)
        for axis, (query, key) in enumerate(zip(self.places(queries), self.places(keys), strict=True)):
            first, last = to_device(self.windows[axis], queries.device).T
            near = (key >= first[query][:, None]) & (key <= last[query][:, None])
            gap = self.dilation[axis]
            allowed = allowed & (near if gap == 1 else near & ((key - query[:, None]) % gap == 0))
        return allowed[None, None]

    def any_allowed(self, start: int, stop: int) -> Spans:
        """The union over boxes of queries, in which each axis is asked by itself."""
        boxes = (self._product([self._some(*ends) for ends in enumerate(box)]) for box in self._boxes(start, stop))
        return Spans.union(interval for box in boxes for interval in box)

    def all_allowed(self, start: int, stop: int) -> Spans:
        """The keys that every box of queries allows."""
        common: Spans | None = None
        for box in self._boxes(start, stop):
            keys = self._product([self._every(*ends) for ends in enumerate(box)])
            common = keys if common is None else common & keys
            if not common:
                break
        return EMPTY if common is None else common

    def edges(self, start: int, stop: int) -> Sequence[int]:
        """Where a row of an image, or an image of a video, begins."""
        step = math.prod(self.shape[1:])
        return range((start // step + 1) * step, stop, step) if len(self.shape) > 1 else ()

    def check(self, sizes: Sizes, positions: Positions) -> None:
        length = math.prod(self.shape)
        check_covers(f"neighborhood of {self.shape}", "queries", positions.queries(sizes.I), length)
        check_covers(f"neighborhood of {self.shape}", "keys", positions.keys, length)

    @cached_property
    def windows(self) -> list[Tensor]:
        """For each axis, the first and the last key of each query, (n, 2)."""
        return [
            _windows(*axis)
            for axis in zip(self.shape, self.size, self.dilation, self.stride, self.is_causal, strict=True)
        ]

    def places(self, positions: Tensor) -> list[Tensor]:
        """The coordinates of positions along each axis; positions are in the grid."""
        places = []
        for length in reversed(self.shape[1:]):
            places.append(positions % length)
            positions = positions // length
        return [positions, *reversed(places)]

    @cached_property
    def _ends(self) -> list[list[list[int]]]:
        """`windows` as numbers of Python."""
        return [windows.tolist() for windows in self.windows]

    def _some(self, axis: int, ends: tuple[int, int]) -> Spans:
        """Keys of at least one query from `ends[0]` to `ends[1]` of an axis.

        With a dilation: exact for one query; for more, all keys from the first to the last, which may be too many.
        """
        windows = self._ends[axis][ends[0] : ends[1] + 1]
        if self.dilation[axis] > 1 and len(windows) == 1:
            ((first, last),) = windows
            return Spans(tuple((key, key + 1) for key in range(first, last + 1, self.dilation[axis])))
        return Spans.of((min(first for first, _ in windows), max(last for _, last in windows) + 1))

    def _every(self, axis: int, ends: tuple[int, int]) -> Spans:
        """Keys of every query from `ends[0]` to `ends[1]` of an axis. With a dilation: of one query; of more, none."""
        windows = self._ends[axis][ends[0] : ends[1] + 1]
        if self.dilation[axis] > 1:
            return self._some(axis, ends) if len(windows) == 1 else EMPTY
        return Spans.of((max(first for first, _ in windows), min(last for _, last in windows) + 1))

    def _boxes(self, start: int, stop: int) -> Iterator[list[tuple[int, int]]]:
        """The boxes of `_boxes`, without positions outside the grid."""
        start, stop = max(start, 0), min(stop, math.prod(self.shape))
        if start < stop:
            yield from _boxes(start, stop, self.shape)

    def _product(self, axes: list[Spans]) -> Spans:
        """Positions whose coordinates are in the sets of all axes, from the last axis to the first.

        `keys` are the positions inside a slab of the axes so far, which has `below` points.
        """
        keys, below = axes[-1], self.shape[-1]
        for length, spans in zip(self.shape[-2::-1], axes[-2::-1], strict=True):
            if keys.intervals == ((0, below),):  # whole slabs touch each other
                keys = Spans(tuple((first * below, last * below) for first, last in spans))
            else:
                places = (place for ends in spans for place in range(*ends))
                keys = Spans.union((place * below + a, place * below + b) for place in places for a, b in keys)
            below *= length
        return keys


@checked
@dataclass(frozen=True)
class sliding_tiles(Mask):
    """The `size` nearest tiles along each axis, for tokens in the order of their tiles (STA, arXiv:2502.04507).

    A grid of `shape`, (H, W) or (T, H, W), is cut into tiles of shape `tile`. The tokens of a tile are neighbors in
    the sequence (`order` brings them there), and all have the same keys: those of the tiles in a window around their
    own, which is shifted inside at a border. `size` counts tiles. So no pair of tiles is allowed in part, and blocks of
    whole tiles need no mask inside.

    >>> import regard as rg
    >>> mask = rg.masks.sliding_tiles((4, 4), tile=(2, 2), size=(1, 2))
    >>> mask.dense(16)[0].nonzero().flatten().tolist()  # its own tile, and the next one of the same row
    [0, 1, 2, 3, 4, 5, 6, 7]
    >>> mask.order[:8].tolist()  # tokens of a picture, row by row, in the order of the tiles
    [0, 1, 4, 5, 2, 3, 6, 7]
    """

    shape: tuple[int, ...]
    tile: tuple[int, ...]
    size: tuple[int, ...]
    batched = False

    def __init__(self, shape: Sequence[int], tile: Axes, size: Axes) -> None:
        axes = integers("sliding_tiles", "shape", shape)
        tiles = _for_axes("sliding_tiles", "tile", tile, len(axes))
        if not axes or min(axes) < 1 or any(length % side for length, side in zip(axes, tiles, strict=True)):
            raise RegardError(
                f"sliding_tiles(shape={axes}, tile={tiles}): each axis is a whole number of tiles. Pad the picture, "
                "and exclude the padding with & regard.padding(...)."
            )
        vars(self).update(shape=axes, tile=tiles, size=_for_axes("sliding_tiles", "size", size, len(axes)))
        _ = self.near  # checks the size

    @cached_property
    def near(self) -> neighborhood:
        """The mask of the tiles: which tile may attend to which."""
        return neighborhood(tuple(n // side for n, side in zip(self.shape, self.tile, strict=True)), self.size)

    @cached_property
    def order(self) -> Tensor:
        """The place in the grid, row by row, of each token of the sequence: `x[:, :, order]` is in tile order."""
        sides = [size for pair in zip(self.near.shape, self.tile, strict=True) for size in pair]
        places = torch.arange(math.prod(self.shape), device="cpu").view(sides)
        num_axes = len(self.shape)
        tile_axes, axes_in_tile = range(0, 2 * num_axes, 2), range(1, 2 * num_axes, 2)
        return places.permute(*tile_axes, *axes_in_tile).flatten()

    def allowed(self, grid: Grid) -> Tensor:
        _check_on_grid(f"sliding_tiles of {self.shape}", grid, self.shape)
        return self.near.of_pairs(grid.query // self.area, grid.key // self.area)

    def any_allowed(self, start: int, stop: int) -> Spans:
        return self._tokens(self.near.any_allowed(start // self.area, -(-stop // self.area)))

    def all_allowed(self, start: int, stop: int) -> Spans:
        return self._tokens(self.near.all_allowed(start // self.area, -(-stop // self.area)))

    def edges(self, start: int, stop: int) -> Sequence[int]:
        return range((start // self.area + 1) * self.area, stop, self.area)

    def check(self, sizes: Sizes, positions: Positions) -> None:
        length = math.prod(self.shape)
        check_covers(f"sliding_tiles of {self.shape}", "queries", positions.queries(sizes.I), length)
        check_covers(f"sliding_tiles of {self.shape}", "keys", positions.keys, length)

    def _tokens(self, tiles: Spans) -> Spans:
        """The positions of the tokens of some tiles."""
        return Spans(tuple((first * self.area, last * self.area) for first, last in tiles))

    @cached_property
    def area(self) -> int:
        """The number of tokens of a tile."""
        return math.prod(self.tile)


def _check_on_grid(mask: str, grid: Grid, shape: tuple[int, ...]) -> None:
    """Refuse positions of a tile outside of a grid of this shape, which would be other points modulo its axes.

    On another device the host would wait for the numbers; there `check` has refused them before a call.
    """
    for axis, positions in (("queries", grid.query), ("keys", grid.key)):
        if positions.device.type == "cpu":
            check_inside(mask, axis, positions, math.prod(shape))


def _for_axes(mask: str, name: str, given: object, count: int) -> tuple[int, ...]:
    """One integer of at least 1 for each of `count` axes. Errors name the `mask` and the `name` of its argument."""
    is_list = getattr(given, "ndim", isinstance(given, Sequence))  # of an array or a tensor its number of axes
    listed = given if is_list else [given] * count
    numbers = integers(mask, name, listed)  # type: ignore[arg-type]
    if len(numbers) != count or min(numbers) < 1:
        raise RegardError(
            f"{mask}({name}={given!r}): give one integer of at least 1 for all {count} axes, or {count} of them."
        )
    return numbers


def _flags(given: object, count: int) -> tuple[bool, ...]:
    listed = [given] * count if isinstance(given, bool) else given
    if not isinstance(listed, Sequence) or len(listed) != count or not all(isinstance(x, bool) for x in listed):
        raise RegardError(
            f"neighborhood(is_causal={given!r}): give True or False for all {count} axes, or {count} of them."
        )
    return tuple(listed)


def _windows(length: int, size: int, dilation: int, stride: int, is_causal: bool) -> Tensor:
    """First and last key of each query of one axis, (length, 2).

    Places that are `dilation` apart form a line: place `line` + `dilation` * `on_line`. Windows are computed on each
    line, without gaps. The leader of a query is the one in the middle of its `stride` queries, whose window they share;
    on a causal axis it is their last.
    """
    place = torch.arange(length, device="cpu")
    line, on_line = place % dilation, place // dilation
    last_of_line = (length - 1 - line) // dilation
    leader = on_line // stride * stride + (stride - 1 if is_causal else stride // 2)
    leader = torch.minimum(leader, last_of_line)
    if is_causal:
        first, last = (leader - size + 1).clamp(min=0), on_line
    else:
        first = torch.minimum((leader - size // 2).clamp(min=0), last_of_line - size + 1)
        last = first + size - 1
    return torch.stack((first * dilation + line, last * dilation + line), 1)


def _boxes(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[list[tuple[int, int]]]:
    """Boxes that the positions [start, stop) of a grid consist of: the ends of each axis, both included.

    There is at least one position, and all are in the grid.
    A slab has one place on the first axis. There is part of a first slab, whole slabs, and part of a last slab.
    """
    if len(shape) == 1:
        yield [(start, stop - 1)]
        return
    below = math.prod(shape[1:])
    first, last = -(-start // below), stop // below  # whole slabs
    if first > last:  # inside one slab
        yield from ([(last, last), *box] for box in _boxes(start - last * below, stop - last * below, shape[1:]))
        return
    if start < first * below:
        head = _boxes(start - (first - 1) * below, below, shape[1:])
        yield from ([(first - 1, first - 1), *box] for box in head)
    if first < last:
        yield [(first, last - 1), *((0, length - 1) for length in shape[1:])]
    if last * below < stop:
        yield from ([(last, last), *box] for box in _boxes(0, stop - last * below, shape[1:]))
