"""Single queries after the keys of a growing cache, without a plan: outputs, maps, caches and refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard as rg
from drawn import examples
from regard.engine.decoding import DecodingStep
from regard.masks import dilated

MASKS = {
    "all": lambda: None,
    "causal": rg.causal,
    "window": lambda: rg.causal() & rg.window(3),
    "two-sided": lambda: rg.window(4),
    "dilated": lambda: rg.causal() & dilated(3, 2),
    "prefix": lambda: rg.causal() & rg.masks.prefix(2),
}


@pytest.fixture
def steps(monkeypatch):
    """Counts the steps that ran without a plan."""
    ran, run = [], DecodingStep.run
    monkeypatch.setattr(DecodingStep, "run", lambda self, *given: ran.append(self) or run(self, *given))
    return ran


@examples(150)
@given(
    st.sampled_from(sorted(MASKS)),
    st.sampled_from([(1, 2, 2, 8, 8), (2, 4, 2, 8, 5), (1, 3, 1, 4, 9)]),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.lists(st.integers(1, 4), min_size=1, max_size=6),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_steps_agree_with_one_call_in_float64(name, sizes, dtype, chunks, grad, seed):
    """Each call has one query, the last of its new keys."""
    (B, H, G, D, E), generator = sizes, torch.Generator().manual_seed(seed)
    n = 3 + sum(chunks)
    key, value = (torch.randn(B, G, n, width, generator=generator).to(dtype) for width in (D, E))
    attention = rg.Attention(rg.Dot(scale=0.7), mask=MASKS[name](), normalizer=rg.normalizers.Softmax(temperature=1.3))
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    with torch.set_grad_enabled(grad):
        query = torch.randn(B, H, 3, D, generator=generator).to(dtype)
        cache, stop = attention(query, key[:, :, :3], value[:, :, :3], cache=rg.GrowingCache()).cache, 3
        for new in chunks:
            start, stop = stop, stop + new
            query = torch.randn(B, H, 1, D, generator=generator).to(dtype)
            seen = attention(query, key[:, :, start:stop], value[:, :, start:stop], cache=cache)
            whole = attention(*(t.double() for t in (query, key[:, :, :stop], value[:, :, :stop])), engine="dense")
            torch.testing.assert_close(seen.output.double(), whole.output, atol=tolerance, rtol=tolerance)
            weights = seen.weights.dense()
            torch.testing.assert_close(weights.double(), whole.weights.dense(), atol=tolerance, rtol=0)
            assert seen.weights.positions == whole.weights.positions
            assert torch.equal(weights > 0, whole.weights.dense() > 0)
            cache = seen.cache
    assert cache.length == n


def test_repeated_steps_run_without_a_plan(steps, monkeypatch):
    plan, made = rg.attention_output.engine_plan, []
    monkeypatch.setattr(rg.attention_output, "engine_plan", lambda *given: made.append(given) or plan(*given))
    attention, x = rg.Attention(mask=rg.causal() & rg.window(5)), torch.randn(1, 2, 20, 8)
    with torch.no_grad():
        cache = attention(x[:, :, :4], x[:, :, :4], x[:, :, :4], cache=rg.GrowingCache()).cache
        for n in range(4, 20):
            one = x[:, :, n : n + 1]
            cache = attention(one, one, one, cache=cache).cache
    assert len(steps) == 16 and len(made) == 1


@pytest.mark.parametrize(
    "pieces",
    [
        {"mask": rg.causal() & dilated(3, 2)},
        {"mask": rg.masks.prefix(2)},
        {"bias": rg.ALiBi(2)},
        {"position": rg.RoPE(8)},
        {"normalizer": rg.normalizers.Softmax(sink=0.5)},
        {"normalizer": rg.normalizers.Sparsemax()},
    ],
    ids=str,
)
def test_other_pieces_are_planned(pieces, steps):
    attention, x = rg.Attention(**pieces), torch.randn(1, 2, 6, 8)
    cache = attention(x, x, x, cache=rg.GrowingCache()).cache
    seen = attention(x[:, :, :1], x[:, :, :1], x[:, :, :1], cache=cache)
    whole = attention(x[:, :, :1], *[torch.cat((x, x[:, :, :1]), 2)] * 2, engine="reference")
    torch.testing.assert_close(seen.output, whole.output, atol=1e-5, rtol=1e-5)
    assert not steps


def test_dropout_of_a_step_is_drawn(steps):
    attention, x = rg.Attention(mask=rg.causal(), dropout=0.5), torch.randn(1, 2, 40, 8)
    cache = attention(x, x, x, cache=rg.GrowingCache()).cache
    one = x[:, :, :1]
    outputs = [attention(one, one, one, cache=cache).output for _ in range(3)]
    assert not torch.equal(outputs[0], outputs[1]) and not steps
    attention.eval()
    outputs = [attention(one, one, one, cache=cache).output for _ in range(2)]
    assert torch.equal(*outputs) and len(steps) == 2


def test_branches_of_a_cache_keep_their_own_keys(steps):
    attention, x = rg.Attention(mask=rg.causal()), torch.randn(1, 2, 6, 8)
    with torch.no_grad():
        root = attention(x, x, x, cache=rg.GrowingCache()).cache
        ones = torch.randn(3, 1, 2, 1, 8)
        for _ in range(2):
            for one in ones:
                seen = attention(one, one, one, cache=root)
                whole = attention(one, *[torch.cat((x, one), 2)] * 2)
                torch.testing.assert_close(seen.output, whole.output)
                torch.testing.assert_close(seen.weights.dense(), whole.weights.dense())
    assert len(steps) == 6


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda q, k, v: (q, k[..., :4], v), "width"),
        (lambda q, k, v: (q.repeat(2, 1, 1, 1), k, v), "batch"),
        (lambda q, k, v: (q, k, v[:, :, :0]), "one value for each key"),
        (lambda q, k, v: (q.double(), k, v), "dtype"),
        (lambda q, k, v: (q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)), "heads"),
    ],
)
def test_wrong_steps_are_refused_as_other_calls(change, match):
    attention, x = rg.Attention(mask=rg.causal()), torch.randn(1, 2, 6, 8)
    cache = attention(x, x, x, cache=rg.GrowingCache()).cache
    one = x[:, :, :1]
    attention(one, one, one, cache=cache)
    with pytest.raises(rg.RegardError, match=match):
        attention(*change(one, one, one), cache=cache)


def test_a_changed_query_ends_the_map_of_a_step():
    attention, x = rg.Attention(mask=rg.causal()), torch.randn(1, 2, 6, 8)
    cache = attention(x, x, x, cache=rg.GrowingCache()).cache
    query = x[:, :, :1].clone()
    seen = attention(query, x[:, :, :1], x[:, :, :1], cache=cache)
    query.add_(1)
    with pytest.raises(rg.RegardError, match="changed in place"):
        seen.weights.dense()


def test_gradients_of_a_step_are_those_of_one_call(steps):
    attention, x = rg.Attention(mask=rg.causal()), torch.randn(1, 2, 6, 8, dtype=torch.float64)
    grads = []
    for cached in (False, True):
        learned = x.clone().requires_grad_()
        one = learned[:, :, 5:]
        if cached:
            cache = attention(*[learned[:, :, :5]] * 3, cache=rg.GrowingCache()).cache
            output = attention(one, one, one, cache=cache).output
        else:
            output = attention(one, learned, learned).output
        grads.append(*torch.autograd.grad(output.square().sum(), learned))
    torch.testing.assert_close(*grads)
    assert not steps
