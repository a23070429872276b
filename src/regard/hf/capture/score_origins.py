"""`ScoreOrigins` tells attention from other softmaxes by what a module computes, where no name says it.

A router of experts, a classifier and a gate have a softmax too. Attention compares tokens: its scores are a product of
two tensors that come from the inputs, or it sums an input by weights that come from the inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import IntFlag
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

#: Products of two tensors, elementwise ones aside.
PRODUCTS = {"matmul", "__matmul__", "bmm", "mm", "mv", "baddbmm", "addbmm", "addmm", "einsum", "linear"}
MULTIPLICATIONS = {"mul", "multiply", "__mul__", "__rmul__"}
#: Functions whose result has the numbers of their argument, on other axes.
COPIES = {
    "transpose", "swapaxes", "swapdims", "permute", "movedim", "mT", "T", "t", "flatten", "reshape", "squeeze",
    "unsqueeze", "unflatten", "view", "contiguous", "clone", "detach", "expand", "to", "float", "type_as",
}  # fmt: skip


class Origin(IntFlag):
    """How a tensor was computed."""

    #: From an input of the module.
    GIVEN = 1
    #: With the numbers of an input.
    COPY = 2
    #: An elementwise product of two that come from the inputs; its sum over channels compares them.
    MULTIPLIED = 4
    #: From a product of two that come from the inputs.
    COMPARED = 8


class ScoreOrigins:
    """The origin of each tensor of one run of a module. `follow` must be called for every torch function, in order.

    `inputs` may be nested. Views of inputs that no function made are known by the memory that they share with an input.
    """

    def __init__(self, inputs: Iterable[Any]) -> None:
        given = [*_tensors(inputs)]
        self._origins: WeakIdKeyDictionary = WeakTensorKeyDictionary()
        for tensor in given:
            self._origins[tensor] = Origin.GIVEN | Origin.COPY
        self._places = {_place(tensor) for tensor in given if tensor.is_floating_point()} - {None}

    def follow(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """Follow a function by its name: what its result comes from."""
        origins = [self.of(tensor) for tensor in _tensors((args, kwargs))]
        if not any(origins):
            return
        origin = _after(name, origins)
        for tensor in _tensors((output,)):
            self._origins[tensor] = origin

    def of(self, tensor: Tensor) -> Origin:
        """The origin of a tensor; 0 for one that does not come from the inputs."""
        return self._origins.get(tensor) or Origin(0)

    def is_input(self, tensor: Tensor | None) -> bool:
        """Whether a tensor has the numbers of an input of the module."""
        return tensor is not None and (bool(self.of(tensor) & Origin.COPY) or _place(tensor) in self._places)


def _after(name: str, origins: list[Origin]) -> Origin:
    """The origin of a result, from those of the arguments, which include 0 for tensors that no input reaches."""
    num_given = sum(map(bool, origins))
    if name in PRODUCTS:
        return Origin.GIVEN | Origin.COMPARED if num_given > 1 else Origin.GIVEN
    if name in COPIES:
        return origins[0]
    origin = Origin.GIVEN
    if any(x & Origin.COMPARED for x in origins) or (name == "sum" and origins[0] & Origin.MULTIPLIED):
        origin |= Origin.COMPARED
    return origin | Origin.MULTIPLIED if name in MULTIPLICATIONS and num_given > 1 else origin


def _place(tensor: Tensor) -> int | None:
    """The address of the memory of a tensor; None if it has none."""
    has_memory = not tensor.is_meta and tensor.layout == torch.strided
    return tensor.untyped_storage().data_ptr() if has_memory else None


def _tensors(values: Any) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    for value in values.values() if isinstance(values, Mapping) else values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple | Mapping):
            yield from _tensors(value)
