"""Statistics of weights by the compiled kernels: one pass over the keys, without a second product."""

from __future__ import annotations

from ctypes import Structure, byref, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.engine.kernel.attention import PARTS, Inputs, Setting
from regard.engine.kernel.running import run


class StatisticsFields(Structure):
    """`Statistics` of kernels/statistics.c, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("entropy", "distance", "mass", "flags", "received", "cells")),
        *((name, c_void_p) for name in ("top_weights", "top_keys")),
        *((name, c_int64) for name in ("cell_rows", "cell_columns", "k", "shift", "num_parts")),
    )


@dataclass(eq=False)
class Statistics:
    """Tensors that a pass fills. The statistics that are None are left out; all others hold 0 before the pass.

    `flags` are the numbers that `mass` multiplies weights with, (B, J). `top_keys` holds -1 before the pass. `shift` is
    the position of the first key minus that of the first query.
    """

    shift: int
    entropy: Tensor | None = None  # (B, H, I)
    distance: Tensor | None = None  # (B, H, I)
    mass: Tensor | None = None  # (B, H, I)
    flags: Tensor | None = None
    received: Tensor | None = None  # (B, H, J)
    cells: Tensor | None = None  # (B, H, rows, columns)
    top_weights: Tensor | None = None  # (B, H, I, k)
    top_keys: Tensor | None = None


def add_statistics(setting: Setting, inputs: Inputs, logsumexp: Tensor, wanted: Statistics) -> None:
    """Add the statistics of all weights to the tensors of `wanted`."""
    (B, H, *_), J = inputs.query.shape, inputs.key.shape[2]
    num_parts, length = -(-PARTS // (B * H)), setting.padded(J)
    call, buffers = inputs.call(setting)
    logsumexp = logsumexp.float().contiguous()
    call.logsumexp = logsumexp.data_ptr()
    fields = StatisticsFields(num_parts=num_parts, shift=wanted.shift)
    for name in ("entropy", "distance", "mass", "top_weights", "top_keys"):
        if (tensor := getattr(wanted, name)) is not None:
            setattr(fields, name, tensor.data_ptr())
    fields.k = 0 if wanted.top_weights is None else wanted.top_weights.shape[-1]
    if wanted.flags is not None:
        flags = torch.nn.functional.pad(wanted.flags.float(), (0, length - J)).contiguous()
        buffers.append(flags)
        fields.flags = flags.data_ptr()
    received = None if wanted.received is None else torch.zeros(B, H, num_parts, length)
    cells = None if wanted.cells is None else torch.zeros(B, H, num_parts, *wanted.cells.shape[2:])
    if received is not None:
        fields.received = received.data_ptr()
    if cells is not None:
        fields.cells, (fields.cell_rows, fields.cell_columns) = cells.data_ptr(), cells.shape[3:]
    run(setting.library, "statistics", call, setting.layout.num_pairs * H * call.D, byref(fields))
    del buffers
    if received is not None and wanted.received is not None:
        wanted.received += received.sum(2)[..., :J]
    if cells is not None and wanted.cells is not None:
        wanted.cells += cells.sum(2)
