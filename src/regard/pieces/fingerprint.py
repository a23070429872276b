"""What distinguishes pieces besides the numbers of their tensors: two pieces with one fingerprint have the same plans.

Only pieces of this package have a fingerprint. Other code may keep a state that nobody sees.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn

from regard.pieces.contents import INTERNAL
from regard.pieces.mask import Mask

#: Objects of these types are their own fingerprint.
NUMBERS = frozenset({int, float, bool, str, type(None)})
#: The attributes of a module that hold its hooks.
HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))

#: Gives the fingerprint of an object, and appends the tensors in it to a list.
Reader = Callable[[Any, list[Tensor]], Hashable]


class NoFingerprint(Exception):
    """An object has a part that is neither a number, a tensor nor a piece of this package."""


def fingerprint(part: Any, tensors: list[Tensor]) -> Hashable:
    """The fingerprint of a piece, or of a tuple of pieces. `tensors` receives each tensor in it once.

    >>> import regard as rg
    >>> fingerprint(rg.normalizers.Softmax(sink=0.5), [])
    (<class 'regard.pieces.normalizer.Softmax'>, 1.0, 0.5)
    >>> prints = [fingerprint(rg.biases.LearnedTable(heads, reach=3), []) for heads in (2, 2, 4)]
    >>> prints[0] == prints[1], prints[0] == prints[2]
    (True, False)
    """
    return part if type(part) in NUMBERS else _reader_of(type(part))(part, tensors)


@cache
def _reader_of(kind: type) -> Reader:
    package = (kind.__module__ or "").partition(".")[0]
    if kind in (Tensor, nn.Parameter):
        return _of_tensor
    if kind is tuple:
        return _of_tuple
    if kind is nn.Linear or (package == "regard" and issubclass(kind, nn.Module)):
        return _of_module
    names = tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()
    is_frozen = is_dataclass(kind) and getattr(kind, "__dataclass_params__").frozen  # noqa: B009 - it has no public name
    if package != "regard" or not is_frozen:
        return _refused
    return _of_mask(kind, names) if issubclass(kind, Mask) else _of_fields(kind, names)


def _refused(part: Any, tensors: list[Tensor]) -> Hashable:
    raise NoFingerprint


def _of_tensor(tensor: Tensor, tensors: list[Tensor]) -> Hashable:
    for number, known in enumerate(tensors):
        if known is tensor:
            return Tensor, number
    tensors.append(tensor)
    return Tensor, tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _of_tuple(parts: tuple[Any, ...], tensors: list[Tensor]) -> Hashable:
    return tuple([fingerprint(part, tensors) for part in parts])


def _of_fields(kind: type, names: tuple[str, ...]) -> Reader:
    """A reader of frozen dataclasses, by the names of their fields."""
    if not names:
        return lambda piece, tensors: kind
    return lambda piece, tensors: (kind, *[fingerprint(getattr(piece, name), tensors) for name in names])


def _of_mask(kind: type, names: tuple[str, ...]) -> Reader:
    """A reader of masks. The numbers of a mask's tensors decide its spans, so such a mask has no fingerprint."""
    read = _of_fields(kind, names)

    def of_mask(mask: Mask, tensors: list[Tensor]) -> Hashable:
        found = read(mask, own := [])
        return _refused(mask, own) if own else found

    return of_mask


def _of_module(module: nn.Module, tensors: list[Tensor]) -> Hashable:
    """All attributes of a module: other code may set any of them."""
    attributes = vars(module)
    if any([attributes[name] for name in HOOKS]):
        raise NoFingerprint
    found: list[Hashable] = [type(module), module.training]
    for name, value in attributes.items():
        if name not in INTERNAL:
            found.append(name)
            items = tuple(value.items()) if type(value) is dict else value
            found.append(fingerprint(items, tensors))
    return tuple(found)
