"""Attention by the compiled kernels, with its gradients: the call of the library, and its place in autograd."""

from __future__ import annotations

from ctypes import byref, c_int64
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.engine.kernel.layout import Layout
from regard.engine.kernel.library import Library
from regard.engine.kernel.running import run
from regard.engine.kernel.structures import MARGIN, Call, TensorFields

#: Lanes of a vector at each level of the library.
LANES = {"baseline": 4, "avx2": 8, "avx512": 16}
#: Fewest parts of the backward pass. Each has its own sums for the keys, so their number must not depend on threads.
PARTS = 8


@dataclass(eq=False)
class Setting:
    """What a call has besides its tensors: the library, the mask, the factor of the scores and the soft cap (0: none)."""

    library: Library
    layout: Layout
    scale: float
    cap: float

    def __post_init__(self) -> None:
        self.tables = self.layout.tables()

    @property
    def lanes(self) -> int:
        return LANES[self.library.level_name]


class KernelAttention(torch.autograd.Function):
    """softmax(after + cap(scale q.k + before)) v and the log-sum-exp of its rows.

    `before` and `after` have a number for each head and distance of indices, (H, I + J - 1); `sink` one for each head.
    """

    @staticmethod
    def forward(
        ctx: Any,
        setting: Setting,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        before: Tensor | None,
        after: Tensor | None,
        sink: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        numbers = [None if t is None else t.detach().float() for t in (before, after, sink)]
        output, logsumexp = _forward(setting, query.detach(), key.detach(), value.detach(), *numbers)
        ctx.setting = setting
        ctx.save_for_backward(query, key, value, before, after, sink, output, logsumexp)
        ctx.mark_non_differentiable(logsumexp)
        return output, logsumexp

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, before, after, sink, output, logsumexp = ctx.saved_tensors
        delta = (grad.float() * output.float()).sum(-1)
        needs = ctx.needs_input_grad[1:]
        numbers = [None if t is None else t.float() for t in (before, after, sink)]
        grads = _backward(ctx.setting, grad, delta, logsumexp, needs, query, key, value, *numbers)
        for_sink = None
        if needs[5]:
            share = torch.exp(sink.float()[:, None] - logsumexp)
            for_sink = -(share * delta).sum((0, 2)).to(sink.dtype)
        return None, *grads, for_sink


def _forward(
    setting: Setting,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    before: Tensor | None,
    after: Tensor | None,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    sizes = setting.layout.sizes
    B, H, I, E = sizes.B, sizes.H, sizes.I, value.shape[-1]
    output, logsumexp = value.new_empty(B, H, I, E), torch.empty(B, H, I)
    call, kept = _call(setting, query, key, value, before, after, sink)
    call.output, call.logsumexp = TensorFields.of(output), logsumexp.data_ptr()
    values = _packed(sizes.B * sizes.G, _up(sizes.J, 2 * setting.lanes), _up(E, setting.lanes))
    call.packed_values = values.data_ptr()
    run(setting.library, "forward", call, setting.layout.num_pairs * H * (call.D + E))
    del kept
    return output, logsumexp


def _backward(
    setting: Setting,
    grad: Tensor,
    delta: Tensor,
    logsumexp: Tensor,
    needs: tuple[bool, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    before: Tensor | None,
    after: Tensor | None,
    sink: Tensor | None,
) -> list[Tensor | None]:
    """Gradients of query, key, value, before and after."""
    B, H, I, D = query.shape
    G, J, E = value.shape[1:]
    call, kept = _call(setting, query, key, value, before, after, sink)
    length, lanes = _up(J, 2 * setting.lanes), setting.lanes
    panels, rows = _packed(B * G, length, E), _packed(B * G, length, _up(D, lanes))
    parts = -(-PARTS // (B * G))
    function = setting.library.function("backward_length")
    function.restype = c_int64
    num_keys = function(byref(call))
    for_query = torch.zeros(B, H, I, D)
    for_key, for_value = (torch.zeros(B, G, parts, num_keys, _up(width, lanes)) for width in (D, E))
    diagonals = torch.zeros(2, B, H, parts, I + J - 1 + 2 * MARGIN) if needs[3] or needs[4] else None
    call.grad_output, call.delta, call.logsumexp = TensorFields.of(grad), delta.data_ptr(), logsumexp.data_ptr()
    call.packed_value_panels, call.packed_key_rows, call.num_parts = panels.data_ptr(), rows.data_ptr(), parts
    call.grad_query, call.grad_key, call.grad_value = (t.data_ptr() for t in (for_query, for_key, for_value))
    call.grad_before = diagonals[0].data_ptr() if diagonals is not None and needs[3] else None
    call.grad_after = diagonals[1].data_ptr() if diagonals is not None and needs[4] else None
    run(setting.library, "backward", call, setting.layout.num_pairs * H * (3 * D + 2 * E))
    del kept
    grads: list[Tensor | None] = [
        for_query.to(query.dtype),
        for_key.sum(2)[:, :, :J, :D].to(key.dtype),
        for_value.sum(2)[:, :, :J, :E].to(value.dtype),
    ]
    for number, summand in enumerate((before, after)):
        is_wanted = needs[3 + number] and diagonals is not None and summand is not None
        grads.append(diagonals[number, ..., MARGIN:-MARGIN].sum((0, 2)).to(summand.dtype) if is_wanted else None)
    return grads


def _call(
    setting: Setting,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    before: Tensor | None,
    after: Tensor | None,
    sink: Tensor | None,
) -> tuple[Call, list[Tensor]]:
    """The fields of both directions, and the buffers that must live as long as the call."""
    (B, H, I, D), (G, J, E) = query.shape, value.shape[1:]
    layout, (tiles, segments, allowed) = setting.layout, setting.tables
    keys = _packed(B * G, _up(J, 2 * setting.lanes), D)
    counters = torch.zeros(8, dtype=torch.int64)
    summands = [None if t is None else torch.nn.functional.pad(t, (MARGIN, MARGIN)) for t in (before, after)]
    sink = None if sink is None else sink.contiguous()
    call = Call(B, H, G, I, J, D, E, setting.scale, setting.cap, layout.low, layout.high)
    call.before, call.after = (None if t is None else t[:, MARGIN:].data_ptr() for t in summands)
    call.sink = None if sink is None else sink.data_ptr()
    call.diagonals_stride = I + J - 1 + 2 * MARGIN
    call.tiles, call.segments, call.allowed = tiles.data_ptr(), segments.data_ptr(), allowed.data_ptr()
    call.allowed_head_stride = allowed.shape[1] if len(allowed) > 1 else 0
    call.num_tiles, call.tiles_have_entries = len(tiles), layout.has_entries
    call.query, call.key, call.value = (TensorFields.of(t) for t in (query, key, value))
    call.packed_keys, call.counters = keys.data_ptr(), counters.data_ptr()
    return call, [keys, counters, *(t for t in (*summands, sink) if t is not None)]


def _packed(*shape: int) -> Tensor:
    return torch.empty(shape)


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
