"""`Trace` follows the result of each softmax to its product with the values, and detects changes on the way."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.hf.calls import Untranslatable
from regard.hf.capture.weighted_sums import Traced, WeightedSum, tensors_in, times_values, weighted_sum

SOFTMAX = (F.softmax, torch.softmax, torch.Tensor.softmax, torch.special.softmax)
#: Functions that permute axes.
MOVES = {"transpose", "swapaxes", "swapdims", "permute", "mT", "T", "t"}
#: Functions that keep the weights and their axes.
KEEPS = {
    "bfloat16", "clone", "contiguous", "cpu", "cuda", "detach", "double", "float", "half", "requires_grad_", "to",
    "type", "type_as",
}  # fmt: skip
RESHAPES = {"flatten", "reshape", "reshape_as", "squeeze", "unflatten", "view", "view_as"}
DROPOUT = {"dropout", "dropout_", "feature_dropout"}  # a map shows weights before dropout, which in place overwrites


def softmax_axis(output: Any, dim: Any = None, *_: Any, **__: Any) -> int | None:
    """The axis of keys of a softmax, counted from the end; None if its other axes cannot be told apart.

    It is the last of three or more axes, or any axis if at most one of the others is longer than 1: such as (texts,
    keys), (keys, texts) or (texts, keys, 1).
    """
    if not isinstance(output, Tensor) or not isinstance(dim, int) or not -output.ndim <= dim < output.ndim:
        return None
    axis = dim if dim < 0 else dim - output.ndim
    others = [size for place, size in enumerate(output.shape, -output.ndim) if place != axis]
    few = output.ndim <= 3 and sum(size != 1 for size in others) <= 1
    return axis if few or (output.ndim > 2 and axis == -1) else None


@dataclass(eq=False)
class Trace:
    """The softmaxes of one run of a module. `follow` must be called for every torch function, in order."""

    softmaxes: list[Tensor] = field(default_factory=list)
    _traced: dict[int, Traced] = field(default_factory=dict)
    _sums: list[WeightedSum] = field(default_factory=list)

    def follow(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Follow one call: a softmax begins a trace, a product over keys ends it, others continue or change it."""
        axis = softmax_axis(output, *args[1:], **kwargs) if function in SOFTMAX else None
        if axis is not None:
            is_wide = output.ndim > 2 and axis == -1
            self._traced[id(output)] = Traced(output, len(self.softmaxes), axis, is_wide=is_wide)
            self.softmaxes.append(output)
            return
        inputs = [part for part in map(self._of, tensors_in((*args, *kwargs.values()))) if part is not None]
        if not inputs:
            return
        name = _name(function)
        # dropout in place writes, too, unless it drops nothing and returns its input
        if _writes(name, kwargs) and not (name in DROPOUT and output is args[0] and not _drops(args, kwargs)):
            self._written(kwargs.get("out", args[0] if args else None), name)
        outputs = [part for part in tensors_in((output,)) if part.is_floating_point()]
        for part in inputs:
            product = weighted_sum(name, part, args, kwargs)
            if product is not None:
                self._sums.append(product)
            else:
                self._follow_one(part, name, args, kwargs, outputs)

    @property
    def is_multiplied(self) -> bool:
        """Whether a product with traced weights was found."""
        return bool(self._sums)

    @property
    def is_narrow(self) -> bool:
        """Whether no softmax ran over the last of three or more axes. A router of experts is such a softmax, too."""
        return not any(self.of_softmax(number).is_wide for number in range(len(self.softmaxes)))

    def returned_by(self, output: Any) -> bool:
        """Whether a module's output has weights, or tensors computed from them."""
        return any(self._of(tensor) is not None for tensor in tensors_in((output,)))

    def weights(self, number: int) -> Tensor:
        """The result of one softmax, with its keys on the last axis."""
        return self.softmaxes[number].movedim(self.of_softmax(number).axis, -1)

    def weighted_sum(self, kind: str) -> WeightedSum:
        """The product of the weights and the values; `Untranslatable` if it is not certain which one this is."""
        sums = [product for product in self._sums if product.weights.is_wide] or self._sums
        changed = [product.weights.changed_by for product in sums if product.weights.changed_by]
        numbers = {product.weights.number for product in sums}
        if not changed and len(numbers) == 1:
            changed = [self.of_softmax(numbers.pop()).changed_by]  # a later write in place counts, too
            if not changed[0]:
                return sums[0]
        if changed:
            raise Untranslatable(
                f"{kind} changes its weights after the softmax ({', '.join(dict.fromkeys(changed))}), so it multiplies "
                "the values by other numbers than the softmax returned"
            )
        if numbers:
            raise Untranslatable(
                f"{kind} multiplies by {len(numbers)} softmaxes, and it is not known which of them are its weights"
            )
        raise Untranslatable(
            f"{kind} computes a softmax, but no product with it was found that sums over the same axis. If it returns "
            "its weights, watch the model that multiplies the values by them"
        )

    def of_softmax(self, number: int) -> Traced:
        """The result of one softmax, as traced."""
        return self._traced[id(self.softmaxes[number])]

    def _of(self, tensor: Tensor) -> Traced | None:
        return self._traced.get(id(tensor))

    def _follow_one(
        self, part: Traced, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]
    ) -> None:
        for output in outputs:
            known = self._of(output)
            if output is part.tensor or (known is not None and known.changed_by):
                continue
            values = times_values(name, part, args, output)
            if values is not None:
                self._traced[id(output)] = replace(part, tensor=output, values=values)
                continue
            axis = None if part.values is not None else _axis_after(part, name, args, kwargs, output)
            changed_by = part.changed_by or ("" if axis is not None else name)
            self._traced[id(output)] = replace(part, tensor=output, axis=axis or part.axis, changed_by=changed_by)

    def _written(self, target: Any, name: str) -> None:
        """Mark all tensors as changed that share memory with a tensor that was written in place."""
        if not isinstance(target, Tensor):
            return
        place = target.untyped_storage().data_ptr()
        for key, part in self._traced.items():
            if part.tensor.untyped_storage().data_ptr() == place:
                self._traced[key] = replace(part, changed_by=part.changed_by or name)


