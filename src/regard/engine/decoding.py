"""A few queries that attend to every key, as in decoding, without a plan: planning takes longer than the arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.base.shapes import group, in_one_dtype
from regard.engine.kernel.attention import is_few
from regard.engine.kernel.engine import can_run, few_rows_pay
from regard.engine.kernel.operator import decode as decode_by_kernel

#: Here torch's fused kernel runs without a plan, so ours is faster only from this many times as many numbers. Measured:
#: 1.2 to 1.7 times as fast from there on, as fast or slower at half as many.
AGAINST_NO_PLAN = 2


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    real: Tensor | None = None,
    added: Callable[[], Tensor | None] = lambda: None,
) -> Tensor:
    """The output (B, H, I, E) of queries that attend to all real keys, by the kernel that is measured to be faster.

    `real` (B, n) says which keys are real. `added` returns the same as a tensor that is added to scores, (B, 1, 1, J).
    """
    rows, key, value = in_one_dtype(group(query, key.shape[1]), key, value)
    if _kernel_pays(rows, key, value):
        return decode_by_kernel(query.to(key.dtype), key, value, real, scale)[0]
    mask = added()
    mask = None if mask is None else mask.to(rows.dtype)
    output = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
    return output.reshape(*query.shape[:3], value.shape[3])


def _kernel_pays(rows: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the compiled kernel computes the rows: without gradients, and where it is measured to be faster."""
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (rows, key, value))
    num_numbers = (key.numel() + value.numel()) // AGAINST_NO_PLAN
    return is_few(rows.shape[2], learns) and few_rows_pay(num_numbers, key.dtype) and can_run(rows, key, value)
