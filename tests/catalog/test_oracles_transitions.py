"""Oracles of recurrent layers: modules and functions of transformers, and the recurrences of the papers in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from oracles import ORACLES, close
from regard.catalog import mechanism

FLOAT32 = 2e-5


def oracle(name: str, tolerance: float = 1e-10, **sizes: int):
    """Register `judge(q, k, v, **tensors) -> output` of an example, and make a test of it: the output and W . v."""

    def register(judge: Callable[..., Any]) -> Callable[[], None]:
        @torch.no_grad()
        def test() -> None:
            attention, q, k, v = mechanism(name).example(**sizes)
            tensors = mechanism(name).tensors(attention, q, k, v)
            seen = attention(q, k, v, **tensors)
            expected = judge(q, k, v, **tensors)
            close(seen.output, expected, tolerance)
            close(seen.weights.dense() @ v, expected, tolerance)

        test.__name__, test.__doc__ = judge.__name__, judge.__doc__
        ORACLES.setdefault(name, []).append(judge)
        return test

    return register


def by_head(recurrence: Callable[..., np.ndarray]) -> Callable[..., torch.Tensor]:
    """A recurrence of one head in NumPy, on all heads and batch entries."""

    def judge(q, k, v, **tensors):
        heads = np.ndindex(*q.shape[:2])
        outputs = [
            recurrence(*(x[b, h].numpy() for x in (q, k, v)), h, **{n: t[b, h].numpy() for n, t in tensors.items()})
            for b, h in heads
        ]
        return torch.from_numpy(np.stack(outputs)).view(*q.shape[:3], -1)

    judge.__name__, judge.__doc__ = recurrence.__name__, recurrence.__doc__
    return judge


@oracle("retnet")
def test_retnet_is_the_parallel_form_of_the_paper(q, k, v):
    """(Q K^T * D) V with q and k multiplied by e^(i n theta), eq. 5 and 8."""
    n, width = q.shape[2:]
    angles = np.arange(n)[:, None] * 10_000.0 ** -(np.arange(0, width, 2) / width)
    turned = [torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.from_numpy(np.exp(1j * angles)) for x in (q, k)]
    scores = (turned[0] @ turned[1].mH).real / width**0.5
    i, j = np.indices((n, n))
    decay = np.stack([np.where(j <= i, (1 - 2.0 ** (-5 - h)) ** np.maximum(i - j, 0), 0) for h in range(4)])
    return scores * torch.from_numpy(decay) @ v


@oracle("lightning", FLOAT32)
def test_lightning_is_the_module_of_minimax(q, k, v):
    """The module without its projections, gate and norm, in blocks of 8 tokens."""
    from transformers import MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    config = MiniMaxConfig(
        hidden_size=32, num_attention_heads=4, head_dim=8, num_hidden_layers=2, block_size=8, hidden_act="linear"
    )
    module = MiniMaxLightningAttention(config, layer_idx=0).double()
    module.qkv_proj = module.norm = module.out_proj = nn.Identity()
    module.output_gate = nn.Linear(96, 32, bias=False).double()
    nn.init.zeros_(module.output_gate.weight)  # its sigmoid is 1 / 2
    packed = torch.cat((q, k, v), -1).transpose(1, 2).flatten(2)
    output = module(packed, None, None)[0]
    return 2 * output.unflatten(-1, (4, 8)).transpose(1, 2)


@oracle("mamba_1", FLOAT32, head_dim=8)
def test_mamba_1_is_the_selective_scan_of_transformers(q, k, v, step):
    """transformers shares B and C among all channels, so each channel of the example is run alone."""
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    A = -torch.arange(1, 9).double()[None]
    channels = [
        mamba_selective_scan(v[:, h, :, 0][:, None], step[:, h, None], A, k[:, h].mT, q[:, h].mT, D=torch.ones(1))
        for h in range(4)
    ]
    return torch.stack(channels, 1).mT


@oracle("mamba_2", FLOAT32)
def test_mamba_2_is_the_chunk_scan_of_transformers(q, k, v, step):
    """In chunks of 8 tokens."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    x, B, C, dt = (x.transpose(1, 2).float() for x in (v, k, q, step))
    A = -torch.arange(1, 5).float()
    return mamba2_chunk_scan(x, dt, A, B, C, 8, D=torch.ones(4)).transpose(1, 2).double()


