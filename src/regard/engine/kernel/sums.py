"""Causal linear attention by the compiled kernels: averages over earlier keys, with their gradients.

The gradients are sums of the same form, so one function of the library computes them all: those of queries with the
gradient, values and keys in place of queries, keys and values; those of keys and values with time reversed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from regard.engine.kernel.library import Library, load
from regard.engine.kernel.running import empty, run
from regard.engine.kernel.structures import Pointers, fields_of, has_address
from regard.engine.transforms import is_transformed

#: Threads for each key head from which torch is faster: a key head is computed by one thread.
MOST_THREADS_PER_HEAD = 2


class Sums(Pointers):
    """`Sums` of kernels/sums.c."""

    _fields_ = fields_of("Sums")

    def reverse_time(self) -> None:
        """Read and write the last token first, in 4-byte numbers: point to the last token, with negative strides."""
        for name in ("query", "key", "value", "output"):
            tensor = getattr(self, name)
            tensor.data = (tensor.data or 0) + 4 * (self.n - 1) * tensor.strides[2]
            tensor.strides[2] = -tensor.strides[2]


def compiled_sums(query: Tensor, key: Tensor, value: Tensor, past: Tensor) -> Library | None:
    """The library, if it computes these averages faster than torch; else None. Shapes as in `CompiledAverages`."""
    tensors = query, key, value, past
    if is_transformed() or torch.get_num_threads() > MOST_THREADS_PER_HEAD * key.shape[0] * key.shape[1]:
        return None
    fit = all(t.dtype == torch.float32 and t.device.type == "cpu" and has_address(t) for t in tensors)
    return load() if fit else None


class CompiledAverages(torch.autograd.Function):
    """Averages of the values of keys j <= i with the weights query_i . key_j, and the state after all tokens.

    query (B, H, n, W), key (B, G, n, W), value (B, G, n, E), all in float32. `past` (B, G, W, E + 1) is the state after
    earlier tokens: sums of key_j [value_j, 1]. Returns the averages (B, H, n, E), their denominators (B, H, n), without
    gradients, and the state, shaped as `past`. An average whose denominator is 0 is 0. The linear engine calls this.
    """

    @staticmethod
    def forward(
        ctx: Any, library: Library, query: Tensor, key: Tensor, value: Tensor, past: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        output, denominators = empty(*query.shape[:3], value.shape[3]), empty(*query.shape[:3])
        state = _sums(library, query, key, value, past, output, denominators)
        ctx.library = library
        ctx.save_for_backward(query, key, value, past, output, denominators)
        ctx.mark_non_differentiable(denominators)
        return output, denominators, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
        """From the gradients of the averages and of the last state.

        With g the gradient of the sums: dq_i = sum_{j <= i} (g_i . v_j) k_j, dk_j = sum_{i >= j} (v_j . g_i) q_i,
        dv_j = sum_{i >= j} (k_j . q_i) g_i; and the state before or the gradient of the state after adds its part.
        """
        query, key, value, past, output, denominators = ctx.saved_tensors
        grad, with_ones = sum_gradients(grad, output, denominators[..., None]), F.pad(value, (0, 1), value=1.0)
        grad_query = empty(*query.shape)
        _sums(ctx.library, grad, with_ones, key, past.mT, grad_query)
        num_shared, later, totals = query.shape[1] // key.shape[1], grad_state, None
        for shared in range(num_shared):  # each time one query head of every key head
            queries, grads = query[:, shared::num_shared], grad[:, shared::num_shared]
            grad_key, grad_value = empty(*key.shape), empty(*with_ones.shape)
            _sums(ctx.library, with_ones, grads, queries, later.mT, grad_key, is_reversed=True)
            grad_past = _sums(ctx.library, key, queries, grads, later, grad_value, is_reversed=True)
            parts = [grad_key, grad_value, grad_past]
            totals = parts if totals is None else [t.add_(part) for t, part in zip(totals, parts, strict=True)]
            later = torch.zeros_like(grad_state)  # the gradient of the state after all tokens counts once
        assert totals is not None, "there is a query head"
        return None, grad_query, totals[0], totals[1][..., : value.shape[3]], totals[2]


def sum_gradients(grad: Tensor, averages: Tensor, denominators: Tensor) -> Tensor:
    """Gradients (..., E + 1) of the sums of values and, last, of the sum of ones, from that of their quotients.

    `grad` and `averages` are (..., E), `denominators` (..., 1). An average over nothing is 0 for any sums.
    """
    is_zero = denominators == 0
    of_values = grad / denominators.masked_fill(is_zero, 1.0)
    of_ones = -(of_values * averages).sum(-1, keepdim=True).masked_fill(is_zero, 0.0)
    return torch.cat((of_values, of_ones), -1)


def _sums(
    library: Library,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past: Tensor,
    output: Tensor,
    denominators: Tensor | None = None,
    is_reversed: bool = False,
) -> Tensor:
    """Fill `output`: sums over j <= i (reversed: j >= i) of (query_i . key_j) value_j, plus query_i past.

    query (B, H, n, W), key (B, G, n, W), value (B, G, n, E), past (B, G, W, E), output (B, H, n, E).
    With `denominators` (B, H, n) the kernel gives values one more channel, of ones: its sums fill the denominators, the
    output is divided by them, and `past` is (B, G, W, E + 1). Returns the state after all tokens, shaped as `past`.
    """
    (B, H, n, W), G, E = query.shape, key.shape[1], value.shape[3]
    call, state = Sums(B, H, G, n, W, E, denominators is not None), past.clone(memory_format=torch.contiguous_format)
    call.point(query=query, key=key, value=value, output=output, denominators=denominators, state=state)
    call.count(1)  # the counter from which threads take key heads
    if is_reversed:
        call.reverse_time()
    run(library, "sums", call, 3 * B * H * n * W * E)
    return state
