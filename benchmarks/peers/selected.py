"""Peers of selected keys: the formulas of the papers with a dense mask, as the eager code of models computes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def moba(size: int, k: int, *inputs: Tensor) -> Callable[..., Tensor]:
    """Blocks by their mean keys, scattered into a mask of all pairs, for one call of the fused kernel."""

    def run(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        n = q.shape[2]
        token, block = torch.arange(n, device=q.device), torch.arange(n // size, device=q.device)
        means = keys.unflatten(2, (-1, size)).mean(3).repeat_interleave(q.shape[1] // keys.shape[1], 1)
        gates = (q @ means.mT).masked_fill(block > token[:, None] // size, -torch.inf)
        gates = gates.masked_fill(block == token[:, None] // size, torch.inf)
        chosen = torch.zeros_like(gates, dtype=torch.bool).scatter_(3, gates.topk(k).indices, True)
        allowed = chosen.repeat_interleave(size, 3) & (token <= token[:, None])
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=allowed, enable_gqa=True)

    return run


def indexer(k: int, *inputs: Tensor) -> Callable[..., Tensor]:
    """The indexer of DeepSeek-V3.2 as its eager code: all scores, topk, a mask of all pairs, softmax."""

    def run(q: Tensor, keys: Tensor, values: Tensor, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = ((x @ y.mT).relu() * weights.transpose(1, 2)[..., None]).sum(1).masked_fill(later, -torch.inf)
        chosen = torch.zeros_like(later[None]).scatter(2, scores.topk(k).indices, True) & ~later
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=chosen[:, None], enable_gqa=True)

    return run
