"""Maps of several calls as one map: rows, keys and batch entries of each part, and what their masks say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard as rg
from drawn import masks
from regard.maps.joined import JoinedMap, MapRows, joined
from regard.maps.scored_map import ScoredMap

B, H = 2, 2


@st.composite
def parts(draw, num_keys):
    """Consecutive rows, each with some of the keys and of the batch entries, in another order or none."""
    made, start = [], 0
    for _ in range(draw(st.integers(1, 3))):
        first = draw(st.integers(0, num_keys - 1))
        J, I = draw(st.integers(1, num_keys - first)), draw(st.integers(1, 4))
        mask = draw(st.none() | masks(B, I, J))
        q, k = torch.randn(B, H, I, 4), torch.randn(B, H, J, 4)
        weights = rg.Attention(mask=mask)(q, k, k, positions=rg.types.Positions.aligned_to_end(I, J)).weights
        skipped = draw(st.integers(0, I - 1))
        entries = torch.tensor(draw(st.lists(st.integers(-1, B - 1), min_size=3, max_size=3)))
        made.append(MapRows(lambda weights=weights: weights, range(skipped, I), start, first, entries))
        start = made[-1].stop
    return made


def expected(parts, num_keys, of_part):
    """The rows of each part by hand; pairs that no part has are 0."""
    rows = []
    for part in parts:
        source = of_part(part.source())[:, :, part.rows.start :]
        block = source.new_zeros(len(part.entries), H, len(part.rows), num_keys)
        for entry, own in enumerate(part.entries.tolist()):
            if own >= 0:
                block[entry, :, :, part.offset : part.offset + source.shape[3]] = source[own]
        rows.append(block)
    return torch.cat(rows, 2)


def allowed_of(weights):
    mask, grid = weights.attention.mask, weights.grid
    return torch.ones(weights.shape, dtype=torch.bool) if mask is None else mask.allowed(grid).expand(weights.shape)


@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=60)
@given(st.data(), st.integers(1, 9))
def test_a_joined_map_has_the_weights_and_the_mask_of_its_parts(data, num_keys):
    rows = data.draw(parts(num_keys))
    weights = JoinedMap(rows, rows[-1].stop, num_keys)
    dense, allowed = expected(rows, num_keys, lambda w: w.dense()), expected(rows, num_keys, allowed_of)
    torch.testing.assert_close(weights.dense(), dense)
    torch.testing.assert_close(weights.received(), dense.sum(2))
    i, j = torch.randperm(weights.shape[2]), torch.randint(num_keys, (3,))
    torch.testing.assert_close(weights.tile(rows=i, cols=j), dense[:, :, i][..., j])
    chosen = weights.select([2, 0], [1])
    torch.testing.assert_close(chosen.dense(), dense[[2, 0]][:, [1]])
    mask, first = weights.attention.mask, weights.positions.start
    assert mask.allowed(weights.grid).expand(allowed.shape).equal(allowed)
    start, stop = sorted((data.draw(st.integers(0, weights.shape[2])), data.draw(st.integers(0, weights.shape[2]))))
    some, every = (ask(first + start, first + stop) for ask in (mask.any_allowed, mask.all_allowed))
    pairs = allowed[:, :, start:stop].flatten(0, 2)
    if start < stop:
        assert all(key in some for key in pairs.any(0).nonzero().flatten().tolist())
        assert all(pairs[:, key].all() for key in range(num_keys) if key in every)


def steps(cache, tensors, attention):
    """The maps of one call for each token."""
    for n in range(tensors.shape[3]):
        seen = attention(*tensors[:, :, :, n : n + 1], cache=cache)
        cache = seen.cache
        yield seen.weights


def test_steps_after_a_growing_cache_become_one_map_of_scores():
    """So a statistic of all tokens is one pass over queries and keys, and no call of every map."""
    tensors, attention = torch.randn(3, B, H, 8, 4), rg.Attention(mask=rg.causal())
    for count in (1, 2, 8):
        weights = joined(list(steps(rg.caches.GrowingCache(), tensors[:, :, :, :count], attention)))
        assert type(weights) is ScoredMap
        torch.testing.assert_close(weights.dense(), attention(*tensors[:, :, :, :count]).weights.dense())


@pytest.mark.parametrize("size", [1, 3, 5, 8])
def test_steps_of_a_ring_keep_their_weights_on_the_keys_of_the_last(size):
    tensors, attention = torch.randn(3, B, H, 8, 4), rg.Attention(mask=rg.causal())
    maps = list(steps(rg.caches.RingCache(size), tensors, attention))
    weights, keys = joined(maps), maps[-1].shape[3]
    whole = rg.Attention(mask=rg.causal() & rg.window(size))(*tensors).weights.dense()
    torch.testing.assert_close(weights.dense(), whole[..., -keys:])
    torch.testing.assert_close(weights.received(), whole.sum(2)[..., -keys:])


def test_steps_of_a_ring_with_sinks_are_refused():
    maps = list(steps(rg.caches.RingCache(3, sinks=1), torch.randn(3, B, H, 8, 4), rg.Attention(mask=rg.causal())))
    assert joined(maps[:3]).shape == (B, H, 3, 3)
    with pytest.raises(rg.RegardError, match=r"gaps between their positions.*GrowingCache"):
        joined(maps)


@pytest.mark.parametrize("mask", [None, rg.causal()])
def test_the_last_map_may_have_no_keys(mask):
    tensors, attention = torch.randn(3, B, H, 4, 4), rg.Attention(mask=mask)
    query, key, value = tensors
    first = attention(query, key, value, positions=rg.types.Positions.of(0, 0, 4)).weights
    last = attention(query, key[:, :, :0], value[:, :, :0], positions=rg.types.Positions.of(4, 0, 0)).weights
    for maps in ([first, last], [first.detach(), last.shares()]):
        weights = joined(maps)
        assert weights.shape == weights.dense().shape == (B, H, 8, 0)
        assert weights.entropy().shape == (B, H, 8)


def test_the_keys_of_some_joined_queries_are_those_of_their_own_rows():
    """A part is asked for no query outside of the range."""
    q = torch.randn(1, H, 8, 4)
    weights = rg.Attention(mask=rg.causal())(q, q, q).weights
    entry = torch.zeros(1, dtype=torch.int64)
    mask = JoinedMap([MapRows(lambda: weights, range(8), 0, 0, entry)], 8, 8).attention.mask
    for start, stop in ((0, 8), (0, 3), (2, 5), (5, 8)):
        assert mask.any_allowed(start, stop).intervals == ((0, stop),)
        assert mask.all_allowed(start, stop).intervals == ((0, start + 1),)
