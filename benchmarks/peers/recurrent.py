"""Peers of recurrent layers: the torch code that transformers runs where the kernels of others are missing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _by_length(*tensors: Tensor) -> list[Tensor]:
    """(B, H, n, ...) -> (B, n, H, ...), the layout of transformers."""
    return [x.transpose(1, 2) for x in tensors]


def chunked_delta(*inputs: Tensor) -> Callable[..., Tensor]:
    """The gated delta rule of Qwen3-Next in chunks."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as rule

    return lambda *tensors: rule(*_by_length(*tensors), use_qk_l2norm_in_kernel=True)[0].transpose(1, 2)


def delta_by_token(*inputs: Tensor) -> Callable[..., Tensor]:
    """The gated delta rule of Qwen3-Next token by token."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule as rule

    return lambda *tensors: rule(*_by_length(*tensors), use_qk_l2norm_in_kernel=True)[0].transpose(1, 2)


def next_delta(*inputs: Tensor) -> Callable[..., Tensor]:
    """One token of Qwen3-Next from a state of ones."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule as rule

    _, heads, _, width = inputs[0].shape
    given = {"initial_state": torch.ones(1, heads, width, width), "output_final_state": True}
    return lambda *tensors: rule(*_by_length(*tensors), use_qk_l2norm_in_kernel=True, **given)[0].transpose(1, 2)


def chunked_scan(*inputs: Tensor) -> Callable[..., Tensor]:
    """The scan of Mamba-2 in chunks of 256 tokens, its usual size."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    rate = -torch.ones(inputs[2].shape[1])

    def run(c: Tensor, b: Tensor, x: Tensor, step: Tensor) -> Tensor:
        c, b, x, step = _by_length(c, b, x, step)
        return mamba2_chunk_scan(x, step, rate, b, c, 256).transpose(1, 2)

    return run
