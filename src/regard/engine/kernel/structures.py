"""The structures of kernels/regard.h for ctypes, field by field in the same order."""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import Structure, c_float, c_int64, c_void_p
from functools import cache
from struct import Struct as Packing
from typing import Self

import torch

from regard.base.shapes import has_numbers
from regard.engine.transforms import is_recorded

#: Numbers of kernels/regard.h.
TILE_QUERIES, PART_KEYS, MARGIN, CLIPPED_MARGIN = 96, 1024, 64, 16
#: Types of tensors that are nothing but numbers.
PLAIN = (torch.Tensor, torch.nn.Parameter)
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
    return all([_lies_in_memory(t) if is_plain and type(t) in PLAIN and t.is_cpu else has_address(t) for t in tensors])


def _lies_in_memory(tensor: torch.Tensor) -> bool:
    """`has_address` of a plain tensor of the host."""
    return tensor.layout is torch.strided and (tensor.data_ptr() != 0 or tensor.numel() == 0)


def fields_of(kind: type, names: str) -> tuple[tuple[str, type], ...]:
    """Fields of one type, by their names: "B H n".

    >>> fields_of(c_float, "scale cap")
    (('scale', <class 'ctypes.c_float'>), ('cap', <class 'ctypes.c_float'>))
    """
    return tuple((name, kind) for name in names.split())


class TensorFields(Structure):
    """`Tensor`: a tensor of four axes, in any strides."""

    _fields_ = (("data", c_void_p), ("strides", c_int64 * 4), ("dtype", c_int64))


#: `TensorFields` in one step, which takes a third of the time of its fields one by one.
TENSOR_FIELDS = Packing("@P4qq")


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

    def point(self, **tensors: torch.Tensor | None) -> None:
        """Point fields to tensors (None: null), which then live as long as the call."""
        for name, given in tensors.items():
            if given is not None:
                tensor = given.resolve_neg()  # torch may store the sign of a whole tensor beside its numbers
                place = _described(type(self)).get(name)
                if place is None:  # contiguous
                    setattr(self, name, tensor.data_ptr())
                else:
                    TENSOR_FIELDS.pack_into(self, place, tensor.data_ptr(), *tensor.stride(), DTYPES[tensor.dtype])
                self.tensors.append(tensor)


@cache
def _described(kind: type[Pointers]) -> dict[str, int]:
    """The offset of each field that describes a tensor in any strides."""
    return {name: getattr(kind, name).offset for name, field, *_ in kind._fields_ if field is TensorFields}


class KernelCall(Pointers):
    """`KernelCall`: the sizes, numbers and buffers of one call."""

    _fields_ = (
        *fields_of(c_int64, "B H G I J D E"),
        *fields_of(c_float, "scale cap"),
        *fields_of(c_int64, "low high"),
        *fields_of(c_void_p, "before after sink"),
        *fields_of(c_int64, "diagonals_stride"),
        *fields_of(c_void_p, "clipped"),
        *fields_of(c_int64, "first_clipped clipped_width"),
        *fields_of(c_void_p, "tiles segments allowed"),
        *fields_of(c_int64, "allowed_head_stride num_tiles tiles_have_entries"),
        *fields_of(c_int64, "dropped_words seed query_position key_position"),
        *fields_of(c_float, "kept_factor"),
        *fields_of(TensorFields, "query key value output"),
        *fields_of(c_void_p, "direction logsumexp packed_keys packed_values counters partials"),
        *fields_of(TensorFields, "grad_output"),
        *fields_of(c_void_p, "delta packed_value_panels packed_key_rows"),
        *fields_of(c_int64, "num_parts"),
        *fields_of(c_void_p, "grad_query grad_key grad_value grad_before grad_after grad_clipped grad_direction"),
    )
