"""Indices of a map: `indices` of one axis as a vector, and `Selection`, an index expression of a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index as index_of
from typing import Any, Protocol

import torch
from torch import Tensor

from regard.base.errors import RegardError
from regard.base.shapes import as_tensor, to_device

#: Names of the axes of a map.
AXES = ("batch", "head", "query", "key")

Index = int | slice | Sequence[int] | Tensor | None


class Readable(Protocol):
    """What this file needs of a map."""

    def tile(self, batch: Any, head: Any, rows: Any, cols: Any, /) -> Tensor: ...


class OutOfRange(RegardError, IndexError):
    """An index outside the map."""


def indices(owner: str, axis: str, index: Index, size: int) -> Tensor:
    """Any index of one axis of this size as a vector of non-negative indices on the host.

    `owner` begins an error, such as "weights[...]", and `axis` is one of `AXES`.

    >>> indices("weights[...]", "key", slice(-2, None), 5)
    tensor([3, 4])
    """
    if index is None:
        return torch.arange(size, device="cpu")
    if isinstance(index, slice):
        places = _range(owner, axis, index, size)
        return torch.arange(places.start, places.start + len(places) * places.step, places.step, device="cpu")
    try:
        places = as_tensor(index, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise RegardError(f"{owner}: the {axis} index must be integers or a slice, got {index!r}.") from None
    places = places.long() if not places.numel() else places
    if places.dtype == torch.bool and places.shape == (size,):
        return places.nonzero().flatten()
    if places.is_floating_point() or places.is_complex() or places.dtype == torch.bool or places.ndim > 1:
        raise RegardError(f"{owner}: the {axis} index must be integers, a slice or {size} booleans, got {index!r}.")
    places = places.reshape(-1)
    wrong = places[(places < -size) | (places >= size)]
    if len(wrong):
        raise OutOfRange(f"{owner}: {axis} {int(wrong[0])} is out of range; the size of this axis is {size}.")
    return places % size if size else places


def _range(owner: str, axis: str, index: slice, size: int) -> range:
    """The indices of a slice of an axis of this size."""
    try:
        return range(size)[index]
    except (TypeError, ValueError) as error:
        raise RegardError(f"{owner}: the {axis} index {index} must be a slice of integers: {error}.") from None


@dataclass(frozen=True, eq=False)
class Selection:
    """What an index expression such as [0, :, rows, None] reads of a map.

    `axes` has the indices of each axis of the map, and `spread` those of the axes with a tensor, which are broadcast:
    a place of these tensors names one weight. `parts` has an entry for each axis of the map, and for each new axis of
    the result: a slice that keeps the axis, 0 for an integer or a tensor, None for a new axis.

    A block of the selected weights has one axis for each axis of the map; the places of the tensors are flattened on
    the first of their axes, and the others have the size 1. `of_block` is the index expression that makes the result
    from the block.
    """

    axes: list[Tensor]
    spread: dict[int, Tensor]
    parts: list[Any]

    @staticmethod
    def of(index: Any, shape: Sequence[int]) -> Selection:
        """The selection of torch's `tensor[index]`; slices may also have negative steps.

        >>> Selection.of((0, ..., [3, 1]), (2, 4, 5, 6)).size  # 4 heads, 5 queries, 2 keys
        40
        """
        axes: list[Tensor] = []
        parts: list[Any] = []
        tensors: dict[int, Tensor] = {}
        for part in _whole_index(index, shape):
            places = [] if part is None else _places(part, len(axes), shape)
            parts += [None] if part is None else [slice(None) if isinstance(part, slice) else 0] * len(places)
            if not isinstance(part, slice):  # the indices of an integer have no axes
                tensors |= {len(axes) + n: each for n, each in enumerate(places) if each.ndim}
            axes += [each.reshape(-1) for each in places]
        return Selection(axes, dict(zip(tensors, _broadcast(list(tensors.values())), strict=True)), parts)

    @property
    def size(self) -> int:
        """The number of selected weights."""
        num_places = [places.numel() for places in self.spread.values()][:1]
        return math.prod([*num_places, *(len(own) for axis, own in enumerate(self.axes) if axis not in self.spread)])

    @property
    def of_block(self) -> tuple[Any, ...]:
        """`parts`, with places in the block for each axis with a tensor: 0, 1, ... on the first, 0 on the others."""
        result, axis = list(self.parts), 0
        for n, part in enumerate(self.parts):
            if part is None:
                continue
            if axis in self.spread:
                places = torch.arange(self.spread[axis].numel(), device="cpu").reshape(self.spread[axis].shape)
                result[n] = places if axis == min(self.spread) else torch.zeros_like(places)
            axis += 1
        return tuple(result)

    def block(self, weights: Readable, workspace: int) -> Tensor:
        """The selected weights of a map, of which at most `workspace` numbers are read at a time."""
        if len(self.spread) < 2:
            return weights.tile(*(self.spread.get(axis, own).reshape(-1) for axis, own in enumerate(self.axes)))
        pairs = torch.stack([places.reshape(-1) for places in self.spread.values()])
        return self._of_pairs(weights, pairs, workspace)

    def _of_pairs(self, weights: Readable, pairs: Tensor, workspace: int) -> Tensor:
        """The block of some places, `pairs` (axes with a tensor, places).

        A tile has every different index of one axis with every one of the others. If that is too much for the
        workspace, each half of the places is read by itself.
        """
        axes, in_tile = list(self.axes), [slice(None)] * len(self.axes)
        for axis, places in zip(self.spread, pairs, strict=True):
            axes[axis], in_tile[axis] = places.unique(return_inverse=True)
        first, count = min(self.spread), pairs.shape[1]
        if math.prod(map(len, axes)) > workspace and count > 1:
            halves = pairs.tensor_split(2, 1)
            return torch.cat([self._of_pairs(weights, half, workspace) for half in halves], first)
        tile = weights.tile(*axes)
        block = tile[tuple(place if isinstance(place, slice) else to_device(place, tile.device) for place in in_tile)]
        if max(self.spread) - first >= len(self.spread):  # torch puts the places of axes that are apart first
            block = block.movedim(0, first)
        # axes of size 1 in place of all but the first axis with a tensor
        return block[tuple(None if axis in list(self.spread)[1:] else slice(None) for axis in range(len(axes)))]


def _whole_index(index: Any, shape: Sequence[int]) -> list[Any]:
    """The parts of an index expression, with a slice for each axis that it leaves out; `shape` is that of the map."""
    parts = [_as_tensor(part) for part in (index if isinstance(index, tuple) else (index,))]
    dots = [n for n, part in enumerate(parts) if part is ...]
    num_axes = sum(_num_axes(part) for part in parts if part is not ...)
    if num_axes > len(shape) or len(dots) > 1:
        raise OutOfRange(f"weights[...]: the map has {len(shape)} axes {tuple(shape)}, got {len(parts)} indices.")
    at = dots[0] if dots else len(parts)
    return [*parts[:at], *[slice(None)] * (len(shape) - num_axes), *parts[at + 1 :]]


def _as_tensor(part: Any) -> Any:
    """Lists and arrays of numbers as tensors on the host; other parts as they are."""
    if isinstance(part, str | bytes) or not (isinstance(part, Sequence) or hasattr(part, "__array__")):
        return part
    try:
        return as_tensor(part, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        return part


def _num_axes(part: Any) -> int:
    """The number of axes that a part of an index selects of: booleans select of all that they have."""
    is_boolean = isinstance(part, Tensor) and part.dtype == torch.bool
    return 0 if part is None else max(1, part.ndim) if is_boolean else 1


def _places(part: Any, first: int, shape: Sequence[int]) -> list[Tensor]:
    """The indices that a part selects, one tensor for each axis from `first` on; without axes for an integer."""
    axis, size = AXES[first], shape[first]
    part = axis_index(axis, part)
    if isinstance(part, slice):
        return [indices("weights[...]", axis, part, size)]
    if isinstance(part, int) and not isinstance(part, bool):
        return [indices("weights[...]", axis, part, size)[0]]
    if not isinstance(part, Tensor):
        return [indices("weights[...]", axis, part, size)]
    if part.dtype == torch.uint8:
        raise RegardError(
            f"weights[...]: the {axis} index has the dtype uint8, which torch reads as booleans. Convert it with "
            ".long() or .bool()."
        )
    if part.dtype == torch.bool and part.ndim > 1:
        expected = tuple(shape[first : first + part.ndim])
        if part.shape != expected:
            raise OutOfRange(f"weights[...]: booleans of shape {tuple(part.shape)} select of axes of sizes {expected}.")
        return list(part.nonzero(as_tuple=True))
    places = indices("weights[...]", axis, part.reshape(-1) if part.dtype != torch.bool else part, size)
    return [places if part.dtype == torch.bool else places.reshape(part.shape)]


def _broadcast(tensors: list[Tensor]) -> Sequence[Tensor]:
    """The indices of several axes, broadcast to one shape."""
    try:
        return torch.broadcast_tensors(*tensors) if tensors else ()
    except RuntimeError:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise OutOfRange(
            f"weights[...]: indices of shapes {shapes} do not broadcast: number n of each names one weight. For every "
            "query with every key: weights.tile(rows=queries, cols=keys)."
        ) from None


def axis_index(axis: str, part: Any) -> Any:
    """The index of one axis; integers of NumPy and tensors without axes become Python integers."""
    if isinstance(part, bool) or (isinstance(part, Tensor) and (part.ndim or part.is_floating_point())):
        return part
    try:
        return index_of(part)
    except TypeError:
        pass
    is_list = isinstance(part, slice | Sequence | Tensor) and not isinstance(part, str | bytes)
    if is_list or hasattr(part, "__array__"):
        return part
    raise RegardError(
        f"weights[...]: the {axis} index must be an integer, a slice, a list of integers or a tensor, got {part!r}. "
        "The axes are batch, head, query and key, as in weights[0, 3, 10:20]."
    )
