"""Short digests of the contents of pieces (tensors, functions, objects), which ranks compare.

A constant tensor is hashed at its first call and after each change. A learned tensor is hashed once, because each step
of an optimizer changes it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from regard.base.closures import closure_values, global_names
from regard.pieces.contents import Module, Wrapper, kind_of

#: Words of 8 bytes that are hashed at a time.
CHUNK = 1 << 20
#: Odd constants of 64 bits, as signed integers.
FIRST, SECOND = 0x9E3779B97F4A7C15 - (1 << 64), 0xC2B2AE3D27D4EB4F - (1 << 64)
#: Types whose repr is complete.
SIMPLE = bool | int | float | complex | str | bytes | None | torch.dtype | type | range | slice
#: A longer collection counts as hidden, since a repr may shorten it.
SHORT = 8

#: The digests of constant tensors, each with the version and the address of the tensor when it was computed.
_known: Any = WeakTensorKeyDictionary()


def words(piece: Any) -> str:
    """The repr of a piece without addresses in memory, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(piece))


def digest(text: str) -> str:
    """A hash of a text, eight characters long."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass(eq=False)
class Contents:
    """The contents of an object: `text` describes it, `learned` are its tensors that require gradients.

    `hidden`: the repr of the object does not show all of its constant contents, so ranks compare the digest too.

    >>> same = [Contents.of(lambda i, n=n: i + n) for n in (1, 1, 2)]
    >>> same[0].digest == same[1].digest, same[0].digest == same[2].digest
    (True, False)
    """

    text: list[str] = field(default_factory=list)
    learned: list[Tensor] = field(default_factory=list)
    hidden: bool = False
    #: Objects that were read, each by its id and the `_names` of that time: its number, and itself, to keep the id.
    _before: dict[tuple[int, frozenset[str] | None], tuple[int, Any]] = field(default_factory=dict)
    #: Names that the current function uses; None: outside of functions.
    _names: frozenset[str] | None = None

    @staticmethod
    def of(thing: Any) -> Contents:
        """The contents of an object and of everything in it."""
        contents = Contents()
        contents.read(thing)
        return contents

    @property
    def digest(self) -> str:
        """The digest of everything except the learned tensors."""
        return digest(" ".join(self.text))

    @property
    def learned_digest(self) -> str:
        """The digest of the numbers of the learned tensors."""
        return digest(" ".join(str(tensor_digest(t)) for t in self.learned))

    def read(self, thing: Any) -> None:
        """Read one object and everything in it. A function or object that was read before adds only its number."""
        if isinstance(thing, SIMPLE):
            self.text.append(words(thing))
        elif isinstance(thing, Tensor | list | tuple | set | frozenset):
            self.text.append(type(thing).__qualname__)
            self._read_inside(thing)
        elif (key := (id(thing), self._names)) in self._before:
            self.text.append(f"#{self._before[key][0]}")
        else:
            self._before[key] = len(self._before), thing
            self.text.append(type(thing).__qualname__)
            self._read_inside(thing)

    def _read_inside(self, thing: Any) -> None:
        """Read the numbers of a tensor, the code and the values of a function, and the parts of any other object.

        Parts are read in an order that is the same on all ranks. `hidden` is set where the repr does not show them.
        """
        kind = kind_of(type(thing))
        if isinstance(thing, Tensor):
            self._read_tensor(thing)
        elif isinstance(thing, torch.device):  # ranks have devices of their own
            self.text.append(thing.type)
        elif isinstance(thing, ModuleType):
            self.text.append(thing.__name__)
        elif isinstance(kind, Module):
            public = {n: part for n, part in kind.parts(thing).items() if isinstance(n, str) and n[0] != "_"}
            attributes = {name: public.pop(name) for name in vars(thing) if name in public}
            self._read_all([public, self._used(thing, attributes)])  # first parameters, buffers and submodules
        elif isinstance(kind, Wrapper):
            self._read_all(part for each in kind.parts(thing).items() for part in each)
        elif isinstance(thing, CodeType | FunctionType):
            self.hidden = True
            self._read_function(thing)
        elif isinstance(thing, Mapping):
            self._read_all(part for name in sorted(thing, key=words) for part in (name, thing[name]))
        elif isinstance(thing, list | tuple):
            self.hidden |= len(thing) > SHORT
            self._read_all(thing)
        elif isinstance(thing, set | frozenset):
            self._read_all(sorted(thing, key=words))
        elif dataclasses.is_dataclass(thing):
            self._read_object(thing, {each.name: getattr(thing, each.name) for each in dataclasses.fields(thing)})
        elif hasattr(thing, "__array__"):
            self._read_tensor(torch.as_tensor(thing))
        elif isinstance(held := getattr(thing, "__dict__", None), dict):
            self.hidden = True
            self._read_object(thing, held)
        else:
            self.text.append(words(thing))

    def _read_all(self, things: Iterable[Any]) -> None:
        for thing in things:
            self.read(thing)

    def _read_tensor(self, tensor: Tensor) -> None:
        """Read the shape and dtype of a tensor, and the digest of its numbers; a learned tensor is only listed."""
        self.text.append(f"{tuple(tensor.shape)} {tensor.dtype}")
        if tensor.is_meta or hasattr(tensor, "full_tensor"):  # no values, or those of one rank alone
            return
        if tensor.requires_grad:
            self.learned.append(tensor)
            return
        self.hidden = True
        self.text.append(str(_remembered(tensor)))

    def _read_function(self, function: Any) -> None:
        """A function by its code, defaults, closure and the globals that it, or a function inside of it, names.

        The code of functions defined inside of it is among the constants of its code, and is read as code alone.
        """
        if isinstance(function, CodeType):
            self._read_all((function.co_code, function.co_names, function.co_consts))
        else:
            code = function.__code__
            # while the function is read, objects show the fields that it, or a function around it, names
            before, self._names = self._names, (self._names or frozenset()) | {*global_names(code)}
            named = {name: _near(function.__globals__.get(name), function) for name in global_names(code)}
            cells = [_near(value, function) for value in closure_values(function).values()]
            self._read_all((code, function.__defaults__, function.__kwdefaults__, cells, named))
            self._names = before

    def _read_object(self, thing: Any, fields: Mapping[str, Any]) -> None:
        """Read the `__call__` of an object and its fields; inside a function only the fields that the function uses."""
        call = type(thing).__call__ if callable(thing) else None
        before = self._names
        if isinstance(call, FunctionType):
            self._names = (before or frozenset()) | {*global_names(call.__code__)}
            self.read(call)
        self.read(self._used(thing, fields))
        self._names = before

    def _used(self, thing: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields and methods of an object that the function being read uses; outside of functions all fields.

        Other fields, such as a rank or a device, may differ between ranks.
        """
        if self._names is None:
            return dict(fields)
        methods: dict[str, FunctionType] = {}
        names, new = self._names, self._names
        while new:
            more = {
                name: method for name in new if isinstance(method := getattr(type(thing), name, None), FunctionType)
            }
            methods |= more
            new = frozenset().union(*(global_names(method.__code__) for method in more.values())) - names
            names |= new
        return methods | {name: value for name, value in fields.items() if name in names}


