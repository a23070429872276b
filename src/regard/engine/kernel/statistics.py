"""Statistics of weights by the compiled kernels: one pass over the keys, without a second product."""

from __future__ import annotations

from ctypes import c_int64, c_void_p
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from regard.engine.kernel.attention import PARTS, Inputs, Setting, pack_keys
from regard.engine.kernel.running import run, zeros
from regard.engine.kernel.structures import Pointers


class StatisticsFields(Pointers):
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
    call = inputs.call(setting)
    pack_keys(call, setting)
    call.point(logsumexp=logsumexp.float().contiguous())
    flags = None if wanted.flags is None else F.pad(wanted.flags.float(), (0, length - J)).contiguous()
    received = None if wanted.received is None else zeros(B, H, num_parts, length)
    cells = None if wanted.cells is None else zeros(B, H, num_parts, *wanted.cells.shape[2:])
    fields = StatisticsFields(num_parts=num_parts, shift=wanted.shift)
    fields.point(entropy=wanted.entropy, distance=wanted.distance, mass=wanted.mass, flags=flags)
    fields.point(received=received, cells=cells, top_weights=wanted.top_weights, top_keys=wanted.top_keys)
    fields.k = 0 if wanted.top_weights is None else wanted.top_weights.shape[-1]
    fields.cell_rows, fields.cell_columns = (0, 0) if cells is None else cells.shape[3:]
    run(setting.library, "statistics", call, setting.layout.num_pairs * H * call.D, fields)
    if received is not None and wanted.received is not None:
        wanted.received += received.sum(2)[..., :J]
    if cells is not None and wanted.cells is not None:
        wanted.cells += cells.sum(2)
