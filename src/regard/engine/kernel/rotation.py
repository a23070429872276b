"""Rotary positions by the compiled kernels: one pass over queries or keys, forward and backward.

torch needs about ten passes. Rotation is linear and its transpose turns backwards, so it has derivatives of any order.
`RoPE.encode` is in a lower layer and cannot import this file, so this file hands the rotation to it (`rotate_by`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.engine.kernel.library import Library, load
from regard.engine.kernel.running import run
from regard.engine.kernel.structures import DTYPES, Pointers, fields_of, has_address
from regard.engine.transforms import is_transformed
from regard.pieces import position

#: Multiply-adds that take as long as reading and writing a float.
PER_FLOAT = 24


class Rotation(Pointers):
    """`Rotation` of kernels/rotate.c."""

    _fields_ = fields_of("Rotation")


class Rotated(torch.autograd.Function):
    """Vectors (B, H, n, D) turned by their positions (n,); `direction` -1 turns backwards.

    `frequencies` are in units of 2^-64 of a turn. Channels 2 d and 2 d + 1 turn together if `interleaved`, else the
    channels d and d + the number of frequencies; channels beyond all pairs stay.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, library: Library, positions: Tensor, frequencies: Tensor, interleaved: bool, direction: int
    ) -> Tensor:
        ctx.settings = library, positions, frequencies, interleaved, -direction
        output = torch.empty(x.shape, dtype=x.dtype, device="cpu")
        call = Rotation(*x.shape, len(frequencies), interleaved, direction)
        call.point(vectors=x, output=output, positions=positions, frequencies=frequencies)
        call.count(1)
        run(library, "rotate", call, PER_FLOAT * x.numel())
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return Rotated.apply(grad, *ctx.settings), None, None, None, None, None  # type: ignore[return-value]


def rotated(x: Tensor, positions: Tensor, turns: Callable[[], Tensor], interleaved: bool) -> Tensor | None:
    """`x` rotated as `RoPE.encode` does, or None where the kernels cannot.

    `x` is (B, H, n, D), and `positions` are integers (n,). `turns` returns the frequencies as integers in units of
    2^-64 of a turn, on the host. `interleaved`: pairs of channels are neighbors, else in different halves.
    """
    if torch.compiler.is_compiling():  # a graph cannot hold the call
        return None
    library = load()
    if library is None or is_transformed() or x.dtype not in DTYPES or x.ndim != 4:
        return None
    if positions.shape != x.shape[2:3] or positions.is_floating_point():
        return None
    if not all(t.device.type == "cpu" and has_address(t) for t in (x, positions)):
        return None
    return Rotated.apply(x, library, positions.long().contiguous(), turns(), interleaved, 1)  # type: ignore[return-value]


position.rotate_by(rotated)
