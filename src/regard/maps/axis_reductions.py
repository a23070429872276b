"""Sums, extremes and products of a map over any of its axes, by reductions and tiles, without the dense weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol

import torch
from torch import Tensor

from regard.base.errors import RegardError
from regard.base.shapes import Sizes, at_least_float32, grouped_values, without_autocast
from regard.maps.compiled_reductions import Parts, computes
from regard.maps.indices import AXES, OutOfRange
from regard.maps.reductions import Reduction, Shape, State, Tile, TopLinks

QUERY, KEY = 2, 3


class Reducible(Protocol):
    """What this file needs of a map.

    `_parts` yields the queries (axis 2) or keys (axis 3) as indices, in parts whose weights fit in the workspace: one
    empty part if there are none. `_within_budget` refuses a result of too many bytes.
    """

    is_signed: Any

    @property
    def shape(self) -> Shape: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def summarize(self, *reductions: Any) -> tuple[Any, ...]: ...
    def tile(self, batch: Any = None, head: Any = None, rows: Any = None, cols: Any = None) -> Tensor: ...
    def dense(self) -> Tensor: ...
    def _parts(self, axis: int) -> Iterable[Tensor]: ...
    def _within_budget(self, size: int) -> None: ...


@dataclass(frozen=True)
class Sum(Reduction[Tensor]):
    """The sum of weights over the queries (axis 2), (B, H, J), or over the keys (axis 3), (B, H, I)."""

    axis: int
    dtype: torch.dtype

    def init(self, shape: Shape, device: torch.device) -> State:
        return [torch.zeros(_without(shape, self.axis), dtype=self.dtype, device=device)]

    def add(self, state: State, tile: Tile) -> None:
        state[0][:, :, _kept(tile, self.axis)] += tile.weights.sum(self.axis)


def _compiled_sum(reduction: Sum, state: State, sizes: Sizes) -> Parts | None:
    """The sums as parts of a compiled pass: the weight that keys receive, or sums of weights times keys that are 1.

    None for sums that are not in float32, which kernels do not compute.
    """
    if reduction.dtype != torch.float32:
        return None
    if reduction.axis == QUERY:
        return {"received": state[0]}
    return {"numbers": [(state[0].new_ones(sizes.B, 1, sizes.J), state[0])]}


computes(Sum, _compiled_sum)


@dataclass(frozen=True)
class Extreme(Reduction[Tensor]):
    """The largest or smallest weight over the queries (axis 2), (B, H, J), or over the keys (axis 3), (B, H, I).

    Pairs that the mask hides weigh 0, in a tile or in none. So the state has the extreme of the weights other than 0,
    and their number.
    """

    axis: int
    is_largest: bool
    dtype: torch.dtype

    def init(self, shape: Shape, device: torch.device) -> State:
        kept, size = _without(shape, self.axis), torch.tensor(shape[self.axis], device=device)
        best = torch.full(kept, self._worst, dtype=self.dtype, device=device)
        return [best, torch.zeros(kept, dtype=torch.int64, device=device), size]

    @property
    def _worst(self) -> float:
        """A number that every weight is better than."""
        return -torch.inf if self.is_largest else torch.inf

    def add(self, state: State, tile: Tile) -> None:
        """The extreme of the weights other than 0 of the tile, and their number."""
        kept, is_zero = _kept(tile, self.axis), tile.weights == 0
        weights = tile.weights.masked_fill(is_zero, self._worst)
        best = weights.amax(self.axis) if self.is_largest else weights.amin(self.axis)
        state[0][:, :, kept] = self._better(state[0][:, :, kept], best)
        state[1][:, :, kept] += is_zero.logical_not().sum(self.axis)

    def _better(self, old: Tensor, new: Tensor) -> Tensor:
        """The better of two numbers at each place; NaN where one of them is NaN."""
        is_better = (new > old if self.is_largest else new < old) | new.isnan()
        return torch.where(is_better, new, old)

    def merge(self, state: State, other: State) -> State:
        return [self._better(state[0], other[0]), state[1] + other[1], state[2]]

    def finish(self, state: State) -> Tensor:
        """The extreme, among which is 0 where fewer weights were counted than the axis has."""
        best, counts, size = state
        return torch.where(counts < size, self._better(best, torch.zeros_like(best)), best)


@dataclass(frozen=True, eq=False)
class Product(Reduction[Tensor]):
    """sum_j w_ij m_j over keys (axis 3), (B, H, I, E), or sum_i w_ij m_i over queries (axis 2), (B, H, J, E).

    `matrix` is (B, G, J, E) or (B, G, I, E); groups of H / G heads share the numbers of one.
    """

    axis: int
    matrix: Tensor

    def init(self, shape: Shape, device: torch.device) -> State:
        return [self.matrix.new_zeros(*_without(shape, self.axis), self.matrix.shape[-1])]

    def add(self, state: State, tile: Tile) -> None:
        weights = tile.weights.to(self.matrix.dtype)
        weights, places = (weights, tile.cols) if self.axis == KEY else (weights.mT, tile.rows)
        state[0][:, :, _kept(tile, self.axis)] += grouped_values(weights, self.matrix[:, :, places])


def _without(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    """The shape without this axis."""
    return (*shape[:axis], *shape[axis + 1 :])


def _kept(tile: Tile, axis: int) -> slice:
    """The queries of the tile, or its keys: those of the axis that a reduction over the other one keeps."""
    return tile.rows if axis == KEY else tile.cols


#: A reduction of a tensor over axes, which keeps them with the size 1.
AxisOperation = Callable[[Tensor, tuple[int, ...]], Tensor]


def summed(weights: Reducible, axes: tuple[int, ...]) -> Tensor:
    """The sum of weights over these axes, which keep the size 1."""
    return _reduced(weights, axes, lambda axis: Sum(axis, weights.dtype), lambda x, over: x.sum(over, keepdim=True))


def extreme(weights: Reducible, axes: tuple[int, ...], is_largest: bool) -> Tensor:
    """The largest or smallest weight over these axes, which keep the size 1."""
    operation = torch.amax if is_largest else torch.amin
    return _reduced(
        weights,
        axes,
        lambda axis: Extreme(axis, is_largest, weights.dtype),
        lambda x, over: operation(x, over, keepdim=True),
    )


def _reduced(
    weights: Reducible, axes: tuple[int, ...], along: Callable[[int], Reduction[Tensor]], operation: AxisOperation
) -> Tensor:
    """A reduction over these axes, which keep the size 1.

    With the keys or the queries among them, `along(axis)` is a reduction over the last of the axes. It leaves O(n)
    numbers, which `operation` reduces over the others. Over batch and heads alone, `operation` reduces tiles.
    """
    axis = max(axes)
    if axis >= QUERY:
        return operation(weights.summarize(along(axis))[0].unsqueeze(axis), axes)  # `axis` has the size 1 already
    return _by_parts(weights, axes, QUERY, lambda tile: [operation(tile, axes)])[0]


def extreme_places(weights: Reducible, axis: int, is_largest: bool) -> list[Tensor]:
    """The largest or smallest weights over an axis and their places; the axis keeps the size 1."""
    if axis == KEY and is_largest and not weights.is_signed and weights.dtype == torch.float32:
        links = weights.summarize(TopLinks())[0]
        return [links.weights, links.keys.clamp_min(0)]
    operation = torch.max if is_largest else torch.min
    return _by_parts(weights, (axis,), KEY if axis == QUERY else QUERY, lambda x: operation(x, axis, keepdim=True))


def _by_parts(
    weights: Reducible, axes: tuple[int, ...], along: int, operation: Callable[[Tensor], Sequence[Tensor]]
) -> list[Tensor]:
    """The results of `operation`, which reduces tiles over these axes and keeps them with the size 1.

    It gets all weights of a part of the queries (`along` is QUERY) or of the keys (KEY) at a time. `along` is none of
    the axes, so that the results of the parts are joined on it.
    """
    kept = [1 if axis in axes else size for axis, size in enumerate(weights.shape)]
    weights._within_budget(torch.Size(kept).numel() * weights.dtype.itemsize)
    name = "rows" if along == QUERY else "cols"
    results = [operation(weights.tile(**{name: part})) for part in weights._parts(along)]
    return [torch.cat(tensors, along) for tensors in zip(*results, strict=True)]


def product(weights: Reducible, matrix: Tensor) -> Tensor:
    """weights @ matrix, by tiles: (B, H, I, E) of values (B, G, J, E), whose groups of H / G heads share those of one.

    Other shapes are those of torch's matmul.
    """
    B, H, I, J = weights.shape
    if matrix.ndim == 1:
        return product(weights, matrix[:, None]).squeeze(-1)
    if matrix.ndim == 0 or matrix.shape[-2] != J or matrix.is_complex():
        raise RegardError(
            f"weights @ values: the map has shape {(B, H, I, J)}, the values {tuple(matrix.shape)}. Values are real "
            f"numbers for each of the {J} keys: (B, G, J, E), where G divides the number of heads, or (J, E)."
        )
    values = at_least_float32(matrix).to(torch.promote_types(weights.dtype, at_least_float32(matrix).dtype))
    values = values.reshape([1] * (4 - values.ndim) + list(values.shape))
    if values.ndim > 4 or values.shape[0] not in (1, B) or H % max(1, values.shape[1]):
        with without_autocast(values.device):
            return weights.dense().to(values.dtype) @ values  # the batch or the heads of the values are more
    values = values.expand(B, -1, -1, -1)
    output = weights.summarize(Product(KEY, values.detach()))[0]
    return _WithValues.apply(weights, values, output) if values.requires_grad else output  # type: ignore[return-value]


class _WithValues(torch.autograd.Function):
    """The output of a product, with gradients with respect to the values, by a second pass over the tiles.

    `output` may be in the graph of the weights, whose gradient it passes on.
    """

    @staticmethod
    def forward(ctx: Any, weights: Reducible, values: Tensor, output: Tensor) -> Tensor:
        ctx.weights, ctx.num_groups = weights, values.shape[1]
        return output.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        of_heads = ctx.weights.summarize(Product(QUERY, grad))[0]
        return None, of_heads.unflatten(1, (ctx.num_groups, -1)).sum(2), grad


def axes_of(name: str, dim: Any) -> tuple[int, ...]:
    """The axes 0 to 3 that `dim` names; all if it names none, as in torch. `name` is the method, for the error."""
    given: Any = dim if isinstance(dim, tuple | list) else () if dim is None else (dim,)
    for axis in given:
        if isinstance(axis, bool) or not isinstance(axis, Integral) or axis not in range(-4, 4):
            known = ", ".join(f"{number} {axis_name}" for number, axis_name in enumerate(AXES))
            raise OutOfRange(f"weights.{name}: dim={axis!r} is none of the axes {known}, or -4 to -1 from the last.")
    axes = tuple(int(axis) % 4 for axis in given)
    if len(set(axes)) < len(axes):
        raise RegardError(f"weights.{name}: dim={dim!r} names an axis twice. Name each axis once.")
    return axes or (0, 1, 2, 3)


def check_not_empty(name: str, shape: Sequence[int], axes: Iterable[int]) -> None:
    """Refuse an extreme of no weights: one of these axes has the size 0. `name` is the method, for the error."""
    for axis in axes:
        if not shape[axis]:
            raise OutOfRange(
                f"weights.{name}: the {AXES[axis]} axis of this map {tuple(shape)} has the size 0, and no "
                "weights have no extreme. Check the shape first."
            )
