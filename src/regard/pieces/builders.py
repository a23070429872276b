"""Builders: a piece without its tensors, built again around other tensors.

`contents.py` reads a piece into builders. A builder stands for each object that holds a tensor, or that can be
exchanged. Every other object is used as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from types import CellType, FunctionType, MemberDescriptorType, MethodType
from typing import Any

from torch import Tensor


class Builder:
    """Builds one object around the tensors of an assembly."""

    def build(self, assembly: Assembly) -> Any:
        raise NotImplementedError


class Assembly:
    """One list of tensors, and the objects that builders built around them so far. Each builder builds once."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = list(tensors)
        self.built: dict[int, Any] = {}

    def build(self, part: Any) -> Any:
        """The object that a builder builds; any other part as it is."""
        if not isinstance(part, Builder):
            return part
        if id(part) not in self.built:
            self.built[id(part)] = part.build(self)
        return self.built[id(part)]

    def build_values(self, parts: dict[str, Any]) -> dict[str, Any]:
        return {name: self.build(part) for name, part in parts.items()}


@dataclass(eq=False)
class TensorBuilder(Builder):
    """The tensor at `index` in the list."""

    index: int

    def build(self, assembly: Assembly) -> Tensor:
        return assembly.tensors[self.index]


@dataclass(eq=False)
class ListBuilder(Builder):
    """A list, queue or dictionary: a copy of `empty`, filled with the items."""

    empty: Any
    items: list[Any]
    keys: list[Any] | None = None

    def build(self, assembly: Assembly) -> Any:
        if not self.items:
            return {} if type(self.empty) is dict else copy(self.empty)
        new, items = copy(self.empty), [assembly.build(item) for item in self.items]
        if self.keys is None:
            new.extend(items)
        else:
            new.update(zip(self.keys, items, strict=True))
        return new


@dataclass(eq=False)
class TupleBuilder(Builder):
    """A tuple, named tuple or set, made from all its items at once."""

    kind: type
    items: list[Any]

    def build(self, assembly: Assembly) -> Any:
        items = [assembly.build(item) for item in self.items]
        return self.kind(*items) if hasattr(self.kind, "_fields") else self.kind(items)


@dataclass(eq=False)
class ObjectBuilder(Builder):
    """An object by its attributes. `same` are used as they are, `parts` are built.

    `methods` are methods of its class that close over tensors. `members` are other members of its class that hold
    tensors. Python looks up properties and special methods in the class only, so an object with `members` gets a new
    subclass.
    """

    kind: type
    same: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Builder] = field(default_factory=dict)
    methods: dict[str, Builder] = field(default_factory=dict)
    members: dict[str, Builder] = field(default_factory=dict)

    def add(self, name: str, part: Any) -> None:
        (self.parts if isinstance(part, Builder) else self.same)[name] = part

    @property
    def is_same(self) -> bool:
        """Whether there is nothing to build."""
        return not (self.parts or self.methods or self.members)

    def build(self, assembly: Assembly) -> Any:
        new = assembly.built[id(self)] = object.__new__(self._class(assembly))  # first: its parts may refer to it
        attributes = {**self.same, **assembly.build_values(self.parts)}
        if self.methods:
            attributes |= {name: MethodType(part, new) for name, part in assembly.build_values(self.methods).items()}
        slots = slots_of(self.kind)
        if not slots:
            new.__dict__.update(attributes)
            return new
        for name, value in attributes.items():
            if name in slots:
                object.__setattr__(new, name, value)
            else:
                new.__dict__[name] = value
        return new

    def _class(self, assembly: Assembly) -> type:
        if not self.members:
            return self.kind
        namespace = {"__module__": self.kind.__module__, **assembly.build_values(self.members)}
        return type(self.kind)(self.kind.__name__, (self.kind,), namespace)


@cache
def slots_of(kind: type) -> frozenset[str]:
    """The attributes of a type that are stored in `__slots__`."""
    attributes = [item for owner in kind.__mro__ for item in vars(owner).items()]
    return frozenset(name for name, attribute in attributes if isinstance(attribute, MemberDescriptorType))


@dataclass(eq=False)
class FunctionBuilder(Builder):
    """A function by the values that it closes over, its defaults, and the globals that it reads."""

    function: Any
    cells: list[Any]
    defaults: Any
    keyword_defaults: Any
    variables: dict[str, Any]

    def build(self, assembly: Assembly) -> Any:
        old = self.function
        cells = tuple(CellType(assembly.build(cell)) for cell in self.cells)
        variables = assembly.build_values(self.variables)
        variables = {**old.__globals__, **variables} if variables else old.__globals__
        new = FunctionType(old.__code__, variables, old.__name__, assembly.build(self.defaults), cells)
        new.__kwdefaults__ = assembly.build(self.keyword_defaults)
        new.__dict__.update(old.__dict__)
        return new


@dataclass(eq=False)
class CallBuilder(Builder):
    """The result of a call `kind(*arguments, **keywords)`: a partial function, a bound method, a property."""

    kind: Any
    arguments: list[Any]
    keywords: Any

    def build(self, assembly: Assembly) -> Any:
        arguments = [assembly.build(part) for part in self.arguments]
        return self.kind(*arguments, **assembly.build(self.keywords))
