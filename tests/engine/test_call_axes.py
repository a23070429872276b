"""Queries, keys and values without an axis of heads, or of a batch, and as arrays of NumPy: as lectures write them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard as rg


def weights_of(query, key, allowed=True):
    """softmax(q k^T / sqrt(d)) in float64, without any code of Regard."""
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    scores = np.where(allowed, scores, -np.inf)
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def arrays(rng, batch, num_queries, num_keys):
    lead = () if batch is None else (batch,)
    return [rng.normal(size=(*lead, length, 8)) for length in (num_queries, num_keys, num_keys)]


@given(
    batch=st.sampled_from([None, 1, 3]),
    num_queries=st.integers(1, 6),
    num_keys=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_tensors_without_heads_are_one_head(batch, num_queries, num_keys, seed):
    q, k, v = arrays(np.random.default_rng(seed), batch, num_queries, num_keys)
    for given_as in (torch.tensor, lambda x: x):
        output, weights = rg.attend(*map(given_as, (q, k, v)))
        assert output.shape == q.shape and weights.shape == (batch or 1, 1, num_queries, num_keys)
        expected = weights_of(q, k)
        np.testing.assert_allclose(output, expected @ v, atol=1e-12)
        np.testing.assert_allclose(weights.dense().reshape(expected.shape), expected, atol=1e-12)


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_the_layout_orders_no_axes_where_there_are_no_heads(layout):
    q, k, v = arrays(np.random.default_rng(0), 2, 3, 5)
    output = rg.attend(*map(torch.tensor, (q, k, v)), layout=layout).output
    np.testing.assert_allclose(output, weights_of(q, k) @ v, atol=1e-12)


def test_arrays_of_any_layout_are_read_and_not_kept():
    q, k, v = arrays(np.random.default_rng(0), 2, 4, 4)
    q, k, v = q[:, ::-1], np.asfortranarray(k), v.astype(v.dtype)
    v.setflags(write=False)
    seen = rg.attend(q, k, v)
    expected = weights_of(q, k)
    k *= 2
    np.testing.assert_allclose(seen.weights.dense()[:, 0], expected, atol=1e-12)
    np.testing.assert_allclose(seen.output, expected @ v, atol=1e-12)


@pytest.mark.parametrize("shape", [(5, 5), (1, 5, 5), (2, 5, 5), (2, 1, 5, 5), (1, 1, 5, 5)])
def test_masks_of_lectures_have_no_axis_of_heads_either(shape):
    rng = np.random.default_rng(0)
    q, k, v = arrays(rng, 2, 5, 5)
    allowed = (rng.random(shape) < 0.5) | np.eye(5, dtype=bool)
    expected = weights_of(q, k, allowed[:, 0] if allowed.ndim == 4 else allowed)
    for given_as in (torch.tensor, np.array):
        output = rg.attend(*map(given_as, (q, k, v)), mask=given_as(allowed)).output
        np.testing.assert_allclose(output, expected @ v, atol=1e-12)


def test_a_cache_grows_by_tokens_without_heads():
    q, k, v = (torch.tensor(x) for x in arrays(np.random.default_rng(0), 2, 5, 5))
    cache, rows = rg.GrowingCache(), []
    for n in range(5):
        seen = rg.attend(q[:, n : n + 1], k[:, n : n + 1], v[:, n : n + 1], cache=cache)
        cache, rows = seen.cache, [*rows, seen.output]
    torch.testing.assert_close(torch.cat(rows, 1), rg.attend(q, k, v, is_causal=True).output)


def test_gradients_reach_tensors_without_heads():
    q, k, v = (torch.tensor(x, requires_grad=True) for x in arrays(np.random.default_rng(0), 2, 3, 4))
    assert torch.autograd.gradcheck(lambda *x: rg.attend(*x).output, (q, k, v))


def test_a_plan_takes_the_same_inputs():
    q, k, v = arrays(np.random.default_rng(0), 2, 3, 4)
    assert rg.plan(q, k, v).engine == rg.plan(*(torch.tensor(x)[:, None] for x in (q, k, v))).engine


MISTAKES = {
    "one with heads": (lambda q, k, v: rg.attend(q[:, None], k, v), r"key must have 4 axes.*all three of them"),
    "one without a batch": (lambda q, k, v: rg.attend(q[0], k, v), r"query must have 4 axes.*query\.unsqueeze\(0\)"),
    "integers": (lambda q, k, v: rg.attend(*(x.astype(int) for x in (q, k, v))), "floating point"),
    "objects": (
        lambda q, k, v: rg.attend(q.astype(object), k, v),
        "must be a torch.Tensor or an array of numbers, got ndarray",
    ),
    "lists": (lambda q, k, v: rg.attend(*(x.tolist() for x in (q, k, v))), r"got list.*torch\.tensor\(query\)"),
    "no width": (lambda q, k, v: rg.attend(*(x[..., :0] for x in (q, k, v))), "at least 1"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_name_the_axes(case):
    call, words = MISTAKES[case]
    with pytest.raises(rg.RegardError, match=words):
        call(*arrays(np.random.default_rng(0), 2, 3, 4))
