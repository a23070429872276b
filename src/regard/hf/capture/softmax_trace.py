"""`Trace` follows the result of each softmax to its product with the values, and detects changes on the way.

In these functions `name` is the name of a function of torch, `args` and `kwargs` are what it was given, `output` is
what it returned, and `part` is one of its arguments: a tensor that is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.hf.calls import Untranslatable
from regard.hf.capture.score_origins import Origin, ScoreOrigins

#: Products -> the index of their first factor among the arguments. Functions are known by name, since most exist three
#: times: in torch, in torch.nn.functional and as a method.
PRODUCTS = {
    "matmul": 0,
    "__matmul__": 0,
    "bmm": 0,
    "mm": 0,
    "mv": 0,
    "linear": 0,
    "baddbmm": 1,
    "addbmm": 1,
    "addmm": 1,
}
MULTIPLICATIONS = {"mul", "multiply", "__mul__", "__rmul__"}


@dataclass(frozen=True, eq=False)
class Traced:
    """A tensor computed from the weights of softmax `number`.

    `axis` is its axis of keys, counted from the end. `changed_by` is the function that changed the weights, or "".
    `is_wide` says that the softmax ran over the last of three or more axes. `values` are the values that the weights
    were multiplied by elementwise, if the sum over the keys is still to come.
    """

    tensor: Tensor
    number: int
    axis: int = -1
    changed_by: str = ""
    is_wide: bool = True
    values: Tensor | None = None


@dataclass(frozen=True, eq=False)
class WeightedSum:
    """A product of traced weights and values: the number of batch entries and of queries that its operands show.

    `by_key` are the values with the axes of the weights (..., J, E), if the product shows which axis is which.
    """

    weights: Traced
    num_batch: int
    num_queries: int
    values: Tensor | None
    by_key: Tensor | None = None


def tensors_in(values: Any) -> Iterator[Tensor]:
    """All tensors in nested lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def weighted_sum(name: str, part: Traced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> WeightedSum | None:
    """The weighted sum that a function computes from a traced tensor; None if it does not sum over the keys."""
    if part.values is not None:
        return _sum_of_products(name, part, args, kwargs)
    if name == "einsum":
        return _einsum(part, args)
    first = PRODUCTS.get(name)
    # A linear layer on top of weights with few axes is a gate or a classifier.
    if first is None or (name == "linear" and not part.is_wide):
        return None
    operands = (
        [kwargs.get("input"), kwargs.get("other", kwargs.get("mat2", kwargs.get("vec")))] if not args else args[first:]
    )
    return _matrix_product(name, part, operands)


def times_values(name: str, part: Traced, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
    """The values (..., J, D), if a function multiplies weights (..., J, 1) by them elementwise; None for others.

    Only with D > 1 it is certain that they are values, not a factor or a mask for each key.
    """
    weights, others = part.tensor, [x for x in tensors_in(args) if x is not part.tensor]
    if name not in MULTIPLICATIONS or len(others) != 1 or part.axis == -1 or weights.ndim < 2 or weights.shape[-1] != 1:
        return None
    values = others[0]
    fits = output.shape[:-1] == weights.shape[:-1] and output.shape[-1] > 1
    return values if fits and values.ndim >= -part.axis and values.shape[-1] > 1 else None


def _sum_of_products(name: str, part: Traced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> WeightedSum | None:
    """The sum over keys of weights that were multiplied elementwise by values; None for any other function.

    Such weights have one query: `part` is (..., J, E), and all axes but keys and channels are the batch.
    """
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    if name != "sum" or len(dims) != 1 or dims[0] not in (part.axis, part.axis + part.tensor.ndim):
        return None
    sizes = part.tensor.shape
    by_key = part.values if part.axis == -2 else None
    return WeightedSum(part, prod(sizes) // max(sizes[-1] * sizes[part.axis], 1), 1, part.values, by_key)


def _matrix_product(name: str, part: Traced, operands: Any) -> WeightedSum | None:
    """A product of two operands, weights (..., I, J) @ values (..., J, E) or values (..., E, J) @ weights (..., J, I).

    A vector of weights (J,) may stand on either side. A linear layer transposes its second operand, so weights are
    known there as the first one only. None if the product does not sum over the keys of `part`, or has one map for
    several texts.
    """
    weights = part.tensor
    is_left = operands[0] is weights and part.axis == -1
    over_rows = part.axis == -2 or weights.ndim == 1
    is_right = len(operands) > 1 and operands[1] is weights and over_rows and name != "linear"
    if not (is_left or is_right):
        return None
    values = operands[1 if is_left else 0] if len(operands) > is_left else None
    num_batch = prod(weights.shape[:-2])
    if not part.is_wide and (values is None or prod(values.shape[:-2]) != num_batch):
        return None  # one map for values of several texts
    num_queries = 1 if weights.ndim == 1 else weights.shape[-2 if is_left else -1]
    by_key = None
    if values is not None and values.ndim > 1 and name != "linear":
        by_key = values if is_left else values.mT
    return WeightedSum(part, num_batch, num_queries, values, by_key)


def _einsum(part: Traced, args: tuple[Any, ...]) -> WeightedSum | None:
    """An einsum that sums over the letter of the keys, which values have too; None for any other.

    Letters of the weights that other operands have are the batch, and the others are queries.
    """
    equation, *operands = args
    if not isinstance(equation, str):
        return None
    operands = list(tensors_in(operands))
    inputs, _, result = equation.replace(" ", "").partition("->")
    subscripts = inputs.split(",")
    place = next(n for n, operand in enumerate(operands) if operand is part.tensor)
    letters = subscripts[place]
    key = letters[part.axis :][:1]
    others = "".join(subscripts[:place] + subscripts[place + 1 :])
    if not (key.isalpha() and key in others and key not in result):
        return None
    sizes = dict(zip(letters, part.tensor.shape, strict=False))
    batch = [sizes[letter] for letter in letters if letter in others and letter != key and letter in sizes]
    queries = [sizes[letter] for letter in letters if letter not in others and letter in sizes]
    if not part.is_wide and (len(operands) != 2 or "." in letters or not set(letters) - {key} <= set(result)):
        return None
    values = operands[1 - place] if len(operands) == 2 else None
    by_key = None if values is None else _by_key(letters, subscripts[1 - place], key, values)
    return WeightedSum(part, prod(batch), prod(queries), values, by_key)


def _by_key(of_weights: str, of_values: str, key: str, values: Tensor) -> Tensor | None:
    """Values (batch axes of the weights, J, E) from an einsum of weights (batch axes, I, J); None for other orders.

    `of_weights` and `of_values` are the letters of both, and `key` is that of the keys.
    """
    width = [letter for letter in of_values if letter not in of_weights]
    shared = [letter for letter in of_values if letter in of_weights]
    batch = of_weights[:-2]
    if len(width) != 1 or of_weights[-1:] != key or "." in of_weights + of_values or not {*shared} <= {*batch, key}:
        return None
    order = [letter for letter in batch if letter in shared] + [key, *width]
    permuted = values.permute([of_values.index(letter) for letter in order])
    for place, letter in enumerate(batch):
        permuted = permuted if letter in shared else permuted.unsqueeze(place)
    return permuted


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
    """The axis of keys of a softmax over `dim`, counted from the end; None if its other axes cannot be told apart.

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
    """The softmaxes of one run of a module. `follow` must be called for every torch function, in order.

    `changes` are the functions by which edits changed a softmax, by its number. `origins` are those of the tensors of a
    module that no name says to be attention; None for others.
    """

    softmaxes: list[Tensor] = field(default_factory=list)
    changes: dict[int, Callable[..., Tensor]] = field(default_factory=dict)
    origins: ScoreOrigins | None = None
    _traced: dict[int, Traced] = field(default_factory=dict)
    _sums: list[WeightedSum] = field(default_factory=list)

    def follow(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Follow one call: a softmax begins a trace, a product over keys ends it, others continue or change it."""
        if self.origins is not None:
            self.origins.follow(_name(function), args, kwargs, output)
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
    def is_attention(self) -> bool:
        """Whether a weighted sum is attention: by the name of the module, or by what its tensors come from."""
        return self.origins is None or any(map(self._compares, self._sums))

    def _compares(self, product: WeightedSum) -> bool:
        """Whether weights from the inputs come from scores between two of them, or sum an input."""
        assert self.origins is not None
        origin = self.origins.of(self.softmaxes[product.weights.number])
        return bool(origin) and (bool(origin & Origin.COMPARED) or self.origins.is_input(product.values))

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
        """The product of the weights and the values; `Untranslatable` if it is not certain which one this is.

        `kind` names the module in the reason.
        """
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
        """What is traced in a tensor; None if it does not come from a softmax."""
        return self._traced.get(id(tensor))

    def _follow_one(
        self, part: Traced, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]
    ) -> None:
        """Trace one input of a function to its outputs: as the same weights, moved or multiplied, or as changed ones.

        An output that is the input itself, or that another input has marked as changed, stays as it is.
        """
        for output in outputs:
            known = self._of(output)
            if output is part.tensor or (known is not None and known.changed_by):
                continue
            values = times_values(name, part, args, output)
            if values is not None:
                self._traced[id(output)] = replace(part, tensor=output, values=values)
                continue
            # weights times values may only be summed over keys (`weighted_sum`): any other function changes them
            axis = None if part.values is not None else _axis_after(part, name, args, kwargs, output)
            changed_by = part.changed_by or ("" if axis is not None else name)
            self._traced[id(output)] = replace(part, tensor=output, axis=axis or part.axis, changed_by=changed_by)

    def _written(self, target: Any, name: str) -> None:
        """Mark all tensors as changed that share memory with `target`, which the function `name` wrote in place."""
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
    """Whether a function writes into a tensor that it was given: `add_`, `__iadd__`, `__setitem__`, or by an option."""
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
    """The axis of keys after a function, counted from the end; None if the function changes the weights.

    A function that is not known keeps them if all numbers stay the same, such as a mask that hides nothing.
    """
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
    """The axis of keys, counted from the end, of a view whose last axis stays or that differs only in axes of size 1.

    None for any other view.
    """
    before = part.tensor
    if part.axis == -1 and output.ndim > 1 and output.shape[-1] == before.shape[-1]:
        return -1 if output.numel() == before.numel() else None
    longer, after = ([place for place in range(-x.ndim, 0) if x.shape[place] != 1] for x in (before, output))
    if part.axis not in longer or [before.shape[n] for n in longer] != [output.shape[n] for n in after]:
        return None
    return after[longer.index(part.axis)]


def _axis_after_squeeze(part: Traced, dim: int, output: Tensor) -> int | None:
    """The axis of keys after an axis of size 1 was added or removed at `dim`; None if the keys were removed.

    The axis moves by one if the other one is before it.
    """
    place, change = part.axis + part.tensor.ndim, output.ndim - part.tensor.ndim
    if change < 0:
        dim %= part.tensor.ndim
        return None if dim == place else place - (dim < place) - output.ndim
    return place + change * (dim % output.ndim <= place) - output.ndim


def _moved(part: Traced, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The axis of keys, counted from the end, after a function `name` that permutes axes; the arguments are its own."""
    rest = (*args[1:], *kwargs.values())
    axes = list(range(part.tensor.ndim))
    if name == "permute":
        dims = rest[0] if len(rest) == 1 else rest
        axes = [dim % len(axes) for dim in dims]
    elif len(axes) > 1:
        first, second = (-2, -1) if name in ("mT", "T", "t") else rest[:2]
        axes[first], axes[second] = axes[second], axes[first]
    return axes.index(part.axis % len(axes)) - len(axes)
