"""The structures of kernels/ for ctypes; `layouts.py` has their fields, which `make kernels` reads from the sources."""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import Structure, addressof, c_float, c_int64, c_void_p
from functools import cache
from struct import Struct as Packing
from typing import Any, Self

import torch

from regard.base.shapes import has_numbers
from regard.engine.kernel.layouts import LAYOUTS
from regard.engine.transforms import is_recorded

#: Types of tensors that are nothing but numbers.
PLAIN = (torch.Tensor, torch.nn.Parameter)
#: The dtypes that the kernels read, by their numbers in kernels/regard.h.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def has_address(tensor: torch.Tensor) -> bool:
    """Whether the numbers of a tensor lie in memory at its strides, and a kernel may compute with them.

    They do not if the tensor is fake, or wraps other tensors. A kernel may not if torch records operations.
    """
    if not has_numbers(tensor) or tensor.layout is not torch.strided or is_recorded():
        return False
    try:
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:
        return False


def have_addresses(tensors: Iterable[torch.Tensor]) -> bool:
    """`has_address` of all tensors; what holds for the whole call is asked once."""
    if torch.compiler.is_compiling() or is_recorded():
        return False
    is_plain = not torch._C._are_functorch_transforms_active()
    return all([lies_in_memory(t) if is_plain and type(t) in PLAIN and t.is_cpu else has_address(t) for t in tensors])


def lies_in_memory(tensor: torch.Tensor) -> bool:
    """`has_address` of a plain tensor of the host."""
    return tensor.layout is torch.strided and (tensor.data_ptr() != 0 or tensor.numel() == 0)


class TensorFields(Structure):
    """`Tensor`: a tensor of four axes, in any strides."""

    _fields_ = (("data", c_void_p), ("strides", c_int64 * 4), ("dtype", c_int64))


#: The types of fields in C.
TYPES: dict[str, Any] = {"pointer": c_void_p, "int64_t": c_int64, "float": c_float, "Tensor": TensorFields}


def fields_of(structure: str) -> tuple[tuple[str, Any], ...]:
    """The fields of a structure of the kernels, by their names and types.

    >>> [name for name, _ in fields_of("Similarity")]
    ['queries', 'ordinary', 'products', 'received', 'num_parts']
    """
    return tuple((name, TYPES[kind]) for kind, names in LAYOUTS[structure] for name in names.split())


#: `TensorFields` in one step, which takes a third of the time of its fields one by one: an address, strides, a dtype.
TENSOR_FIELDS = Packing("@P4qq")
#: The same for several fields side by side, by their number.
SIDE_BY_SIDE = {count: Packing("@" + count * "P4qq") for count in (4, 6)}
#: The numbers of a field that has no tensor.
NO_TENSOR = (0,) * 6


class Pointers(Structure):
    """A structure with pointers into tensors, which it keeps alive."""

    #: What the fields point into. A thread that still computes when its caller is interrupted keeps the call alive.
    tensors: list[torch.Tensor]

    def __init__(self, *numbers: float, **named: float) -> None:
        super().__init__(*numbers, **named)
        self.tensors = []

    def copy(self) -> Self:
        """Another structure with the same fields, which keeps the same tensors alive."""
        other = type(self).from_buffer_copy(self)
        other.tensors = [*self.tensors]
        return other

    def count(self, num_counters: int) -> None:
        """Point `counters` to counters of units of work, 0 at the start, which live as long as the call."""
        self.units = (c_int64 * num_counters)()
        self.counters = addressof(self.units)

    def place(self, memory: torch.Tensor, places: Iterable[tuple[str, int]]) -> int:
        """Point fields into one block of memory, and return the address of the block.

        `places` has the name of each field and its offset in bytes. The block lives as long as the call.
        """
        address = memory.data_ptr()
        for name, offset in places:
            setattr(self, name, address + offset)
        self.tensors.append(memory)
        return address

    def point(self, **tensors: torch.Tensor | None) -> None:
        """Point fields to tensors (None: null), which then live as long as the call.

        Fields that describe a tensor take any strides. For all others the kernel expects the layout that it documents,
        most often contiguous.
        """
        for name, value in tensors.items():
            if value is not None:
                tensor = value.resolve_neg()  # torch may store the sign of a whole tensor beside its numbers
                place = _described(type(self)).get(name)
                if place is None:  # a pointer alone
                    setattr(self, name, tensor.data_ptr())
                else:
                    TENSOR_FIELDS.pack_into(self, place, tensor.data_ptr(), *tensor.stride(), DTYPES[tensor.dtype])
                self.tensors.append(tensor)

    def point_in_order(self, first: str, *tensors: torch.Tensor | None) -> None:
        """`point` in one step for tensors whose fields lie side by side, from the field `first` on."""
        numbers: list[int] = []
        for t in tensors:
            numbers += NO_TENSOR if t is None else (t.data_ptr(), *t.stride(), DTYPES[t.dtype])
        SIDE_BY_SIDE[len(tensors)].pack_into(self, _described(type(self))[first], *numbers)
        self.tensors += [t for t in tensors if t is not None]


@cache
def _described(kind: type[Pointers]) -> dict[str, int]:
    """The offset of each field that describes a tensor in any strides."""
    return {name: getattr(kind, name).offset for name, field, *_ in kind._fields_ if field is TensorFields}


class KernelCall(Pointers):
    """`KernelCall`: the sizes, numbers and buffers of one call."""

    _fields_ = fields_of("Call")
