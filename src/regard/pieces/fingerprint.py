"""The fingerprint of a piece: everything that its plans depend on. Pieces with equal fingerprints have the same plans.

The numbers in its tensors are no part of it. Only pieces of this package have one: other code may keep hidden state.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any

from torch import Tensor, nn

from regard.pieces.contents import HOOKS, Module, Object, kind_of
from regard.pieces.mask import Mask

#: Objects of these types are their own fingerprint.
NUMBERS = frozenset({int, float, bool, str, type(None)})


class NoFingerprint(Exception):
    """An object has a part that is neither a number, a tensor nor a piece of this package."""


class Same:
    """The fingerprint of an object that is equal to itself only."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.part is self.part

    def __hash__(self) -> int:
        return id(self.part)


def fingerprint(part: Any, tensors: list[Tensor]) -> Hashable:
    """The fingerprint of a piece, or of a tuple of pieces. `tensors` receives each tensor in it once.

    >>> import regard as rg
    >>> fingerprint(rg.normalizers.Softmax(sink=0.5), [])
    (<class 'regard.pieces.normalizer.Softmax'>, 1.0, 0.5)
    >>> prints = [fingerprint(rg.biases.LearnedTable(heads, reach=3), []) for heads in (2, 2, 4)]
    >>> prints[0] == prints[1], prints[0] == prints[2]
    (True, False)
    """
    of = type(part)
    if of in NUMBERS:
        return part
    if of is tuple:
        return tuple([fingerprint(each, tensors) for each in part])
    if of is Tensor or of is nn.Parameter:
        return _of_tensor(part, tensors)
    is_module, is_mask = _is_module_or_mask(of)
    if is_mask and part.is_kept:
        return Same(part)
    parts, num_earlier = kind_of(of).parts(part), len(tensors)
    values = of, *[fingerprint(each, tensors) for each in parts.values()]
    if is_mask and len(tensors) > num_earlier:
        raise NoFingerprint  # the numbers of a mask's tensors decide its spans
    if is_module and any([vars(part)[name] for name in HOOKS]):
        raise NoFingerprint  # a hook may do anything
    if is_module:
        return *values, *parts, part.training
    return values


def never_changes(part: Any) -> bool:
    """Whether a piece, or a tuple of pieces, has a fingerprint and consists of numbers that nobody can assign again.

    >>> import regard as rg
    >>> never_changes(rg.Dot(scale=2.0)), never_changes(rg.biases.LearnedTable(2, reach=3))
    (True, False)
    """
    if type(part) in NUMBERS:
        return True
    if type(part) is tuple:
        return all(map(never_changes, part))
    if isinstance(part, Mask) and part.is_kept:
        return True
    kind = kind_of(type(part))
    is_fixed = isinstance(kind, Object) and kind.is_frozen and kind.is_ours and not isinstance(kind, Module)
    return is_fixed and all(map(never_changes, kind.parts(part).values()))


@cache
def _is_module_or_mask(of: type) -> tuple[bool, bool]:
    """Whether objects of a type are modules, and whether they are masks; `NoFingerprint` if they have none."""
    kind, is_ours = kind_of(of), of.__module__.partition(".")[0] == "regard"
    is_module = isinstance(kind, Module)
    if of is nn.Linear or (is_ours and (is_module or (isinstance(kind, Object) and kind.is_frozen))):
        return is_module, issubclass(of, Mask)
    raise NoFingerprint


def _of_tensor(tensor: Tensor, tensors: list[Tensor]) -> Hashable:
    """All of a tensor but its numbers; of one that is in the list already, its place there."""
    for number, earlier in enumerate(tensors):
        if earlier is tensor:
            return Tensor, number
    tensors.append(tensor)
    return Tensor, tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