def _near(thing: Any, function: FunctionType) -> Any:
    """A value that a function uses; for a function of another module its name, since all ranks import the same one."""
    if isinstance(thing, FunctionType) and thing.__module__ != function.__module__:
        return f"{thing.__module__}.{thing.__qualname__}"
    return thing


def _remembered(tensor: Tensor) -> int:
    """The digest of a constant tensor, computed again only after a change.

    Each change in place counts up the version of a tensor. Inference tensors have none, and are always read.
    """
    state = (0 if tensor.is_inference() else tensor._version, tensor.data_ptr())
    before = _known.get(tensor)
    if before is None or before[0] != state or tensor.is_inference():
        _known[tensor] = before = (state, tensor_digest(tensor))
    return before[1]


@torch.no_grad()
def tensor_digest(tensor: Tensor) -> int:
    """A hash of 64 bits over all bytes and their positions, computed on the device of the tensor.

    Each word of 8 bytes is mixed with its place, so the sum of all words depends on their order. Shape and dtype are
    not part of the hash, nor is the number of zero bytes that end the last word.

    >>> one, other = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    >>> tensor_digest(one) == tensor_digest(one.clone()), tensor_digest(one) == tensor_digest(other)
    (True, False)
    """
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for number, part in enumerate(data.split(8 * CHUNK)):
        mixed = torch.nn.functional.pad(part, (0, -len(part) % 8)).view(torch.int64)
        place = torch.arange(len(mixed), device=data.device) + (number * CHUNK + 1)
        mixed = place.mul_(FIRST).bitwise_xor_(mixed).mul_(SECOND)
        mixed = mixed.bitwise_xor_(mixed >> 29).mul_(FIRST)
        total += mixed.sum()
    return int(total)
