"""Oracles of selected keys: loops over pairs from the words of the papers, and reformer-pytorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from oracles import EXACT, ORACLES, by_torch, close
from regard.catalog import mechanism


def oracle(name: str, **sizes: int):
    """Register `judge(q, k, **tensors) -> chosen (B, H, I, J)`, and make a test of output and weights."""

    def register(judge: Callable[..., Any]) -> Callable[[], None]:
        @torch.no_grad()
        def test() -> None:
            attention, q, k, v = mechanism(name).example(**sizes)
            tensors = mechanism(name).tensors(attention, q, k, v)
            seen = attention(q, k, v, **tensors)
            numbers = {given: x.numpy() for given, x in tensors.items()}
            chosen = torch.from_numpy(judge(q.numpy(), k.numpy(), **numbers))
            expected = by_torch(q, *(x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v)), mask=chosen)
            for mine, theirs in zip((seen.output, seen.weights.dense()), expected, strict=True):
                close(mine, theirs, EXACT)

        test.__name__, test.__doc__ = judge.__name__, judge.__doc__
        ORACLES.setdefault(name, []).append(judge)
        return test

    return register


def first_best(scores, k):
    """Columns of the k greatest scores above -inf, of equal ones the first."""
    order = np.argsort(-scores, kind="stable")[:k]
    return [int(j) for j in order if scores[j] > -math.inf]


@oracle("deepseek_sparse", key_heads=2)
def test_deepseek_chooses_the_greatest_sums_of_its_index_heads(q, k, index_query, index_key, index_weights):
    chosen = np.zeros((2, 4, 24, 24), bool)
    for b, i in np.ndindex(2, 24):
        scores = np.full(24, -np.inf)
        for j in range(i + 1):
            products = index_query[b, :, i] @ index_key[b, 0, j]
            scores[j] = (index_weights[b, i] * np.maximum(products, 0)).sum().round(9)
        chosen[b, :, i, first_best(scores, 6)] = True
    return chosen


@oracle("minimax_sparse")
def test_minimax_chooses_the_blocks_of_the_greatest_products(q, k, index_query, index_key):
    chosen = np.zeros((2, 4, 24, 24), bool)
    for b, h, i in np.ndindex(2, 4, 24):
        products = index_key[b, 0] @ index_query[b, h, i]
        scores = np.array([max([*products[s : min(s + 4, i + 1)], -np.inf]) for s in range(0, 24, 4)])
        scores[i // 4] = np.inf
        for block in first_best(scores, 3):
            chosen[b, h, i, block * 4 : min(block * 4 + 4, i + 1)] = True
    return chosen


@oracle("moba", key_heads=2)
def test_moba_gates_blocks_by_their_mean_keys(q, k):
    chosen = np.zeros((2, 4, 24, 24), bool)
    for b, h, i in np.ndindex(2, 4, 24):
        means = k[b, h // 2, : i // 4 * 4].reshape(-1, 4, 8).mean(1)
        for block in [i // 4, *first_best(means @ q[b, h, i], 2)]:
            chosen[b, h, i, block * 4 : min(block * 4 + 4, i + 1)] = True
    return chosen


def directions(x, num_buckets, rounds):
    """The bucket of each vector in each round, with the matrices of seed 0."""
    shape = x.shape[-1], rounds, num_buckets // 2
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0)).double().numpy()
    turned = np.einsum("...d,drk->...rk", x, matrices)
    return np.argmax(np.concatenate((turned, -turned), -1), -1)


@oracle("reformer")
def test_reformer_sees_the_keys_of_its_buckets_and_itself_only_when_alone(q, k):
    of_queries, of_keys = (directions(x, 4, 2) for x in (q, k))
    chosen = (of_queries[:, :, :, None] == of_keys[:, :, None]).any(-1)
    chosen &= np.tri(24, dtype=bool)
    for b, h, i in np.ndindex(2, 4, 24):
        chosen[b, h, i, i] = chosen[b, h, i].sum() == chosen[b, h, i, i]
    return chosen


@pytest.mark.parametrize("is_causal", [True, False])
@torch.no_grad()
def test_reformer_is_that_of_reformer_pytorch(is_causal):
    """One round, and two chunks that see each other, so that no pair of a bucket is lost; six buckets, and ours."""
    reformer = pytest.importorskip("reformer_pytorch.reformer_pytorch", reason="reformer-pytorch is not installed")
    n, attention = 24, mechanism("reformer").build(num_buckets=6, rounds=1, is_causal=is_causal)
    torch.manual_seed(0)
    x, v = torch.randn(2, 3, n, 8, dtype=torch.float64), torch.randn(2, 3, n, 8, dtype=torch.float64)
    layer = reformer.LSHAttention(bucket_size=n // 2, n_hashes=1, causal=is_causal, attend_across_buckets=False)
    buckets = torch.from_numpy(directions(x.numpy(), 6, 1)[..., 0]).flatten(0, 1)
    layer.hash_vectors = lambda *_, **__: buckets
    theirs, *_ = layer(x.flatten(0, 1), v.flatten(0, 1))
    seen = attention(x, F.normalize(x, dim=-1), v)
    close(seen.output, theirs.unflatten(0, (2, 3)), 1e-9)
