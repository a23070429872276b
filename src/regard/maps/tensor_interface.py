"""`TensorInterface`: what a tensor of weights can do, for a map that holds none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from regard.base.errors import RegardError
from regard.base.other_libraries import OF_MAPS, missing
from regard.base.shapes import as_tensor
from regard.maps.axis_reductions import axes_of, check_not_empty, extreme, extreme_places, product, summed
from regard.maps.indices import Index


def _of_dense(name: str) -> Callable[..., Tensor]:
    """An operator of tensors, for the dense weights within their budget."""

    def operator(self: Any, *others: Any) -> Tensor:
        others = tuple(other.dense() if isinstance(other, TensorInterface) else other for other in others)
        return getattr(self.dense(), name)(*others)

    return operator


class TensorInterface:
    """Reductions, operators and functions of torch for a map of weights (B, H, I, J).

    Sums, means, extremes and products with values go over tiles, in O(n) memory; they equal those of `dense()`, and
    are in the autograd graph where the map is. Every other operator, method and function of torch and NumPy computes
    the dense weights first, within the budget of `dense`.

    >>> import torch, regard as rg
    >>> q, k, v = torch.randn(3, 1, 2, 5, 4)
    >>> seen = rg.Attention(mask=rg.causal())(q, k, v)
    >>> weights = seen.weights
    >>> weights.mean(1).shape, weights.sum(-1).shape, weights.max(-1).indices.shape
    (torch.Size([1, 5, 5]), torch.Size([1, 2, 5]), torch.Size([1, 2, 5]))
    >>> torch.allclose(weights @ v, seen.output, atol=1e-6), int((weights > 0).sum())
    (True, 30)
    """

    if TYPE_CHECKING:

        @property
        def shape(self) -> tuple[int, int, int, int]: ...
        @property
        def _dtype(self) -> torch.dtype: ...
        @property
        def is_signed(self) -> Any: ...
        def summarize(self, *reductions: Any) -> tuple[Any, ...]: ...
        def tile(self, batch: Index = None, head: Index = None, rows: Index = None, cols: Index = None) -> Tensor: ...
        def dense(self) -> Tensor: ...
        def _parts(self, axis: int) -> Iterable[Tensor]: ...
        def _within_budget(self, size: int) -> None: ...

    # Facts

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights: float32 or float64."""
        return self._dtype

    @property
    def ndim(self) -> int:
        """4: batch, head, query, key."""
        return 4

    def dim(self) -> int:
        """4: batch, head, query, key."""
        return 4

    def size(self, dim: int | None = None) -> Any:
        """The shape, or the size of one axis."""
        return torch.Size(self.shape) if dim is None else tuple(self.shape)[axes_of("size", dim)[0]]

    def numel(self) -> int:
        """The number of weights."""
        return prod(self.shape)

    # Reductions

    def sum(self, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
        """The sum over one axis, several or all, as `torch.sum`."""
        axes = axes_of("sum", dim)
        return _shown(summed(self, axes), axes, keepdim).to(dtype or self.dtype)

    def mean(self, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
        """The mean over one axis, several or all, as `torch.mean`: `weights.mean(1)` is the mean over heads."""
        axes = axes_of("mean", dim)
        total = summed(self, axes).to(dtype or self.dtype)
        return _shown(total / prod(self.size(axis) for axis in axes), axes, keepdim)

    def amax(self, dim: Any = None, keepdim: bool = False) -> Tensor:
        """The largest weight over one axis, several or all, as `torch.amax`."""
        return self._extreme("amax", dim, keepdim, True)

    def amin(self, dim: Any = None, keepdim: bool = False) -> Tensor:
        """The smallest weight over one axis, several or all, as `torch.amin`."""
        return self._extreme("amin", dim, keepdim, False)

    def max(self, dim: Any = None, keepdim: bool = False) -> Any:
        """The largest weight, or over one axis its (values, indices), as `torch.max`."""
        return self._extreme_at("max", dim, keepdim, True)

    def min(self, dim: Any = None, keepdim: bool = False) -> Any:
        """The smallest weight, or over one axis its (values, indices), as `torch.min`."""
        return self._extreme_at("min", dim, keepdim, False)

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """The place of the largest weight over one axis, or among all weights, as `torch.argmax`."""
        return self._place("argmax", dim, keepdim, True)

    def argmin(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """The place of the smallest weight over one axis, or among all weights, as `torch.argmin`."""
        return self._place("argmin", dim, keepdim, False)

    def _extreme(self, name: str, dim: Any, keepdim: bool, is_largest: bool) -> Tensor:
        """The largest or smallest weight over one axis, several or all (`dim` None). Errors name the method `name`."""
        axes = axes_of(name, dim)
        check_not_empty(name, self.shape, axes)
        return _shown(extreme(self, axes, is_largest), axes, keepdim)

    def _extreme_at(self, name: str, dim: Any, keepdim: bool, is_largest: bool) -> Any:
        """What torch.max or torch.min returns for this `dim`: (values, indices), one number, or a tensor.

        `name` is the method, here and below: "max" or "min" (`is_largest` says which), "argmax" or "argmin".
        """
        if isinstance(dim, Tensor | TensorInterface):  # the larger of two tensors, number by number
            return getattr(torch, name)(self.dense(), dim)
        if dim is None:
            return self._extreme(name, None, False, is_largest)
        kind = torch.return_types.max if is_largest else torch.return_types.min  # type: ignore[attr-defined]
        return kind(tuple(self._with_places(name, dim, keepdim, is_largest)))  # type: ignore[arg-type]

    def _place(self, name: str, dim: int | None, keepdim: bool, is_largest: bool) -> Tensor:
        """The index of the extreme weight on axis `dim`; without `dim` its place among all weights in a row."""
        if dim is not None:
            return self._with_places(name, dim, keepdim, is_largest)[1]
        check_not_empty(name, self.shape, range(4))
        values, keys = self._with_places(name, -1, False, is_largest)
        row = values.argmax() if is_largest else values.argmin()
        place = row * self.size(3) + keys.flatten()[row]
        return place.reshape(1, 1, 1, 1) if keepdim else place

    def _with_places(self, name: str, dim: int, keepdim: bool, is_largest: bool) -> list[Tensor]:
        """The extreme weights over one axis, and their indices on it."""
        axis, *others = axes_of(name, dim)
        if others or isinstance(dim, list | tuple):
            raise RegardError(f"weights.{name}: dim={dim!r} must be one axis; amax and amin take several.")
        check_not_empty(name, self.shape, [axis])
        return [_shown(x, (axis,), keepdim) for x in extreme_places(self, axis, is_largest)]

    # Products and dense weights

    def __matmul__(self, values: Any) -> Tensor:
        """The output W @ values, (B, H, I, E), by tiles; values (B, G, J, E) of shared heads are repeated."""
        if isinstance(values, TensorInterface):
            values = values.dense()
        return product(self, values) if isinstance(values, Tensor) else NotImplemented

    def matmul(self, values: Tensor) -> Tensor:
        """The output W @ values."""
        return self @ values

    @property
    def mT(self) -> Tensor:
        """The dense weights with the axes of queries and keys exchanged, within the budget of `dense`."""
        return self.dense().mT

    __rmatmul__ = _of_dense("__rmatmul__")
    __add__, __radd__ = _of_dense("__add__"), _of_dense("__radd__")
    __sub__, __rsub__ = _of_dense("__sub__"), _of_dense("__rsub__")
    __mul__, __rmul__ = _of_dense("__mul__"), _of_dense("__rmul__")
    __truediv__, __rtruediv__ = _of_dense("__truediv__"), _of_dense("__rtruediv__")
    __pow__, __rpow__ = _of_dense("__pow__"), _of_dense("__rpow__")
    __lt__, __le__, __gt__, __ge__ = map(_of_dense, ("__lt__", "__le__", "__gt__", "__ge__"))
    __neg__, __abs__ = _of_dense("__neg__"), _of_dense("__abs__")
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> Any:
        """Number by number with a tensor, an array or a number; a map equals itself only."""
        if isinstance(other, np.ndarray) and other.dtype.kind in "biufc":
            other = as_tensor(other)
        if isinstance(other, Tensor | int | float | np.ndarray):
            return self.dense() == other
        return self is other

    def __ne__(self, other: object) -> Any:
        equal = self == other
        return ~equal if isinstance(equal, Tensor) else not equal

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A method of tensors that this class has not, of the dense weights; not those that change a tensor."""
            method = getattr(Tensor, name, None) if not name.startswith("_") and not name.endswith("_") else None
            if not callable(method):
                in_place = {name: f"weights.dense().{name}(...)"} if callable(getattr(Tensor, name, None)) else {}
                raise missing(type(self).__name__, name, lambda: dir(type(self)), OF_MAPS | in_place, "weights.")

            @wraps(method)
            def of_dense(*args: Any, **options: Any) -> Any:
                return type(self).__torch_function__(method, (), (self, *args), options)

            return of_dense

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Functions of torch: those of this interface over tiles, others of the dense weights."""
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if args and isinstance(args[0], TensorInterface) and name in OVER_TILES and "out" not in kwargs:
            return getattr(args[0], name)(*args[1:], **kwargs)
        args, kwargs = tree_map_only(TensorInterface, lambda weights: weights.dense(), (args, kwargs))
        return function(*args, **kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Functions of NumPy, of the dense weights."""
        args, kwargs = tree_map_only(TensorInterface, np.asarray, (args, kwargs))
        return function(*args, **kwargs)


#: Functions of torch that go over tiles.
OVER_TILES = frozenset({"sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "matmul", "numel"})


def _shown(reduced: Tensor, axes: tuple[int, ...], keepdim: bool) -> Tensor:
    """A result whose reduced axes have the size 1, with these axes if `keepdim`, else without."""
    return reduced if keepdim else reduced.squeeze(axes)
