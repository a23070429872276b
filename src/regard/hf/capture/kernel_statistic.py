"""The log-sum-exp of every row, which torch's fused kernel computes beside its output and torch's function drops.

A map that has it needs no pass of its own over all keys.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from regard.attention import Prepared, scores
from regard.base.shapes import has_numbers
from regard.hf.calls import AttentionCall, Translation
from regard.pieces.grid import Grid

#: Fewest queries for which a kernel is observed: every operation inside its backend then passes through Python.
FEWEST_QUERIES = 128
#: Rows that are compared with the definition.
ROWS = 3
#: Largest difference that is rounding, relative to the log-sum-exp or to 1: in half precision, and otherwise.
HALF_TOLERANCE, TOLERANCE = 3e-2, 1e-4


class KernelStatistic(TorchDispatchMode):
    """Keeps the log-sum-exp of each call of torch's fused CPU kernel while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.logsumexps: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.logsumexps.append(output[1].detach())
        return output


def observing(call: AttentionCall) -> AbstractContextManager[KernelStatistic | None]:
    """A block in which the kernel of this call is observed, if its log-sum-exp is that of every row without a mask."""
    query = call.query
    fits = (
        call.backend == "sdpa"
        and call.mask is None
        and call.edits is None
        and isinstance(query, Tensor)
        and query.ndim == 4
    )
    if fits and query.device.type == "cpu" and query.shape[2] >= FEWEST_QUERIES and has_numbers(query):
        return KernelStatistic()
    return nullcontext()


@torch.no_grad()
def row_logsumexp(call: AttentionCall, translation: Translation) -> Tensor | None:
    """The log-sum-exp (B, H, I) that the kernel of this call returned, if a few rows equal their definition."""
    attention, logsumexp, (B, H, I, _) = translation.attention, call.logsumexp, call.query.shape
    if logsumexp is None or logsumexp.shape != (B, H, I) or attention.bias:
        return None
    softmax = attention.normalizer.as_softmax
    if softmax is None or softmax.sink is not None:
        return None
    rows = torch.linspace(0, I - 1, ROWS).round().long()
    prepared = Prepared.of(attention, translation.query, call.key, translation.positions)
    grid = Grid.whole(translation.positions, B, H, I, call.query.device)
    grid = Grid(grid.batch, grid.head, grid.query[rows], grid.key)
    exact = scores(attention, prepared.tile(rows, slice(None)), grid).logsumexp(-1)
    error = ((logsumexp[:, :, rows] - exact) / exact.abs().clamp_min(1)).abs().max()
    is_half = call.query.dtype in (torch.bfloat16, torch.float16)
    return logsumexp if error <= (HALF_TOLERANCE if is_half else TOLERANCE) else None
