"""Statistics that compare heads or look for wrong masks read signed weights as shares of |weight|."""

from __future__ import annotations

import torch

import regard as rg


def difference_of(masks, keys=6):
    """The difference of two softmaxes of equal scores: where both masks allow a key, the weights may cancel."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, keys, 4).double()
    return rg.combine([rg.Attention(mask=mask)(q, k, v) for mask in masks], [1.0, -1.0]).weights


def test_the_divergence_of_signed_heads_is_that_of_their_shares():
    weights = difference_of((rg.causal(), rg.causal() & rg.window(3)))
    shares = weights.dense().abs()[0, :, 4:]
    shares = shares / shares.sum(-1, keepdim=True)
    mean = shares.mean(0)
    expected = (torch.special.entr(mean) - torch.special.entr(shares).mean(0)).sum(-1).mean()
    found = rg.stats.head_divergence([weights], rows=[4, 5])
    assert expected > 0.01
    torch.testing.assert_close(found[0, 1].double(), expected, rtol=1e-5, atol=1e-6)


def test_a_negative_weight_on_the_future_is_a_leak():
    leaking = difference_of((rg.causal(), None))  # weights after the query are negative only
    assert float(leaking[0, 0, 0, 1:].max()) < 0
    assert [finding.kind for finding in rg.stats.mask_findings({"layer": leaking}, causal=True)] == ["leak"]
    real = torch.tensor([[True] * 5 + [False]])
    kinds = {finding.kind for finding in rg.stats.mask_findings({"layer": leaking}, real=real)}
    assert "padding" in kinds and "unseen" not in kinds