def _name(function: Any) -> str:
    """The name of a function, or of a tensor property."""
    name = getattr(function, "__name__", "")
    owner = getattr(function, "__self__", None)
    return getattr(owner, "__name__", name) if name == "__get__" else name


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    arithmetic = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__", "__init__")
    return in_place or arithmetic or name == "__setitem__" or bool(kwargs.get("inplace")) or "out" in kwargs


def _drops(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether dropout with these arguments may set a weight to 0."""
    p, training = (*args[1:3], *(None,) * 2)[:2]
    p, training = (
        kwargs.get("p", 0.5 if p is None else p),
        kwargs.get("training", True if training is None else training),
    )
    return bool(training) and p > 0


def _axis_after(part: Traced, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> int | None:
    """The axis of keys after a function, counted from the end; None if the function changes the weights."""
    before = part.tensor
    if name in KEEPS or name in DROPOUT:
        return part.axis if output.shape == before.shape else None
    if name in MOVES:
        return _moved(part, name, args, kwargs)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if name in ("squeeze", "unsqueeze") and isinstance(dim, int):
        return _axis_after_squeeze(part, dim, output)
    if name in RESHAPES or (name == "__getitem__" and _adds_axes(*args[1:])):
        return _axis_after_reshape(part, output)
    if name in ("expand", "expand_as", "repeat_interleave", "repeat"):
        return -1 if part.axis == -1 and output.shape[-1] == before.shape[-1] > 1 and output.ndim > 1 else None
    same_form = output.shape == before.shape and output.dtype == before.dtype and not output.is_meta
    return part.axis if same_form and torch.equal(output, before) else None


def _adds_axes(index: Any) -> bool:
    """Whether an index takes everything, and only adds axes of size 1."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or (isinstance(part, slice) and part == slice(None)) for part in parts)


def _axis_after_reshape(part: Traced, output: Tensor) -> int | None:
    """The axis of keys of a view whose last axis stays, or that differs only in axes of size 1."""
    before = part.tensor
    if part.axis == -1 and output.ndim > 1 and output.shape[-1] == before.shape[-1]:
        return -1 if output.numel() == before.numel() else None
    longer, after = ([place for place in range(-x.ndim, 0) if x.shape[place] != 1] for x in (before, output))
    if part.axis not in longer or [before.shape[n] for n in longer] != [output.shape[n] for n in after]:
        return None
    return after[longer.index(part.axis)]


def _axis_after_squeeze(part: Traced, dim: int, output: Tensor) -> int | None:
    """The axis of keys after an axis of size 1 was added or removed at `dim`."""
    place, change = part.axis + part.tensor.ndim, output.ndim - part.tensor.ndim
    if change < 0:
        dim %= part.tensor.ndim
        return None if dim == place else place - (dim < place) - output.ndim
    return place + change * (dim % output.ndim <= place) - output.ndim


def _moved(part: Traced, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    rest = (*args[1:], *kwargs.values())
    axes = list(range(part.tensor.ndim))
    if name == "permute":
        dims = rest[0] if len(rest) == 1 else rest
        axes = [dim % len(axes) for dim in dims]
    elif len(axes) > 1:
        first, second = (-2, -1) if name in ("mT", "T", "t") else rest[:2]
        axes[first], axes[second] = axes[second], axes[first]
    return axes.index(part.axis % len(axes)) - len(axes)