@oracle("gla")
@by_head
def test_gla_is_its_recurrence(q, k, v, h, log_decay):
    """S_t = Diag(alpha_t) S_{t-1} + k_t^T v_t, o_t = q_t S_t / sqrt(D): eq. 3 of the paper."""
    state, outputs = np.zeros((k.shape[1], v.shape[1])), []
    for t in range(len(k)):
        state = np.exp(log_decay[t])[:, None] * state + np.outer(k[t], v[t])
        outputs.append(q[t] @ state / np.sqrt(q.shape[1]))
    return np.stack(outputs)


@oracle("hgrn_2")
@by_head
def test_hgrn_2_is_its_recurrence(q, k, v, h, log_decay):
    """h_t = Diag(f_t) h_{t-1} + (1 - f_t) outer i_t, y_t = o_t h_t; the example's keys multiply 1 - f_t."""
    state, outputs = np.zeros((k.shape[1], v.shape[1])), []
    for t in range(len(k)):
        forget = np.exp(log_decay[t])
        state = forget[:, None] * state + np.outer((1 - forget) * k[t], v[t])
        outputs.append(q[t] @ state)
    return np.stack(outputs)


@oracle("rwkv_6")
@by_head
def test_rwkv_6_is_its_recurrence(q, k, v, h, log_decay):
    """wkv_t = S_{t-1} + diag(u) k_t^T v_t, S_t = diag(w_t) S_{t-1} + k_t^T v_t: eq. 16 of the paper, u = 1 / 2."""
    state, outputs = np.zeros((k.shape[1], v.shape[1])), []
    for t in range(len(k)):
        outer = np.outer(k[t], v[t])
        outputs.append(q[t] @ (state + 0.5 * outer))
        state = np.exp(log_decay[t])[:, None] * state + outer
    return np.stack(outputs)


@oracle("rwkv_7")
@by_head
def test_rwkv_7_is_its_recurrence(q, k, v, h, log_decay, address, rate):
    """S_t = S_{t-1} (diag(w_t) - c_t^T (a_t * c_t)) + v_t^T k_t, with the state as values by keys: eq. 17, 18, 20."""
    state, outputs = np.zeros((v.shape[1], k.shape[1])), []
    for t in range(len(k)):
        keep = np.diag(np.exp(log_decay[t])) - np.outer(address[t], rate[t] * address[t])
        state = state @ keep + np.outer(v[t], k[t])
        outputs.append(state @ q[t] + (q[t] * 0.5 * k[t]).sum() * v[t])
    return np.stack(outputs)


@oracle("deltanet")
@by_head
def test_deltanet_is_its_update_rule(q, k, v, h, beta):
    """v_old = W k, v_new = beta v + (1 - beta) v_old, W <- W - v_old k^T + v_new k^T: section 4.2 of Schlag et al."""
    q, k = (x / np.sqrt((x**2).sum(1, keepdims=True) + 1e-6) for x in (q, k))
    state, outputs = np.zeros((v.shape[1], k.shape[1])), []
    for t in range(len(k)):
        old = state @ k[t]
        new = beta[t] * v[t] + (1 - beta[t]) * old
        state = state - np.outer(old, k[t]) + np.outer(new, k[t])
        outputs.append(state @ q[t] / np.sqrt(q.shape[1]))
    return np.stack(outputs)


@oracle("gated_deltanet", FLOAT32)
def test_gated_deltanet_is_the_chunked_rule_of_qwen3_next(q, k, v, log_decay, beta):
    """transformers computes in float32."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    tensors = [x.transpose(1, 2) for x in (q, k, v, log_decay, beta)]
    return torch_chunk_gated_delta_rule(*tensors, chunk_size=8, use_qk_l2norm_in_kernel=True)[0].transpose(1, 2)


@oracle("kimi_delta", FLOAT32)
def test_kimi_delta_is_the_chunked_rule_of_kimi_linear(q, k, v, log_decay, beta):
    """transformers computes in float32."""
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

    tensors = [x.transpose(1, 2) for x in (q, k, v, log_decay, beta)]
    return chunk_kimi_delta_attention(*tensors, chunk_size=8, use_qk_l2norm_in_kernel=True)[0].transpose(1, 2)
