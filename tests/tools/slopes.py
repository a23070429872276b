"""Leaves, models and comparisons for the tests of gradients."""

from __future__ import annotations

import torch
from torch import nn

import regard as rg

CLOSE = {"rtol": 1e-9, "atol": 1e-10}


def inputs(n: int = 9, heads: int = 2, width: int = 4, learn: bool = True, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (3, 2, heads, n, width)
    return [t.clone().requires_grad_(learn) for t in torch.randn(shape, dtype=torch.float64, generator=generator)]


def learned(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, dtype=torch.float64, generator=generator).add(0.5).requires_grad_()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = rg.Attention(
            bias=rg.biases.T5Bias(2, num_buckets=8), mask=rg.causal(), normalizer=rg.normalizers.LearnedSink(2)
        ).double()

    def forward(self, engine, *tensors):
        return self.attention(*tensors, engine=engine).output


def agree(mine, theirs, leaves, **tolerance):
    """The same output, and the same gradients along something drawn."""
    torch.testing.assert_close(mine, theirs, **(tolerance or CLOSE))
    along = torch.randn_like(theirs)
    slopes = (torch.autograd.grad(output, leaves, along, retain_graph=True) for output in (mine, theirs))
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other, **(tolerance or CLOSE))
