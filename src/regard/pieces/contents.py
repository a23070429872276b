"""What a piece consists of: the one traversal of the objects inside a piece, and what uses it.

`kind_of(type(value))` says how objects of a type come apart: `parts` are the objects inside, by name, and `build` makes
an object again from its frame and its parts. Each user asks for the parts of a piece, for their parts, and so on:

- `split_tensors`: the tensors that a piece depends on, and the piece again around other tensors. An engine that
  computes its own gradients must name every tensor that receives one; a map must keep what its scores need.
- `fingerprint`: what a kept plan depends on.
- `learned_parts`: what `HoldsPieces` registers.
- `engine/ring/digests.py` and `maps/stored.py`: what ranks compare, and what a file holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import _lru_cache_wrapper, cache, cached_property, partial
from types import CellType, FunctionType, MemberDescriptorType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.base.closures import closure_values, global_names
from regard.pieces.piece import Piece

#: The most bytes of a tensor that `tensor_snapshot` copies.
SMALL = 64 << 10
#: Objects of these types hold no tensors.
PLAIN = frozenset({int, float, complex, str, bytes, bool, type(None), type, range, slice})
#: Containers longer than this are searched for tensors only if their first item is a tensor, a module or a piece.
LONG = 256
#: Types of objects that wrap functions, and the arguments from which each is made again.
WRAPPERS: dict[type, Any] = {
    partial: lambda call: [call.func, *call.args],
    MethodType: lambda method: [method.__func__, method.__self__],
    property: lambda descriptor: [descriptor.fget, descriptor.fset, descriptor.fdel],
    staticmethod: lambda method: [method.__func__],
    classmethod: lambda method: [method.__func__],
    _lru_cache_wrapper: lambda function: [function.__wrapped__],
}
#: Attributes of a module that hold its tensors and submodules, and the other attributes that every module has.
OWNED = ("_parameters", "_buffers", "_modules")
INTERNAL = frozenset(vars(nn.Module())) - set(OWNED)
#: The attributes of a module that hold its hooks.
HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))
#: The attribute of `HoldsPieces` with the pieces whose parameters or modules are registered, by attribute.
HELD = "_held"


class Member(NamedTuple):
    """The name of a part that the class of an object holds, not the object."""

    name: str


class Kind:
    """How the objects of a type come apart. Those of this base have no parts."""

    #: Whether the object may be a part of itself, because its attributes may be assigned later.
    is_open = False
    #: Whether it never changes, tensors included.
    is_constant = False
    #: Whether parts of the object can be exchanged, so that a copy is another object even without tensors.
    is_exchanged = False

    def __init__(self, of: type) -> None:
        self.of = of

    def parts(self, value: Any) -> dict[Any, Any]:
        """The objects inside an object, by name."""
        return {}

    def frame(self, value: Any) -> Any:
        """What an object is made from, besides its parts."""
        return value

    def start(self, members: dict[str, Any]) -> Any:
        """A new object without its parts; None if it is made of them. `members`: parts of its class that are built."""

    def build(self, new: Any, frame: Any, parts: dict[Any, Any]) -> Any:
        """The object around other parts. `new` and `frame` are the results of `start` and `frame`."""
        return frame

    def is_foreign(self, value: Any) -> bool:
        """Whether it has code that is defined outside of this package and torch."""
        return False


class Container(Kind):
    """Lists, queues, dictionaries, tuples, named tuples and sets."""

    def parts(self, value: Any) -> dict[Any, Any]:
        return dict(value) if isinstance(value, dict) else dict(enumerate(value))

    def frame(self, value: Any) -> Any:
        """An empty copy, which keeps what a container has besides its items; of tuples and sets their type."""
        if isinstance(value, tuple | set | frozenset):
            return type(value)
        (empty := copy(value)).clear()
        return empty

    def build(self, new: Any, frame: Any, parts: dict[Any, Any]) -> Any:
        """Fill a copy of the empty container, or call the type of a tuple or a set; named tuples take single items."""
        if isinstance(frame, type):
            return frame(*parts.values()) if hasattr(frame, "_fields") else frame(parts.values())
        new = copy(frame)
        (new.update if isinstance(new, dict) else new.extend)(parts if isinstance(new, dict) else parts.values())
        return new


class Wrapper(Kind):
    """Partial functions, bound methods, properties, static, class and cached methods."""

    def __init__(self, of: type) -> None:
        self.of = next(kind for kind in WRAPPERS if issubclass(of, kind))

    def parts(self, value: Any) -> dict[Any, Any]:
        return dict(enumerate(WRAPPERS[self.of](value))) | getattr(value, "keywords", {})

    def frame(self, value: Any) -> Any:
        return cache if self.of is _lru_cache_wrapper else self.of

    def build(self, new: Any, frame: Any, parts: dict[Any, Any]) -> Any:
        """Call the type again: parts with a number are arguments, and those with a name keywords of a partial."""
        arguments = [part for name, part in parts.items() if not isinstance(name, str)]
        return frame(*arguments, **{name: part for name, part in parts.items() if isinstance(name, str)})


class Function(Kind):
    """Functions of the user: the values that they close over, their defaults, and the globals that they read.

    The frame is the function itself. Of its globals, those that hold tensors are parts: tensors and modules.
    """

    def parts(self, value: Any) -> dict[Any, Any]:
        """Nothing for functions of this package and of torch: only code of the user is taken apart."""
        if not self.is_foreign(value):
            return {}
        used = {name: value.__globals__.get(name) for name in global_names(value.__code__)}
        return {
            "cells": tuple(closure_values(value).values()),
            "defaults": value.__defaults__,
            "keyword defaults": value.__kwdefaults__,
            "globals": {name: part for name, part in used.items() if isinstance(part, Tensor | nn.Module)},
        }

    def build(self, new: Any, frame: Any, parts: dict[Any, Any]) -> Any:
        """A function of the same code. If it reads exchanged globals, it gets a dictionary of globals of its own."""
        variables = {**frame.__globals__, **parts["globals"]} if parts["globals"] else frame.__globals__
        cells = tuple(map(CellType, parts["cells"]))
        function = FunctionType(frame.__code__, variables, frame.__name__, parts["defaults"], cells)
        function.__kwdefaults__ = parts["keyword defaults"]
        function.__dict__.update(frame.__dict__)
        return function

    def is_foreign(self, value: Any) -> bool:
        return _is_foreign(value)


class Object(Kind):
    """Any other object: its attributes, and what its class holds if the class is the user's.

    `slots`, `names` and `members` are the names of its `__slots__`, of the fields of a dataclass, and what the class
    holds. Objects of this package that are frozen dataclasses have no parts but their fields.
    """

    def __init__(self, of: type) -> None:
        self.of = of
        attributes = [item for owner in of.__mro__ for item in vars(owner).items()]
        self.slots = frozenset(name for name, member in attributes if isinstance(member, MemberDescriptorType))
        # computed from other attributes, so they would be wrong for other tensors
        self.derived = frozenset(name for name, member in attributes if isinstance(member, cached_property))
        self.names = tuple(field.name for field in fields(of)) if is_dataclass(of) else ()
        self.is_frozen = is_dataclass(of) and getattr(of, "__dataclass_params__").frozen  # noqa: B009 - no public name
        self.is_open = not self.is_frozen
        self.is_exchanged = self.is_open and issubclass(of, Piece)
        self.members = _class_members(of) if _is_foreign(of) else {}
        self.is_ours = not _is_foreign(of)
        self.is_constant = self.is_ours and not getattr(of, "holds_parts", True)

    def parts(self, value: Any) -> dict[Any, Any]:
        """The attributes of an object that are not derived from others, by name, then what its class holds."""
        if self.is_ours and self.is_frozen:
            return {name: getattr(value, name) for name in self.names}
        attributes = getattr(value, "__dict__", {})
        own = {name: getattr(value, name) for name in (*self.names, *self.slots) if hasattr(value, name)}
        own |= {name: part for name, part in attributes.items() if name not in self.derived}
        return own | self._class_parts(attributes)

    def _class_parts(self, attributes: dict[str, Any]) -> dict[Member, Any]:
        """What the class holds, without the methods that an attribute of the object hides."""
        members = self.members.items()
        return {Member(name): part for name, part in members if name not in attributes or not _is_method(name, part)}

    def frame(self, value: Any) -> Any:
        return None

    def start(self, members: dict[str, Any]) -> Any:
        """An empty object. Methods around other tensors become its attributes; other members need a class of its own.

        An object with slots may have no attributes, so there methods are in its class too.
        """
        methods = {name: part for name, part in members.items() if _is_method(name, part) and not self.slots}
        if others := {name: part for name, part in members.items() if name not in methods}:
            # Python looks up properties and special methods in the class only
            new = object.__new__(
                type(self.of)(self.of.__name__, (self.of,), {"__module__": self.of.__module__, **others})
            )
        else:
            new = object.__new__(self.of)
        if methods:
            new.__dict__.update({name: MethodType(method, new) for name, method in methods.items()})
        return new

    def build(self, new: Any, frame: Any, parts: dict[Any, Any]) -> Any:
        """Set the attributes past `__setattr__`, which a frozen class refuses."""
        if not self.slots:
            new.__dict__.update(parts)
            return new
        for name, part in parts.items():
            if name in self.slots:
                object.__setattr__(new, name, part)
            else:
                new.__dict__[name] = part
        return new

    def is_foreign(self, value: Any) -> bool:
        return not self.is_ours


class Module(Object):
    """Modules: their parameters, buffers, submodules and other attributes, all of which can be exchanged."""

    def __init__(self, of: type) -> None:
        super().__init__(of)
        self.is_open = self.is_exchanged = True

    def parts(self, value: Any) -> dict[Any, Any]:
        """Parameters, buffers and submodules by their own names, then other attributes, then what the class holds.

        A `HoldsPieces` also registers the parameters inside its pieces. They are found in the piece, so they are left
        out here.
        """
        attributes = vars(value)
        owned = {name: part for names in OWNED for name, part in attributes[names].items()}
        own = {name: part for name, part in attributes.items() if name not in INTERNAL and name not in OWNED}
        if own.pop(HELD, None):
            owned, own = value.without_registered(owned), value.with_held(own)
        owned.update(own)
        if self.members:
            owned.update(self._class_parts(attributes))
        return owned

    def frame(self, value: Any) -> Any:
        """The attributes that every module has, and the names of its parameters, buffers and submodules, by kind."""
        attributes = vars(value)
        internal = {name: part for name, part in attributes.items() if name in INTERNAL}
        owned = {names: tuple(attributes[names]) for names in OWNED}
        if attributes.get(HELD):
            owned = {names: tuple(value.without_registered(attributes[names])) for names in OWNED}
        return internal, owned

    def build(self, new: Any, frame: Any, parts: dict[Any, Any]) -> Any:
        """The module: first the attributes that every module has, then its tensors and submodules, then all others.

        A piece that a `HoldsPieces` keeps in HELD becomes a plain attribute. So the new module does not register the
        parameters of the piece.
        """
        internal, owned = frame
        attributes = new.__dict__
        attributes.update(internal)
        for names, of_owner in owned.items():
            attributes[names] = {name: parts.pop(name) for name in of_owner}
        attributes.update(parts)
        return new


def _is_foreign(value: Any) -> bool:
    """Whether a class or a function is defined outside of this package and torch."""
    return (value.__module__ or "").partition(".")[0] not in ("regard", "torch")


def _is_method(name: str, member: Any) -> bool:
    return isinstance(member, FunctionType) and not name.startswith("__")


def _class_members(of: type) -> dict[str, Any]:
    """Functions, tensors and containers in the body of a class and of its bases, where the user wrote these classes.

    A member that a subclass overrides appears once, as the subclass has it. Of special members (`__call__`) only
    functions are listed, because Python adds others (`__annotations__`).
    """
    members: dict[str, Any] = {}
    for owner in of.__mro__:
        if _is_foreign(owner) and owner.__module__ not in ("builtins", "abc", "typing"):
            members = {**vars(owner), **members}
    functions = (FunctionType, *WRAPPERS)
    holders = (*functions, Tensor, list, tuple, dict)
    return {n: x for n, x in members.items() if isinstance(x, functions if n.startswith("__") else holders)}


@cache
def kind_of(of: type) -> Kind:
    """How objects of a type come apart. The order matters: a module, a tuple or a mask may be of two of these kinds.

    Objects that torch or a `__new__` of their own makes cannot be built from their attributes, so they have no parts.
    """
    if issubclass(of, nn.Module):
        return Module(of)
    if issubclass(of, FunctionType):
        return Function(of)
    if issubclass(of, tuple(WRAPPERS)):
        return Wrapper(of)
    if issubclass(of, tuple | list | dict | deque | set | frozenset):
        return Container(of)
    if issubclass(of, Piece):
        return Object(of)
    is_made_elsewhere = of.__new__ is not object.__new__ or of.__module__.partition(".")[0] == "torch"
    return Kind(of) if issubclass(of, Tensor) or is_made_elsewhere else Object(of)


class Place(int):
    """The number of a tensor in the list of `split_tensors`."""


class Node:
    """An object that is built again: its kind, its frame and its parts, by name.

    A part is a `Node`, a `Place`, or an object that stays as it is. `built` has the names of the nodes and places.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind, self.frame = kind, None
        self.parts: dict[Any, Any] = {}
        self.built: tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)
