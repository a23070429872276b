"""`Trace` follows the result of each softmax to its product with the values, and detects changes on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.hf.calls import Untranslatable

SOFTMAX = (F.softmax, torch.softmax, torch.Tensor.softmax, torch.special.softmax)
#: Products -> the index of their first factor among the arguments. Functions are known by name, since most exist three
#: times: in torch, in torch.nn.functional and as a method.
PRODUCTS = {"matmul": 0, "__matmul__": 0, "bmm": 0, "mm": 0, "linear": 0, "baddbmm": 1, "addbmm": 1, "addmm": 1}
#: Functions that permute axes.
MOVES = {"transpose", "swapaxes", "swapdims", "permute", "mT", "T"}
#: Functions that keep the weights and their axes.
KEEPS = {
    "bfloat16", "clone", "contiguous", "cpu", "cuda", "detach", "double", "float", "half", "requires_grad_", "to",
    "type", "type_as",
}  # fmt: skip
RESHAPES = {"flatten", "reshape", "reshape_as", "unflatten", "view", "view_as"}
DROPOUT = {"dropout", "dropout_", "feature_dropout"}  # a map shows weights before dropout; in place they are lost


def over_keys(output: Any, dim: Any = None, *_: Any, **__: Any) -> bool:
    """Whether the output of a softmax has at least three axes, and the softmax runs over the last one."""
    return isinstance(output, Tensor) and output.ndim > 2 and dim in (-1, output.ndim - 1)


@dataclass(frozen=True, eq=False)
class Traced:
    """A tensor computed from the weights of softmax `number`.

    `axis` is its axis of keys, counted from the end. `changed_by` is the function that changed the weights, or "".
    """

    tensor: Tensor
    number: int
    axis: int = -1
    changed_by: str = ""


@dataclass(eq=False)
class Trace:
    """The softmaxes of one run of a module. `follow` must be called for every torch function, in order."""

    softmaxes: list[Tensor] = field(default_factory=list)
    _traced: dict[int, Traced] = field(default_factory=dict)
    _multiplied: list[Traced] = field(default_factory=list)

    def follow(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Follow one call: a softmax begins a trace, a product over keys ends it, others continue or change it."""
        if function in SOFTMAX and over_keys(output, *args[1:], **kwargs):
            self._traced[id(output)] = Traced(output, len(self.softmaxes))
            self.softmaxes.append(output)
            return
        inputs = [part for part in map(self._of, _tensors((*args, *kwargs.values()))) if part is not None]
        if not inputs:
            return
        name = _name(function)
        if _writes(name, kwargs) and not (name in DROPOUT and output is args[0] and not _drops(args, kwargs)):
            self._written(kwargs.get("out", args[0] if args else None), name)
        outputs = [part for part in _tensors((output,)) if part.is_floating_point()]
        for part in inputs:
            if _sums_keys(name, part, args, kwargs):
                self._multiplied.append(part)
            else:
                self._follow_one(part, name, args, kwargs, outputs)

    def multiplied_softmax(self, kind: str) -> int:
        """The number of the softmax that multiplies the values; `Untranslatable` if this is not certain."""
        changed = [part.changed_by for part in self._multiplied if part.changed_by]
        numbers = {part.number for part in self._multiplied}
        if not changed and len(numbers) == 1:
            number = numbers.pop()
            changed = [self._traced[id(self.softmaxes[number])].changed_by]  # a later write in place counts, too
            if not changed[0]:
                return number
        if changed:
            raise Untranslatable(
                f"{kind} changes its weights after the softmax ({', '.join(dict.fromkeys(changed))}), so it multiplies "
                "the values by other numbers than the softmax returned"
            )
        if numbers:
            raise Untranslatable(
                f"{kind} multiplies by {len(numbers)} softmaxes, and it is not known which of them are its weights"
            )
        raise Untranslatable(f"{kind} computes a softmax over its last axis, but no product with it was found")

    def _of(self, tensor: Tensor) -> Traced | None:
        return self._traced.get(id(tensor))

    def _follow_one(
        self, part: Traced, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]
    ) -> None:
        for output in outputs:
            known = self._of(output)
            if output is part.tensor or (known is not None and known.changed_by):
                continue
            axis = _axis_after(part, name, args, kwargs, output)
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


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


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


def _sums_keys(name: str, part: Traced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function is a product that sums over the key axis of a traced tensor."""
    if name == "einsum":
        return _einsum_sums_keys(part, args)
    first = PRODUCTS.get(name)
    operands = (
        [kwargs.get("input"), kwargs.get("other", kwargs.get("mat2"))] if first is None or not args else args[first:]
    )
    if first is None or part.tensor.ndim < 2:
        return False
    left = operands[0] is part.tensor and part.axis == -1
    right = len(operands) > 1 and operands[1] is part.tensor and part.axis == -2 and name != "linear"
    return left or right


def _einsum_sums_keys(part: Traced, args: tuple[Any, ...]) -> bool:
    equation, *operands = args
    if not isinstance(equation, str):
        return False
    operands = list(_tensors(operands))
    inputs, _, result = equation.replace(" ", "").partition("->")
    subscripts = inputs.split(",")
    place = next(n for n, operand in enumerate(operands) if operand is part.tensor)
    letter = subscripts[place][part.axis :][:1]
    others = "".join(subscripts[:place] + subscripts[place + 1 :])
    return letter.isalpha() and letter in others and letter not in result


def _axis_after(part: Traced, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> int | None:
    """The axis of keys after a function, counted from the end; None if the function changes the weights."""
    before = part.tensor
    if name in KEEPS or name in DROPOUT:
        return part.axis if output.shape == before.shape else None
    if name in RESHAPES and part.axis == -1:
        return -1 if output.shape[-1:] == before.shape[-1:] and output.numel() == before.numel() else None
    if name in MOVES:
        return _moved(part, name, args, kwargs)
    if name in ("unsqueeze", "squeeze", "expand", "expand_as", "repeat_interleave", "repeat"):
        return -1 if part.axis == -1 and output.shape[-1] == before.shape[-1] > 1 and output.ndim > 1 else None
    same_form = output.shape == before.shape and output.dtype == before.dtype and not output.is_meta
    return part.axis if same_form and torch.equal(output, before) else None


def _moved(part: Traced, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    rest = (*args[1:], *kwargs.values())
    axes = list(range(part.tensor.ndim))
    if name == "permute":
        dims = rest[0] if len(rest) == 1 else rest
        axes = [dim % len(axes) for dim in dims]
    else:
        first, second = (-2, -1) if name in ("mT", "T") else rest[:2]
        axes[first], axes[second] = axes[second], axes[first]
    return axes.index(part.axis % len(axes)) - len(axes)
