"""Caches are values: a call returns a new cache, and no earlier cache changes."""

from __future__ import annotations

import pytest
import torch

import regard as rg


def step(cache, length=3, heads=2, width=4):
    q, k, v = (torch.randn(1, heads, length, width) for _ in range(3))
    return rg.Attention(mask=rg.causal())(q, k, v, cache=cache), (q, k, v)


@torch.no_grad()
@pytest.mark.parametrize(
    "make", [rg.GrowingCache, lambda: rg.caches.RingCache(5), lambda: rg.caches.RingCache(4, sinks=2)]
)
def test_appending_twice_to_one_cache_forks_it(make):
    trunk, _ = step(step(make())[0].cache)
    left, (_, k_left, _) = step(trunk.cache)
    right, (_, k_right, _) = step(trunk.cache)
    assert torch.equal(left.cache.store.key[:, :, -3:], k_left)
    assert torch.equal(right.cache.store.key[:, :, -3:], k_right)
    again, _ = step(left.cache)
    assert torch.equal(left.cache.store.key[:, :, -3:], k_left)
    assert again.cache.length == 12 and trunk.cache.length == 6


@torch.no_grad()
def test_a_growing_cache_moves_its_keys_rarely():
    cache, buffers = rg.GrowingCache(), set()
    for _ in range(200):
        cache = step(cache, length=1)[0].cache
        buffers.add(id(cache.store.buffer.key))
    assert cache.length == 200 and len(buffers) <= 10


@torch.no_grad()
def test_a_ring_cache_holds_no_more_than_its_size():
    cache, room = rg.caches.RingCache(8, sinks=2), []
    for _ in range(100):
        seen, _ = step(cache, length=1)
        cache = seen.cache
        room.append(cache.store.buffer.key.shape[2])
        assert seen.weights.shape[3] <= 8 + 1 + 2
    assert max(room) <= 2 * (8 + 1)


