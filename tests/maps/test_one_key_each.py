"""Weights of one key for each query: the diagonals and gathers of the dense map."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard import RegardError

B, H, I, J, D = 2, 3, 7, 11, 4


def maps():
    torch.manual_seed(0)
    q, k, v = torch.randn(B, H, I, D).double(), torch.randn(B, H, J, D).double(), torch.randn(B, H, J, D).double()
    x = torch.randn(B, H, J, D).double()
    causal = rg.Attention(mask=rg.causal())(q, k, v).weights
    return {
        "after a cache": causal,
        "no mask": rg.Attention()(q, k, v).weights,
        "window": rg.Attention(mask=rg.causal() & rg.window(3))(x, x, x).weights,
        "selected": rg.Attention()(q, k, v).weights.select([1, 1], [2, 0]),
        "shares": causal.shares(),
        "one query": rg.Attention()(q[:, :, :1], k, v).weights,
        "no query": rg.Attention()(q[:, :, :0], k, v).weights,
    }


@pytest.mark.parametrize("name", maps())
def test_a_diagonal_is_that_of_the_dense_map(name):
    weights = maps()[name]
    dense, (_, _, num_queries, num_keys) = weights.dense(), weights.shape
    for offset in range(-J - 1, J + 1):
        found = weights.at_offset(offset)
        assert found.shape == weights.shape[:3] and found.dtype == weights.dtype
        for i in range(num_queries):
            key = i + num_keys - num_queries + offset
            expected = dense[:, :, i, key] if 0 <= key < num_keys else torch.zeros_like(dense[:, :, i, 0])
            torch.testing.assert_close(found[:, :, i], expected)


@pytest.mark.parametrize("name", maps())
def test_keys_of_each_query_and_each_batch_entry(name):
    weights = maps()[name]
    entries, _, num_queries, num_keys = weights.shape
    for rows in (1, entries):
        keys = torch.randint(-1, num_keys, (rows, num_queries))
        found = weights.at_keys(keys)
        chosen = keys.clamp_min(0)[:, None, :, None].expand(entries, weights.shape[1], -1, -1)
        expected = weights.dense().gather(3, chosen)[..., 0].where(keys[:, None] >= 0, 0.0)
        torch.testing.assert_close(found, expected)


def test_a_long_map_is_read_in_blocks_and_within_no_budget_of_all(monkeypatch):
    monkeypatch.setattr("regard.maps.attention_map.TILE", (4, 4))
    weights = rg.Attention(mask=rg.causal())(*torch.randn(3, 1, 2, 33, D)).weights
    torch.testing.assert_close(weights.at_offset(-2)[..., 2:], weights.dense().diagonal(-2, 2, 3))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_without_keys_every_query_has_weight_zero(requires_grad):
    q, k = torch.randn(B, H, I, D, requires_grad=requires_grad), torch.randn(B, H, 0, D)
    weights = rg.Attention()(q, k, k).weights
    for found in (weights.at_keys([-1] * I), weights.at_offset(-1)):
        torch.testing.assert_close(found.detach(), torch.zeros(B, H, I))
        assert found.requires_grad == requires_grad


def test_gradients_pass():
    q, k = (torch.randn(1, 2, 5, D, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weights = rg.Attention(mask=rg.causal())(q, k, k).weights
    found = torch.autograd.grad(weights.at_offset(-1).square().sum(), (q, k))
    s = (q @ k.mT / D**0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    expected = torch.autograd.grad(s.softmax(-1).diagonal(-1, 2, 3).square().sum(), (q, k))
    torch.testing.assert_close(found, expected)


def test_mistakes_are_named():
    weights = maps()["no mask"]
    for keys in (torch.zeros(J), torch.zeros(3, I).long(), [0.5] * I, [True] * I):
        with pytest.raises(RegardError, match="at_keys"):
            weights.at_keys(keys)
    for key in (-2, J):
        with pytest.raises(RegardError, match=r"indices from 0 to 10, or -1"):
            weights.at_keys([key] * I)
