"""`indices`: an integer, slice, list, tensor or boolean selection of one axis as a vector of indices."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index as index_of
from typing import Any

import torch
from torch import Tensor

from regard.errors import RegardError

Index = int | slice | Sequence[int] | Tensor | None


class OutOfRange(RegardError, IndexError):
    """An index outside the map."""


def indices(owner: str, axis: str, index: Index, size: int) -> Tensor:
    """Any index of one axis as a vector of non-negative indices on the host.

    >>> indices("weights[...]", "key", slice(-2, None), 5)
    tensor([3, 4])
    """
    if index is None:
        return torch.arange(size, device="cpu")
    if isinstance(index, slice):
        places = _range(owner, axis, index, size)
        return torch.arange(places.start, places.start + len(places) * places.step, places.step, device="cpu")
    try:
        places = torch.as_tensor(index, device="cpu")
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
    try:
        return range(size)[index]
    except (TypeError, ValueError) as error:
        raise RegardError(f"{owner}: the {axis} index {index} must be a slice of integers: {error}.") from None


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