class PieceTemplate:
    """A piece without its tensors. `is_foreign`: some of its code is defined outside this package and torch."""

    root: Any
    is_foreign: bool

    def around(self, tensors: Iterable[Tensor]) -> Any:
        """The piece around other tensors, in the order of `split_tensors`."""
        return _built(self.root, list(tensors), {})


def _built(node: Any, tensors: list[Tensor], objects: dict[Node, Any]) -> Any:
    """The object of a `Node`, the tensor of a `Place`, and anything else as it is.

    `objects` has the objects that are already built: each node is built once. What the class of an object holds (a
    `Member`) is built before the object, which may need a class of its own for it.

    This is no local function of `around`: one that calls itself is a reference cycle, and would hold the tensors until
    the garbage collector runs.
    """
    if type(node) is Place:
        return tensors[node]
    if type(node) is not Node:
        return node
    if node not in objects:
        members = {n.name: _built(node.parts[n], tensors, objects) for n in node.built if type(n) is Member}
        if (new := node.kind.start(members)) is not None:
            objects[node] = new  # before its parts, which may refer to it
        parts = node.parts.copy()
        for name in node.built:
            if type(name) is Member:
                del parts[name]
            else:
                parts[name] = _built(node.parts[name], tensors, objects)
        objects[node] = node.kind.build(new, node.frame, parts)
    return objects[node]


