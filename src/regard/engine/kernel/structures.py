"""The structures of kernels/regard.h for ctypes, field by field in the same order."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int64, c_void_p
from functools import cache
from struct import Struct as Packing
from typing import Self

import torch

from regard.engine.transforms import is_recorded
from regard.shapes import has_numbers

#: Numbers of kernels/regard.h.
TILE_QUERIES, PART_KEYS, MARGIN, CLIPPED_MARGIN = 96, 1024, 64, 16
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


class Call(Pointers):
    """`Call`: the sizes, numbers and buffers of one call."""

    _fields_ = (
        *((name, c_int64) for name in "BHGIJDE"),
        ("scale", c_float),
        ("cap", c_float),
        ("low", c_int64),
        ("high", c_int64),
        ("before", c_void_p),
        ("after", c_void_p),
        ("sink", c_void_p),
        ("diagonals_stride", c_int64),
        ("clipped", c_void_p),
        ("first_clipped", c_int64),
        ("clipped_width", c_int64),
        ("tiles", c_void_p),
        ("segments", c_void_p),
        ("allowed", c_void_p),
        ("allowed_head_stride", c_int64),
        ("num_tiles", c_int64),
        ("tiles_have_entries", c_int64),
        *((name, c_int64) for name in ("dropped_words", "seed", "query_position", "key_position")),
        ("kept_factor", c_float),
        ("query", TensorFields),
        ("key", TensorFields),
        ("value", TensorFields),
        ("output", TensorFields),
        ("direction", c_void_p),
        ("logsumexp", c_void_p),
        ("packed_keys", c_void_p),
        ("packed_values", c_void_p),
        ("counters", c_void_p),
        ("partials", c_void_p),
        ("grad_output", TensorFields),
        ("delta", c_void_p),
        ("packed_value_panels", c_void_p),
        ("packed_key_rows", c_void_p),
        ("num_parts", c_int64),
        ("grad_query", c_void_p),
        ("grad_key", c_void_p),
        ("grad_value", c_void_p),
        ("grad_before", c_void_p),
        ("grad_after", c_void_p),
        ("grad_clipped", c_void_p),
        ("grad_direction", c_void_p),
    )
