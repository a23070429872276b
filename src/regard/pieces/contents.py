"""The tensors that a piece depends on, and the same piece around others.

An engine that computes its own gradients must name every tensor that these reach. A map of weights must keep every
tensor that its scores need. Both find the tensors here: in fields of dataclasses, parameters and buffers of modules,
attributes of other pieces, items of containers, and closures of functions and methods.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, is_dataclass
from functools import _lru_cache_wrapper, cache, cached_property, partial
from types import CellType, FunctionType, MemberDescriptorType, MethodType
from typing import Any

from torch import Tensor, nn

from regard.closures import closure_values, global_names
from regard.pieces.bias import Bias
from regard.pieces.kernel import FeatureMap
from regard.pieces.mask import Both, Either, Mask, Not
from regard.pieces.mask_data import mask_mod
from regard.pieces.normalizer import Normalizer
from regard.pieces.position import Position, Scaling
from regard.pieces.score import Score

PIECES = (Score, Bias, Mask, Normalizer, Position, Scaling, FeatureMap)
#: The masks of this package that are made of other masks or of functions; all others never change.
COMPOSED = (Both, Either, Not, mask_mod)
#: Tensors of up to so many bytes are copied to keep their values.
SMALL = 64 << 10
#: Objects of these types hold no tensors.
PLAIN = frozenset({int, float, complex, str, bytes, bool, type(None), type, range, slice})
#: Containers longer than this are looked into only if they begin with a tensor, a module or a piece.
LONG = 256
#: Types of objects that wrap functions, and the parts that each is made of.
AROUND_FUNCTIONS: dict[type, Any] = {
    MethodType: lambda method: [method.__func__, method.__self__],
    property: lambda descriptor: [descriptor.fget, descriptor.fset, descriptor.fdel],
    staticmethod: lambda method: [method.__func__],
    classmethod: lambda method: [method.__func__],
    _lru_cache_wrapper: lambda function: [function.__wrapped__],
}
#: Attributes of a module that hold its tensors and parts, and those that every other module has as well.
OWNED = ("_parameters", "_buffers", "_modules")
INTERNAL = frozenset(vars(nn.Module())) - set(OWNED)


@dataclass(frozen=True, eq=False)
class Skeleton:
    """A piece without its tensors. `is_foreign`: some of its code lies outside this package."""

    build: Any
    is_foreign: bool

    def around(self, tensors: Iterable[Tensor]) -> Any:
        """The piece around other tensors, in the order that `take_apart` gave them."""
        return _built(self.build, list(tensors), {})


def take_apart(piece: Any) -> tuple[list[Tensor], Skeleton]:
    """Each tensor that a piece depends on, once, and the piece without them.

    >>> import torch, regard as rg
    >>> tensors, skeleton = take_apart(rg.LearnedTable(num_heads=2, reach=3))
    >>> [tuple(t.shape) for t in tensors], skeleton.around([torch.zeros(2, 7)]).table.sum().item()
    ([(2, 7)], 0.0)
    """
    reader = _Reader()
    build = reader.read(piece)
    return reader.tensors, Skeleton(build, reader.is_foreign)


def tensors_of(piece: Any) -> list[Tensor]:
    """Each tensor that a piece depends on, once.

    >>> import torch, regard as rg
    >>> [tuple(t.shape) for t in tensors_of((rg.LearnedSink(2), rg.Dot(scale=torch.tensor(0.5))))]
    [(2,), ()]
    """
    return take_apart(piece)[0]


def tensor_snapshot(tensor: Tensor) -> Tensor:
    """The tensor as it is now. A small one is copied; a large one shares its memory, and its version counts changes.

    Limit: a change through `.data` (or NumPy, or another library) leaves the version of a tensor as it is. So a map
    does not notice it in a tensor of more than `SMALL` bytes, and gives weights of the new values. To keep 1,024
    entries costs about 10 us for each tensor and call, the host would wait for a device, and a change of other entries
    would pass. Change parameters under `torch.no_grad()` instead, as optimizers do.
    """
    return tensor.detach().clone() if is_small(tensor) else tensor.detach()


def is_small(tensor: Tensor) -> bool:
    """Whether `tensor_snapshot` copies it."""
    return tensor.nbytes <= SMALL


class _Builder:
    """Builds one object again, around other tensors."""

    def build(self, tensors: Sequence[Tensor], known: dict[int, Any]) -> Any:
        raise NotImplementedError


def _built(part: Any, tensors: Sequence[Tensor], known: dict[int, Any]) -> Any:
    """The object that a builder builds, each builder once; any other object is returned as it is."""
    if not isinstance(part, _Builder):
        return part
    if id(part) not in known:
        known[id(part)] = part.build(tensors, known)
    return known[id(part)]


@dataclass(eq=False)
class _Tensor(_Builder):
    number: int

    def build(self, tensors: Sequence[Tensor], known: dict[int, Any]) -> Any:
        return tensors[self.number]


@dataclass(eq=False)
class _Items(_Builder):
    """A list, queue or dictionary: a copy of `empty` is filled again."""

    empty: Any
    items: list[Any]
    keys: list[Any] | None = None

    def build(self, tensors: Sequence[Tensor], known: dict[int, Any]) -> Any:
        new, items = copy(self.empty), [_built(item, tensors, known) for item in self.items]
        if self.keys is None:
            new.extend(items)
        else:
            new.update(zip(self.keys, items, strict=True))
        return new


@dataclass(eq=False)
class _Fixed(_Builder):
    """A tuple or set: all its items at once."""

    kind: type
    items: list[Any]

    def build(self, tensors: Sequence[Tensor], known: dict[int, Any]) -> Any:
        items = [_built(item, tensors, known) for item in self.items]
        return self.kind(*items) if hasattr(self.kind, "_fields") else self.kind(items)


@dataclass(eq=False)
class _Object(_Builder):
    """An object by its attributes: `same` are kept as they are, `parts` are built.

    `methods` are methods of its class that close over tensors. `members` are other members of the class that hold
    tensors. Python looks up properties and special methods only in the class, so the object gets a class of its own.
    """

    kind: type
    same: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, _Builder] = field(default_factory=dict)
    methods: dict[str, _Builder] = field(default_factory=dict)
    members: dict[str, _Builder] = field(default_factory=dict)

    def build(self, tensors: Sequence[Tensor], known: dict[int, Any]) -> Any:
        new = known[id(self)] = object.__new__(self._class(tensors, known))
        attributes = {**self.same, **{name: _built(part, tensors, known) for name, part in self.parts.items()}}
        attributes |= {name: MethodType(_built(part, tensors, known), new) for name, part in self.methods.items()}
        slots = _kind_of(self.kind).slots
        for name, value in attributes.items():
            if name in slots:
                object.__setattr__(new, name, value)
            else:
                new.__dict__[name] = value
        return new

    def _class(self, tensors: Sequence[Tensor], known: dict[int, Any]) -> type:
        if not self.members:
            return self.kind
        changed = {name: _built(part, tensors, known) for name, part in self.members.items()}
        return type(self.kind)(self.kind.__name__, (self.kind,), {"__module__": self.kind.__module__, **changed})

    @property
    def is_same(self) -> bool:
        """Whether there is nothing to build."""
        return not (self.parts or self.methods or self.members)

    def add(self, name: str, part: Any) -> None:
        (self.parts if isinstance(part, _Builder) else self.same)[name] = part


@dataclass(eq=False)
class _Function(_Builder):
    """A function with what it closes over, its defaults and the tensors it reads as globals."""

    function: Any
    cells: list[Any]
    defaults: Any
    keywords: Any
    variables: dict[str, Any]

    def build(self, tensors: Sequence[Tensor], known: dict[int, Any]) -> Any:
        old = self.function
        cells = tuple(CellType(_built(cell, tensors, known)) for cell in self.cells)
        read = {name: _built(part, tensors, known) for name, part in self.variables.items()}
        variables = {**old.__globals__, **read} if read else old.__globals__
        new = FunctionType(old.__code__, variables, old.__name__, _built(self.defaults, tensors, known), cells)
        new.__kwdefaults__ = _built(self.keywords, tensors, known)
        new.__dict__.update(old.__dict__)
        return new


@dataclass(eq=False)
class _Call(_Builder):
    """An object made by a call of its type with functions: a partial function, a bound method, a property."""

    kind: Any
    arguments: list[Any]
    keywords: Any

    def build(self, tensors: Sequence[Tensor], known: dict[int, Any]) -> Any:
        arguments = [_built(part, tensors, known) for part in self.arguments]
        return self.kind(*arguments, **_built(self.keywords, tensors, known))


@dataclass(frozen=True)
class _Kind:
    """How objects of a type are read: as a `Tensor`, `nn.Module`, `tuple`, ...; None: they are left as they are.

    `derived` are cached properties: computed from other attributes, they would be wrong around other tensors.
    """

    how: Any
    is_piece: bool
    is_foreign: bool
    is_frozen: bool
    fields: tuple[str, ...]
    slots: frozenset[str]
    derived: frozenset[str]


@cache
def _kind_of(kind: type) -> _Kind:
    is_data = is_dataclass(kind)
    attributes = [item for owner in kind.__mro__ for item in vars(owner).items()]
    return _Kind(
        _how(kind),
        issubclass(kind, PIECES),
        _root(kind) not in ("regard", "torch"),
        is_data and getattr(kind, "__dataclass_params__").frozen,  # noqa: B009 - it has no public name
        tuple(getattr(kind, "__dataclass_fields__", ())),
        frozenset(name for name, attribute in attributes if isinstance(attribute, MemberDescriptorType)),
        frozenset(name for name, attribute in attributes if isinstance(attribute, cached_property)),
    )


def _how(kind: type) -> Any:
    for known in (Tensor, nn.Module, FunctionType, partial, *AROUND_FUNCTIONS):
        if issubclass(kind, known):
            return known
    if issubclass(kind, tuple | list | dict | deque | set | frozenset):
        return tuple
    if issubclass(kind, PIECES):
        never_changes = issubclass(kind, Mask) and _is_own(kind) and not issubclass(kind, COMPOSED)
        return None if never_changes else object
    return None if _root(kind) == "torch" or kind.__new__ is not object.__new__ else object


class _Reader:
    """Goes through a piece once and numbers its tensors."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.is_foreign = False
        self._parts: dict[int, Any] = {}
        self._alive: list[Any] = []  # so that no other object takes an id

    def read(self, value: Any) -> Any:
        """A builder of the value; the value itself if it holds no tensor and no part that can be exchanged."""
        if type(value) in PLAIN:
            return value
        if id(value) not in self._parts:
            self._alive.append(value)
            self._parts[id(value)] = value  # where a value holds itself
            self._parts[id(value)] = self._part(value)
        return self._parts[id(value)]

    def _part(self, value: Any) -> Any:
        how = _kind_of(type(value)).how
        if how is Tensor:
            self.tensors.append(value)
            return _Tensor(len(self.tensors) - 1)
        if how is nn.Module:
            return self._module(value)
        if how is tuple:
            return self._items(value)
        if how is FunctionType:
            return self._function(value)
        if how is partial:
            return self._call(value, partial, [value.func, *value.args], value.keywords)
        if how in AROUND_FUNCTIONS:
            return self._call(value, cache if how is _lru_cache_wrapper else how, AROUND_FUNCTIONS[how](value), {})
        return value if how is None else self._object(value)

    def _items(self, value: Any) -> Any:
        values = list(value.values() if isinstance(value, dict) else value)
        if not values or (len(values) > LONG and not isinstance(values[0], (Tensor, nn.Module, *PIECES))):
            return value
        items = [self.read(item) for item in values]
        if not any(isinstance(item, _Builder) for item in items):
            return value
        if isinstance(value, tuple | set | frozenset):
            return _Fixed(type(value), items)
        (empty := copy(value)).clear()
        return _Items(empty, items, list(value) if isinstance(value, dict) else None)

    def _module(self, value: nn.Module) -> Any:
        """Always a builder: the attributes and parts of a module can be exchanged."""
        new = self._parts[id(value)] = _Object(type(value))
        for name, attribute in vars(value).items():
            if name in INTERNAL:
                new.same[name] = attribute
            elif name in OWNED:
                new.parts[name] = _Items({}, [self.read(x) for x in attribute.values()], list(attribute))
            else:
                new.add(name, self.read(attribute))
        return self._with_class_members(new, value)

    def _object(self, value: Any) -> Any:
        kind, about = type(value), _kind_of(type(value))
        new = _Object(kind)
        if not about.is_frozen:
            self._parts[id(value)] = new
        for name in dict.fromkeys((*about.fields, *about.slots, *getattr(value, "__dict__", ()))):
            if name not in about.derived and hasattr(value, name):
                new.add(name, self.read(getattr(value, name)))
        self._with_class_members(new, value)
        if about.is_frozen or not about.is_piece:
            return value if new.is_same else new
        return new

    def _with_class_members(self, new: _Object, value: Any) -> _Object:
        """Add the tensors that the class of a value holds, and its methods and properties that close over tensors."""
        if not _kind_of(type(value)).is_foreign:
            return new
        self.is_foreign = True
        own = getattr(value, "__dict__", None)
        for name, attribute in _class_members(type(value)).items():
            part = self.read(attribute)
            if not isinstance(part, _Builder):
                continue
            if own is not None and isinstance(attribute, FunctionType) and not name.startswith("__"):
                if name not in own:
                    new.methods[name] = part
            else:
                new.members[name] = part
        return new

    def _function(self, value: FunctionType) -> Any:
        if _root(value) == "torch" or _is_own(value):
            return value
        self.is_foreign = True
        cells = [self.read(content) for content in closure_values(value).values()]
        defaults, keywords = self.read(value.__defaults__), self.read(value.__kwdefaults__)
        read = ((name, value.__globals__.get(name)) for name in global_names(value.__code__))
        variables = {name: self.read(x) for name, x in read if isinstance(x, Tensor | nn.Module)}
        if not any(isinstance(part, _Builder) for part in (*cells, defaults, keywords, *variables.values())):
            return value
        return _Function(value, cells, defaults, keywords, variables)

    def _call(self, value: Any, kind: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        parts, named = [self.read(part) for part in arguments], self.read(keywords)
        return _Call(kind, parts, named) if any(isinstance(part, _Builder) for part in (*parts, named)) else value


def _root(value: Any) -> str:
    return (value.__module__ or "").partition(".")[0]


def _is_own(value: Any) -> bool:
    return _root(value) == "regard"


def _class_members(kind: type) -> dict[str, Any]:
    """Functions, tensors and containers in the body of a class and of its bases, where these are the user's own.

    Members that a class overrides are left out.
    """
    members: dict[str, Any] = {}
    for owner in kind.__mro__:
        if _root(owner) not in ("regard", "torch", "builtins", "abc", "typing"):
            members = {**vars(owner), **members}
    functions = (FunctionType, *AROUND_FUNCTIONS)
    held = (*functions, Tensor, list, tuple, dict)
    return {n: x for n, x in members.items() if isinstance(x, functions if n.startswith("__") else held)}
