"""Refuses `output, weights = module(x)` where a module returns only its output, a tensor.

A tensor has a first axis, so Python would unpack a batch of two into two names without an error. Also refused is
`result = module(x)` with `output, weights = result` in the next statement.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from types import FrameType

import torch
from torch import Tensor, nn

from regard.errors import RegardError

#: Instructions between a call and the use of its result that do nothing.
_SKIPPED = frozenset(dis.opmap[name] for name in ("CACHE", "NOP") if name in dis.opmap)
_UNPACK, _RETURN = dis.opmap["UNPACK_SEQUENCE"], dis.opmap["RETURN_VALUE"]
#: Behind the first branch of `module(x) if is_pair else ...`.
_JUMP = dis.opmap["JUMP_FORWARD"]
#: Instruction that gives the result a name -> instructions that read the name.
_LOADS = {
    dis.opmap[store]: frozenset(dis.opmap[load] for load in loads if load in dis.opmap)
    for store, loads in {
        "STORE_FAST": ("LOAD_FAST", "LOAD_FAST_BORROW"),
        "STORE_NAME": ("LOAD_NAME",),
        "STORE_DEREF": ("LOAD_DEREF",),
    }.items()
}
#: Both in one instruction, with the numbers of two names (Python 3.13).
_STORE_AND_LOAD = dis.opmap.get("STORE_FAST_LOAD_FAST")
#: torch's `Module.__call__` and its hooks: they return what `forward` returned.
_CALLS_FORWARD = nn.Module._call_impl.__code__.co_filename


class OutputAlone(Tensor):
    """The output of a module for a caller that unpacks it into two names. Any operation returns a plain tensor.

    >>> import torch
    >>> output = torch.zeros(2, 3).as_subclass(OutputAlone)
    >>> type(output + 1), type(output[0])
    (<class 'torch.Tensor'>, <class 'torch.Tensor'>)
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Tensor]:
        raise RegardError(
            f"This module returns only its output, a tensor of shape {tuple(self.shape)}. To get a pair, create it "
            "with MultiHeadAttention(..., return_weights=True): output, weights = module(query, key, value). To split "
            "the batch, use output.unbind()."
        )


def refuse_unpacking(output: Tensor) -> Tensor:
    """The output; a tensor that raises an error if the caller of `forward` unpacks it into two names at once."""
    if torch.compiler.is_compiling() or type(output) is not Tensor or not _is_unpacked(sys._getframe(2)):
        return output
    return output.as_subclass(OutputAlone)


def _is_unpacked(frame: FrameType | None) -> bool:
    """Whether the call that runs in `frame`, or in a caller that returns its result, is unpacked into two names."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename != _CALLS_FORWARD:
            instructions = code.co_code
            place = _after_name(instructions, _next(instructions, frame.f_lasti))
            if instructions[place] != _RETURN:
                return instructions[place] == _UNPACK and instructions[place + 1] == 2
        frame = frame.f_back
    return False


def _next(instructions: bytes, place: int) -> int:
    """The place of the next instruction that does something."""
    place += 2
    while instructions[place] in _SKIPPED or instructions[place] == _JUMP:
        place += 2 + (2 * instructions[place + 1] if instructions[place] == _JUMP else 0)
    return place


def _after_name(instructions: bytes, place: int) -> int:
    """The place after `result = ...; result`, which stores the result and loads it again; otherwise `place`."""
    operation, name = instructions[place : place + 2]
    if operation == _STORE_AND_LOAD:
        return _next(instructions, place) if name >> 4 == name & 15 else place
    after = _next(instructions, place) if operation in _LOADS else place
    is_same = after > place and instructions[after] in _LOADS[operation] and instructions[after + 1] == name
    return _next(instructions, after) if is_same else place
