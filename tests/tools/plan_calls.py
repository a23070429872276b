"""What the tests of kept plans share: calls, their results, and comparisons."""

from __future__ import annotations

import torch

import regard as rg
from regard.engine.kept_plans import kept_plans

LEARNED = {
    "table": lambda: rg.Attention(bias=rg.biases.LearnedTable(2, reach=3)),
    "t5": lambda: rg.Attention(bias=(rg.biases.T5Bias(2), rg.biases.Softcap(5.0))),
    "sink": lambda: rg.Attention(normalizer=rg.normalizers.LearnedSink(2)),
    "bilinear": lambda: rg.Attention(rg.scores.Bilinear(8, 8)),
    "additive": lambda: rg.Attention(rg.scores.Additive(8, 8, hidden=4)),
    "positions": lambda: rg.Attention(position=rg.encodings.LearnedPositions(32, 8)),
    "shaw": lambda: rg.Attention(bias=rg.biases.ShawBias(8, reach=3)),
}


def inputs(*sizes, heads=2, grad=False, **options):
    return [torch.randn(1, heads, n, 8, requires_grad=grad, **options) for n in sizes]


def results(attention, tensors, engine="auto", **options):
    """Output, gradients and weights of one call."""
    seen = attention(*tensors, engine=engine, **options)
    found = [seen.output, seen.weights.dense(), *seen.weights.row_statistic]
    learned = [t for t in (*tensors, *attention.parameters()) if t.requires_grad]
    if learned and torch.is_grad_enabled():
        along = torch.randn(seen.output.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        found += torch.autograd.grad(seen.output, learned, along.to(seen.output), allow_unused=True)
    return found


def anew(*given, **options):
    """The results of a call whose plan is not kept."""
    kept_plans.clear()
    return results(*given, **options)


def assert_equal(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