class _Splitter:
    """Visits every object inside a piece once and numbers its tensors. Objects of the types `keeps` are not split."""

    def __init__(self, keeps: tuple[type, ...] = ()) -> None:
        self.tensors: list[Tensor] = []
        self.is_foreign = False
        self.keeps = keeps
        #: By id each object and its node; the object, so that it lives on and no other object gets its id.
        self._nodes: dict[int, tuple[Any, Any]] = {}

    def read(self, value: Any) -> Any:
        """A node of the value; the value itself if it holds no tensor and cannot be exchanged."""
        if type(value) in PLAIN or isinstance(value, self.keeps):
            return value
        if id(value) not in self._nodes:
            self._nodes[id(value)] = value, self._node(value)
        return self._nodes[id(value)][1]

    def _node(self, value: Any) -> Any:
        """The `Place` of a tensor, the `Node` of an object that is built again, or the value itself."""
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return Place(len(self.tensors) - 1)
        kind = kind_of(type(value))
        if kind.is_constant or (isinstance(kind, Container) and len(value) > LONG and not _may_hold_tensors(value)):
            return value
        self.is_foreign |= kind.is_foreign(value)
        # before the parts are read, because an object may be a part of itself
        node = Node(kind) if kind.is_open else value
        self._nodes[id(value)] = value, node
        parts, built = {}, []
        for name, part in kind.parts(value).items():
            read = part if type(part) in PLAIN else self.read(part)
            if type(read) in (Node, Place):
                built.append(name)
            elif type(name) is Member:
                continue  # without tensors it stays in the class
            parts[name] = read
        if not (built or kind.is_exchanged):
            return value
        node = node if kind.is_open else Node(kind)
        node.frame, node.parts, node.built = kind.frame(value), parts, tuple(built)
        return node


