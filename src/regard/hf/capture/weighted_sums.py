"""`weighted_sum` recognizes the torch functions that multiply traced weights by values and sum over the keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

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
    if first is None or (name == "linear" and not part.is_wide):  # a layer on top of few weights, such as a gate
        return None
    operands = (
        [kwargs.get("input"), kwargs.get("other", kwargs.get("mat2", kwargs.get("vec")))] if not args else args[first:]
    )
    return _matrix_product(name, part, operands)


def times_values(name: str, part: Traced, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
    """The values (..., J, D), if a function multiplies weights (..., J, 1) by them elementwise."""
    weights, others = part.tensor, [x for x in tensors_in(args) if x is not part.tensor]
    if name not in MULTIPLICATIONS or len(others) != 1 or part.axis == -1 or weights.ndim < 2 or weights.shape[-1] != 1:
        return None
    values = others[0]
    fits = output.shape[:-1] == weights.shape[:-1] and output.shape[-1] > 1
    return values if fits and values.ndim >= -part.axis and values.shape[-1] > 1 else None


def _sum_of_products(name: str, part: Traced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> WeightedSum | None:
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    if name != "sum" or len(dims) != 1 or dims[0] not in (part.axis, part.axis + part.tensor.ndim):
        return None
    sizes = part.tensor.shape
    by_key = part.values if part.axis == -2 else None
    return WeightedSum(part, prod(sizes) // max(sizes[-1] * sizes[part.axis], 1), 1, part.values, by_key)


def _matrix_product(name: str, part: Traced, operands: Any) -> WeightedSum | None:
    weights = part.tensor
    is_left = operands[0] is weights and part.axis == -1
    over_rows = part.axis == -2 or weights.ndim == 1
    is_right = len(operands) > 1 and operands[1] is weights and over_rows and name != "linear"
    if not (is_left or is_right):
        return None
    values = operands[is_left] if len(operands) > is_left else None
    num_batch = prod(weights.shape[:-2])
    if not part.is_wide and (values is None or prod(values.shape[:-2]) != num_batch):
        return None  # one map for values of several texts
    num_queries = 1 if weights.ndim == 1 else weights.shape[-2 if is_left else -1]
    by_key = None
    if values is not None and values.ndim > 1 and name != "linear":
        by_key = values if is_left else values.mT
    return WeightedSum(part, num_batch, num_queries, values, by_key)


def _einsum(part: Traced, args: tuple[Any, ...]) -> WeightedSum | None:
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
    """Values (batch axes of the weights, J, E) from an einsum of weights (batch axes, I, J); None for other orders."""
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