def test_gradients_flow_through_a_cache():
    q, k, v = (torch.randn(1, 2, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    attention = rg.Attention(mask=rg.causal())
    cache, outputs = rg.GrowingCache(), []
    for cut in (slice(0, 4), slice(4, 6)):
        seen = attention(q[:, :, cut], k[:, :, cut], v[:, :, cut], cache=cache)
        cache = seen.cache
        outputs.append(seen.output)
    toward = torch.randn(1, 2, 6, 4, dtype=torch.float64)
    chunked = torch.autograd.grad(torch.cat(outputs, 2), (q, k, v), toward)
    whole = torch.autograd.grad(attention(q, k, v).output, (q, k, v), toward)
    for mine, theirs in zip(chunked, whole, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("queries", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("before", [0, 4])
@pytest.mark.parametrize(
    ("cache", "mask"),
    [
        (rg.GrowingCache(), rg.causal()),
        (rg.GrowingCache(), None),
        (rg.caches.RingCache(9, sinks=1), rg.causal() & (rg.window(9) | rg.masks.prefix(1))),
        (rg.caches.RingCache(2), rg.causal() & rg.window(2)),
        (rg.caches.RecurrentCache(), rg.causal()),
        (rg.caches.RecurrentCache(), None),
    ],
    ids=["growing", "all keys", "large ring", "small ring", "recurrent", "all keys summed"],
)
def test_the_last_query_stands_at_the_last_key(cache, mask, before, queries, grad):
    """One query for several new keys is the last of them; more queries than new keys reach back, or are refused."""
    new, pieces = 3, {}
    if isinstance(cache, rg.caches.RecurrentCache):
        pieces = {"score": rg.scores.FeatureScore(), "normalizer": rg.normalizers.SumNormalizer()}
    own = rg.causal() if mask is not None else None
    q, k, v = torch.randn(3, 2, 2, 12, 4, dtype=torch.float64).requires_grad_(grad)
    length = before + new
    placed = rg.types.Positions.aligned_to_end(queries, length)
    inputs = (q[:, :, :queries], k[:, :, :length], v[:, :, :length])
    whole = rg.Attention(mask=mask, **pieces)(*inputs, positions=placed)
    attention = rg.Attention(mask=own, **pieces)
    if before:
        first = (x[:, :, :before] for x in (q, k, v))
        cache = attention(*first, cache=cache).cache
    rest = [x[:, :, before:length] for x in (k, v)]
    try:
        seen = attention(q[:, :, :queries], *rest, cache=cache)
    except rg.RegardError as refused:
        assert (queries > new and "at most as many queries as new keys" in str(refused)) or "linear" in str(refused)
        assert type(cache) is not rg.GrowingCache and mask is not None
        return
    torch.testing.assert_close(seen.output, whole.output)
    assert seen.cache.length == length and seen.weights.positions.start == length - queries
    if type(cache) is not rg.caches.RecurrentCache:
        keys = seen.weights.positions.keys.tensor()
        torch.testing.assert_close(seen.weights.dense(), whole.weights.dense()[..., keys])


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "make", [rg.GrowingCache, lambda: rg.caches.RingCache(5), lambda: rg.caches.RingCache(4, sinks=2)]
)
def test_a_cache_keeps_what_it_was_given(make, grad):
    """The caller may write the next chunk into the same tensors."""
    with torch.set_grad_enabled(grad):
        k, v, q = torch.randn(3, 1, 2, 3, 4)
        chunks = k.clone(), v.clone()
        cache = rg.Attention()(q, *chunks, cache=make()).cache
        for chunk in chunks:
            chunk.fill_(torch.nan)
        seen, expected = (
            rg.Attention()(q, k, v, cache=c) for c in (cache, rg.Attention()(q, k, v, cache=make()).cache)
        )
    torch.testing.assert_close(seen.output, expected.output)
    torch.testing.assert_close(seen.weights.dense(), expected.weights.dense())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("make", [rg.GrowingCache, lambda: rg.caches.RingCache(4, sinks=1)])
def test_the_maps_of_earlier_steps_can_still_be_looked_at(make, mode):
    q, k, v = torch.randn(3, 1, 2, 9, 4)
    with mode():
        cache, steps = make(), []
        for place in range(9):
            at = slice(place, place + 1)
            steps.append(rg.Attention(mask=rg.causal())(q[:, :, at], k[:, :, at], v[:, :, at], cache=cache))
            cache = steps[-1].cache
    whole = rg.Attention(mask=rg.causal())(q, k, v, cache=make()).weights.dense()
    for place, seen in enumerate(steps):
        keys = seen.weights.positions.keys.tensor()
        torch.testing.assert_close(seen.weights.dense()[:, :, 0], whole[:, :, place, keys])


def test_another_layers_cache_is_refused():
    cache = step(rg.GrowingCache())[0].cache
    with pytest.raises(rg.RegardError, match="one cache for each layer"):
        step(cache, heads=3)


def test_a_cache_brings_its_own_positions():
    x = torch.randn(1, 1, 2, 4)
    with pytest.raises(rg.RegardError, match="has its own positions"):
        rg.Attention()(x, x, x, cache=rg.GrowingCache(), positions=rg.types.Positions.aligned_to_end(2, 2))


def test_a_recurrent_cache_needs_kernel_scores():
    with pytest.raises(rg.RegardError, match="linear engine"):
        step(rg.caches.RecurrentCache())


@torch.no_grad()
@pytest.mark.parametrize("cached", [3, 6000])
def test_listeners_are_told_of_each_token_after_a_cache(cached):
    """Whether it needs a plan or repeats a kept step; 6,000 keys are enough for the kernel of single queries."""
    key, value = torch.randn(2, 1, 2, cached + 2, 16)
    attention, cache = rg.Attention(mask=rg.causal()), rg.GrowingCache().extend(key[:, :, :-2], value[:, :, :-2]).cache
    heard, found = [], []

    class Ear:
        def on_attention(self, module, weights):
            heard.append(weights)

    with rg.attention_output.attend_listeners.to(Ear()):
        for token in (cached, cached + 1):
            new = slice(token, token + 1)
            found.append(attention(torch.ones(1, 2, 1, 16), key[:, :, new], value[:, :, new], cache=cache))
            cache = found[-1].cache
    assert len(heard) == 2
    assert all(torch.equal(heard[n].dense(), found[n].weights.dense()) for n in range(2))