def _may_hold_tensors(container: Any) -> bool:
    """Whether the first item of a container that is not empty is a tensor, a module or a piece."""
    first = next(iter(container.values() if isinstance(container, dict) else container))
    return isinstance(first, Tensor | nn.Module | Piece)


def split_tensors(piece: Any) -> tuple[list[Tensor], PieceTemplate]:
    """Each tensor that a piece depends on, listed once, and the piece without them.

    >>> import torch, regard as rg
    >>> tensors, template = split_tensors(rg.biases.LearnedTable(num_heads=2, reach=3))
    >>> [tuple(t.shape) for t in tensors], template.around([torch.zeros(2, 7)]).table.sum().item()
    ([(2, 7)], 0.0)
    """
    splitter = _Splitter()
    root = splitter.read(piece)
    return splitter.tensors, PieceTemplate(root, splitter.is_foreign)


def tensors_of(piece: Any) -> list[Tensor]:
    """Each tensor that a piece depends on, listed once.

    >>> import torch, regard as rg
    >>> [tuple(t.shape) for t in tensors_of((rg.normalizers.LearnedSink(2), rg.Dot(scale=torch.tensor(0.5))))]
    [(2,), ()]
    """
    return split_tensors(piece)[0]


def with_exchanged(piece: Any, new: dict[Tensor, Tensor]) -> Any:
    """The piece with some tensors exchanged. Its modules stay the same."""
    splitter = _Splitter(keeps=(nn.Module,))
    root = splitter.read(piece)
    return PieceTemplate(root, splitter.is_foreign).around([new.get(tensor, tensor) for tensor in splitter.tensors])


