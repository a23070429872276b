"""The tensors that a piece depends on, and a copy of the piece around other tensors.

An engine that computes its own gradients must name every tensor that receives one. A map of weights must keep every
tensor that its scores need. Both call `split_tensors`, which finds tensors in the fields of dataclasses, the parameters
and buffers of modules, the attributes of other pieces, the items of containers, and the closures of functions and
methods. `builders.py` has the other direction: it builds the piece again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, is_dataclass
from functools import _lru_cache_wrapper, cache, cached_property, partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from regard.closures import closure_values, global_names
from regard.pieces.bias import Bias
from regard.pieces.builders import (
    Assembly,
    Builder,
    CallBuilder,
    FunctionBuilder,
    ListBuilder,
    ObjectBuilder,
    TensorBuilder,
    TupleBuilder,
    slots_of,
)
from regard.pieces.data_masks import mask_mod
from regard.pieces.feature_maps import FeatureMap
from regard.pieces.mask import Composed, Mask, Selected
from regard.pieces.normalizer import Normalizer
from regard.pieces.position import Encoding, Scaling
from regard.pieces.score import Score
from regard.pieces.transition import Transition

PIECES = (Score, Bias, Mask, Normalizer, Encoding, Scaling, FeatureMap, Transition)
#: Masks of this package that hold other masks or functions. All other masks of this package never change.
HOLDERS = (Composed, Selected, mask_mod)
#: The most bytes of a tensor that `tensor_snapshot` copies.
SMALL = 64 << 10
#: Objects of these types hold no tensors.
PLAIN = frozenset({int, float, complex, str, bytes, bool, type(None), type, range, slice})
#: Containers longer than this are searched only if their first item is a tensor, a module or a piece.
LONG = 256
#: Types of objects that wrap functions, and the wrapped functions and objects of each.
FUNCTION_WRAPPERS: dict[type, Any] = {
    MethodType: lambda method: [method.__func__, method.__self__],
    property: lambda descriptor: [descriptor.fget, descriptor.fset, descriptor.fdel],
    staticmethod: lambda method: [method.__func__],
    classmethod: lambda method: [method.__func__],
    _lru_cache_wrapper: lambda function: [function.__wrapped__],
}
#: Attributes of a module that hold its tensors and submodules, and the other attributes that every module has.
OWNED = ("_parameters", "_buffers", "_modules")
INTERNAL = frozenset(vars(nn.Module())) - set(OWNED)


@dataclass(frozen=True, eq=False)
class PieceTemplate:
    """A piece without its tensors. `is_foreign`: some of its code is defined outside this package and torch."""

    root: Any
    is_foreign: bool

    def around(self, tensors: Iterable[Tensor]) -> Any:
        """The piece around other tensors, in the order of `split_tensors`."""
        return Assembly(tensors).build(self.root)


def split_tensors(piece: Any) -> tuple[list[Tensor], PieceTemplate]:
    """Each tensor that a piece depends on, listed once, and the piece without them.

    >>> import torch, regard as rg
    >>> tensors, template = split_tensors(rg.biases.LearnedTable(num_heads=2, reach=3))
    >>> [tuple(t.shape) for t in tensors], template.around([torch.zeros(2, 7)]).table.sum().item()
    ([(2, 7)], 0.0)
    """
    reader = _Reader()
    root = reader.read(piece)
    return reader.tensors, PieceTemplate(root, reader.is_foreign)


def tensors_of(piece: Any) -> list[Tensor]:
    """Each tensor that a piece depends on, listed once.

    >>> import torch, regard as rg
    >>> [tuple(t.shape) for t in tensors_of((rg.normalizers.LearnedSink(2), rg.Dot(scale=torch.tensor(0.5))))]
    [(2,), ()]
    """
    return split_tensors(piece)[0]


def tensor_snapshot(tensor: Tensor) -> Tensor:
    """The tensor as it is now, detached.

    A small tensor is copied. A large one shares its memory; torch's version counts changes.

    Limit: a change through `.data`, NumPy or another library does not change the version of a tensor. A map does not
    notice such a change in a tensor of more than `SMALL` bytes, and gives weights of the new values. Comparing 1,024
    sampled entries is no remedy: it costs about 10 us for each tensor and call, makes the host wait for a device, and
    misses changes of other entries. Change parameters under `torch.no_grad()` instead, as optimizers do.
    """
    return tensor.detach().clone() if is_small(tensor) else tensor.detach()


def is_small(tensor: Tensor) -> bool:
    """Whether `tensor_snapshot` copies the tensor."""
    return tensor.nbytes <= SMALL


@dataclass(frozen=True, eq=False)
class Originals:
    """The tensors of a piece themselves, with their graphs, the piece without them, and how often each was changed.

    A map reads weights from a snapshot of them. Their gradients are those of the originals.
    """

    tensors: list[Tensor]
    template: PieceTemplate
    versions: list[int]

    @staticmethod
    def of(tensors: list[Tensor], template: PieceTemplate) -> Originals:
        return Originals(tensors, template, versions_of(tensors))

    @property
    def are_changed(self) -> bool:
        """Whether one was changed in place, so that a gradient would belong to other numbers than the snapshot."""
        return versions_of(self.tensors) != self.versions


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """How often each tensor was changed in place; inference tensors do not count that."""
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


@dataclass(frozen=True)
class _TypeFacts:
    """How to read objects of a type.

    `read_as` is the type that decides: `Tensor`, `nn.Module`, `tuple` for any container, ... None: use as it is.
    `derived` are cached properties. They were computed from other attributes, so they would be wrong for other tensors.
    """

    read_as: Any
    is_piece: bool
    is_foreign: bool
    is_frozen: bool
    fields: tuple[str, ...]
    slots: frozenset[str]
    derived: frozenset[str]


@cache
def _facts_of(kind: type) -> _TypeFacts:
    attributes = [item for owner in kind.__mro__ for item in vars(owner).items()]
    return _TypeFacts(
        _read_as(kind),
        issubclass(kind, PIECES),
        _package(kind) not in ("regard", "torch"),
        is_dataclass(kind) and getattr(kind, "__dataclass_params__").frozen,  # noqa: B009 - it has no public name
        tuple(getattr(kind, "__dataclass_fields__", ())),
        slots_of(kind),
        frozenset(name for name, attribute in attributes if isinstance(attribute, cached_property)),
    )


def _read_as(kind: type) -> Any:
    for known in (Tensor, nn.Module, FunctionType, partial, *FUNCTION_WRAPPERS):
        if issubclass(kind, known):
            return known
    if issubclass(kind, tuple | list | dict | deque | set | frozenset):
        return tuple
    if issubclass(kind, PIECES):
        never_changes = issubclass(kind, Mask) and _package(kind) == "regard" and not issubclass(kind, HOLDERS)
        return None if never_changes else object
    return None if _package(kind) == "torch" or kind.__new__ is not object.__new__ else object


class _Reader:
    """Visits every object inside a piece once and numbers its tensors."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.is_foreign = False
        self._parts: dict[int, Any] = {}
        self._visited: list[Any] = []  # keeps the objects alive, so that no other object gets the same id

    def read(self, value: Any) -> Any:
        """A builder of the value; the value itself if it holds no tensor and cannot be exchanged."""
        if type(value) in PLAIN:
            return value
        if id(value) not in self._parts:
            self._visited.append(value)
            self._parts[id(value)] = value  # used if the value holds itself
            self._parts[id(value)] = self._part(value)
        return self._parts[id(value)]

    def _part(self, value: Any) -> Any:
        read_as = _facts_of(type(value)).read_as
        if read_as is Tensor:
            self.tensors.append(value)
            return TensorBuilder(len(self.tensors) - 1)
        if read_as is nn.Module:
            return self._module(value)
        if read_as is tuple:
            return self._container(value)
        if read_as is FunctionType:
            return self._function(value)
        if read_as is partial:
            return self._call(value, partial, [value.func, *value.args], value.keywords)
        if read_as in FUNCTION_WRAPPERS:
            wrapper = cache if read_as is _lru_cache_wrapper else read_as
            return self._call(value, wrapper, FUNCTION_WRAPPERS[read_as](value), {})
        return value if read_as is None else self._object(value)

    def _container(self, value: Any) -> Any:
        items = list(value.values() if isinstance(value, dict) else value)
        if not items or (len(items) > LONG and not isinstance(items[0], (Tensor, nn.Module, *PIECES))):
            return value
        parts = [self.read(item) for item in items]
        if not _any_builder(parts):
            return value
        if isinstance(value, tuple | set | frozenset):
            return TupleBuilder(type(value), parts)
        (empty := copy(value)).clear()
        return ListBuilder(empty, parts, list(value) if isinstance(value, dict) else None)

    def _module(self, value: nn.Module) -> Any:
        """Always a builder, because the attributes and parts of a module can be exchanged."""
        new = self._parts[id(value)] = ObjectBuilder(type(value))
        for name, attribute in vars(value).items():
            if name in INTERNAL:
                new.same[name] = attribute
            elif name in OWNED:
                new.parts[name] = ListBuilder({}, [self.read(item) for item in attribute.values()], list(attribute))
            else:
                new.add(name, self.read(attribute))
        self._add_class_members(new, value)
        return new

    def _object(self, value: Any) -> Any:
        facts = _facts_of(type(value))
        new = ObjectBuilder(type(value))
        if not facts.is_frozen:
            self._parts[id(value)] = new
        for name in dict.fromkeys((*facts.fields, *facts.slots, *getattr(value, "__dict__", ()))):
            if name not in facts.derived and hasattr(value, name):
                new.add(name, self.read(getattr(value, name)))
        self._add_class_members(new, value)
        if new.is_same and (facts.is_frozen or not facts.is_piece):
            return value
        return new

    def _add_class_members(self, new: ObjectBuilder, value: Any) -> None:
        """Add the tensors that the class of a value holds, and its methods and properties that close over tensors."""
        if not _facts_of(type(value)).is_foreign:
            return
        self.is_foreign = True
        attributes = getattr(value, "__dict__", None)
        for name, member in _class_members(type(value)).items():
            part = self.read(member)
            if not isinstance(part, Builder):
                continue
            if attributes is not None and isinstance(member, FunctionType) and not name.startswith("__"):
                if name not in attributes:
                    new.methods[name] = part
            else:
                new.members[name] = part

    def _function(self, value: FunctionType) -> Any:
        if _package(value) in ("regard", "torch"):
            return value
        self.is_foreign = True
        cells = [self.read(content) for content in closure_values(value).values()]
        defaults, keyword_defaults = self.read(value.__defaults__), self.read(value.__kwdefaults__)
        variables = {name: value.__globals__.get(name) for name in global_names(value.__code__)}
        variables = {name: self.read(x) for name, x in variables.items() if isinstance(x, Tensor | nn.Module)}
        if not _any_builder((*cells, defaults, keyword_defaults, *variables.values())):
            return value
        return FunctionBuilder(value, cells, defaults, keyword_defaults, variables)

    def _call(self, value: Any, kind: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        parts, keyword_parts = [self.read(argument) for argument in arguments], self.read(keywords)
        return CallBuilder(kind, parts, keyword_parts) if _any_builder((*parts, keyword_parts)) else value


def _any_builder(parts: Iterable[Any]) -> bool:
    return any(isinstance(part, Builder) for part in parts)


def _package(value: Any) -> str:
    """The outermost package that defines a class or a function."""
    return (value.__module__ or "").partition(".")[0]


def _class_members(kind: type) -> dict[str, Any]:
    """Functions, tensors and containers in the body of a class and of its bases, where the user wrote these classes.

    A member that a subclass overrides appears once, as the subclass has it.
    """
    members: dict[str, Any] = {}
    for owner in kind.__mro__:
        if _package(owner) not in ("regard", "torch", "builtins", "abc", "typing"):
            members = {**vars(owner), **members}
    functions = (FunctionType, *FUNCTION_WRAPPERS)
    holders = (*functions, Tensor, list, tuple, dict)
    return {n: x for n, x in members.items() if isinstance(x, functions if n.startswith("__") else holders)}
