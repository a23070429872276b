"""Refuses `output, weights = module(x)` where a module returns only its output, a tensor.

A tensor has a first axis, so Python would unpack a batch of two into two names without an error.
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
            instructions, place = code.co_code, frame.f_lasti + 2
            while instructions[place] in _SKIPPED or instructions[place] == _JUMP:
                place += 2 + (2 * instructions[place + 1] if instructions[place] == _JUMP else 0)
            if instructions[place] != _RETURN:
                return instructions[place] == _UNPACK and instructions[place + 1] == 2
        frame = frame.f_back
    return False