def learned_parts(name: str, piece: Any) -> dict[str, nn.Parameter | nn.Module]:
    """The parameters and the modules inside a piece, each once, named by their paths: `name_attribute_0_attribute`.

    Values in the closure of a function and in the body of a class are left out: they belong to the code around them.
    """
    learned: dict[str, nn.Parameter | nn.Module] = {}
    for path, part in _learned(name, piece, []):
        while path in learned:
            path += "_"
        learned[path] = part
    return learned


def _learned(name: str, part: Any, visited: list[Any]) -> Iterator[tuple[str, nn.Parameter | nn.Module]]:
    """Each parameter and module inside the part called `name`, with its path; objects in `visited` are left out."""
    if type(part) in PLAIN or any(part is known for known in visited):
        return
    visited.append(part)
    if isinstance(part, nn.Parameter | nn.Module):
        yield name, part
        return
    kind = kind_of(type(part))
    if kind.is_constant or isinstance(kind, Function | Wrapper):
        return
    if isinstance(kind, Container) and len(part) > LONG and not _may_hold_tensors(part):
        return
    for inner, value in kind.parts(part).items():
        if type(inner) is not Member:
            yield from _learned(f"{name}_{inner}".replace(".", "_"), value, visited)


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


def autograd_records(tensors: Iterable[Tensor | None]) -> bool:
    """Whether autograd records what is computed with one of these tensors."""
    is_on = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    return is_on and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """How often each tensor was changed in place; inference tensors do not count that."""
    return [tensor._version for tensor in tensors if not tensor.is_inference()]
