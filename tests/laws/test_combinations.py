"""Any pieces together: hypothesis draws them, the NumPy reference decides."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard as rg
from drawn import CLOSE, WIDTHS, drawn_tensor, examples, leaves, problems
from regard.base.shapes import Sizes
from regard.base.spans import Spans
from regard.engine.plan import plan
from regard.engine.problem import Problem
from regard.reference import reference
from rounding import budget

pytestmark = pytest.mark.usefixtures("small_blocks")
drawn = examples(150)
NAMES = ("query", "key", "value")


@drawn
@given(st.data())
@pytest.mark.parametrize("kernel", [False, True], ids=["softmax-like", "kernel"])
def test_every_engine_follows_the_reference(kernel, data):
    problem = data.draw(problems(kernel))
    output, weights = (torch.from_numpy(a) for a in reference(problem))
    inputs = (problem.attention, problem.query, problem.key, problem.value)
    with torch.no_grad():
        refused = plan(problem).refused
        for engine in {"dense", "blocked", "fused", "linear"} - set(refused):
            seen = inputs[0](*inputs[1:], positions=problem.positions, engine=engine)
            torch.testing.assert_close(seen.output, output, **CLOSE)
            torch.testing.assert_close(seen.weights.dense(), weights, **CLOSE)


@drawn
@given(st.data())
@pytest.mark.parametrize("kernel", [False, True], ids=["softmax-like", "kernel"])
def test_gradients_of_every_engine_follow_dense_ones(kernel, data):
    problem = data.draw(problems(kernel))
    s, inputs = problem.sizes, leaves(problem)
    toward = drawn_tensor(data.draw, s.B, s.H, s.I, s.E)
    wanted = [*inputs, *(p for p in problem.attention.parameters() if p.requires_grad)]

    def gradients(engine):
        output = problem.attention(*inputs, positions=problem.positions, engine=engine).output
        found = torch.autograd.grad(output, wanted, toward, allow_unused=True)
        return [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]

    refused = rg.plan(*inputs, attention=problem.attention, positions=problem.positions).refused
    dense = gradients("dense")
    for engine in {"blocked", "fused", "linear"} - set(refused):
        for found, expected in zip(gradients(engine), dense, strict=True):
            torch.testing.assert_close(found, expected, **CLOSE)


@examples(60)
@given(st.data())
@pytest.mark.parametrize("kernel", [False, True], ids=["softmax-like", "kernel"])
@torch.no_grad()
def test_every_engine_stays_within_the_budget_of_its_dtype(kernel, data):
    drawn = data.draw(problems(kernel, longest=20))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    attention = drawn.attention.to(dtype)
    inputs = [t.to(dtype) for t in (drawn.query, drawn.key, drawn.value)]
    rounded = [t.double() for t in inputs]
    exact = replace(drawn, attention=copy.deepcopy(attention).double(), **dict(zip(NAMES, rounded, strict=True)))
    output, allowed = budget(exact, dtype)
    for engine in {"dense", "blocked", "fused", "linear"} - set(plan(drawn).refused):
        seen = attention(*inputs, positions=drawn.positions, engine=engine)
        assert ((seen.output.double() - output).abs() <= allowed).all()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "bias", [rg.biases.ShawBias(16, 5), rg.biases.TransformerXLBias(2, 16)], ids=lambda bias: type(bias).__name__
)
@torch.no_grad()
def test_terms_of_learned_relative_keys_are_never_rounded_to_half(bias, dtype, autocast):
    """Large ones: a term near 30 has steps of 1/8 in bfloat16, a hundred times the budget of a weight."""
    bias = copy.deepcopy(bias).to(dtype)
    for parameter in bias.parameters():
        parameter.copy_(3 * torch.randn(parameter.shape))
    attention = rg.Attention(mask=rg.causal(), bias=bias)
    inputs = [torch.randn(2, heads, 24, 16).to(dtype) for heads in (2, 1, 1)]
    exact = copy.deepcopy(attention).double(), *(x.double() for x in inputs)
    problem = Problem(*exact, rg.types.Positions.aligned_to_end(24, 24), Sizes.of(*exact[1:]))
    output, allowed = budget(problem, dtype)
    if autocast:  # as in training: parameters are float32, inputs become half
        attention, inputs = attention.float(), [x.float() for x in inputs]
    for engine in {"dense", "blocked", "kernel", "flex"} - set(rg.plan(*inputs, attention=attention).refused):
        with torch.autocast("cpu", dtype, enabled=autocast):
            seen = attention(*inputs, engine=engine)
        assert ((seen.output.double() - output).abs() <= allowed).all(), engine
        weights = torch.from_numpy(reference(problem)[1])
        assert (seen.weights.dense() - weights).abs().max() < 1e-3


@pytest.mark.parametrize(
    "mask", [rg.window(4), rg.causal() & rg.window(9), rg.masks.dilated(3, 2), ~rg.window(2)], ids=str
)
def test_a_gap_between_keys_is_no_shift(mask):
    """Blocks whose keys differ by a shift of their indices may be other blocks where positions leave some out."""
    for gaps in (((0, 11), (12, 24)), ((0, 9), (30, 44)), ((2, 20), (21, 22), (25, 29))):
        spans = Spans(gaps)
        q, k, v = (torch.randn(1, 2, n, 4, dtype=torch.float64) for n in (30, len(spans), len(spans)))
        positions = rg.types.Positions(0, spans)
        problem = Problem(rg.Attention(mask=mask), q, k, v, positions, Sizes.of(q, k, v))
        seen = problem.attention(q, k, v, positions=positions, engine="blocked")
        torch.testing.assert_close(seen.output, torch.from_numpy(reference(problem)[0]), **CLOSE)


@pytest.mark.parametrize(
    "mask", [rg.window(5), rg.causal() & rg.window(9), ~rg.causal(), rg.masks.dilated(3, 2)], ids=str
)
def test_queries_before_the_first_key(mask):
    """Their blocks have no keys, or fewer than blocks that differ from them by a shift."""
    for I, J in ((40, 20), (33, 30), (60, 7)):
        q, k, v = (torch.randn(1, 2, n, 4, dtype=torch.float64) for n in (I, J, J))
        expected = rg.Attention(mask=mask)(q, k, v, engine="reference").output
        for engine in ("dense", "blocked"):
            found = rg.Attention(mask=mask)(q, k, v, engine=engine).output
            torch.testing.assert_close(found, expected, **CLOSE)


@st.composite
def cuttings(draw, length):
    """A way to cut a text into calls: chunks of any size."""
    edges = draw(st.lists(st.integers(1, length - 1), max_size=6, unique=True)) if length > 1 else []
    return [0, *sorted(edges), length]


@drawn
@given(data=st.data(), size=st.integers(1, 12), sinks=st.integers(0, 3), length=st.integers(1, 40))
def test_a_ring_cache_in_any_chunks_is_a_window(data, size, sinks, length):
    width = data.draw(st.sampled_from(WIDTHS))
    near = rg.window(size) | rg.masks.prefix(sinks) if sinks else rg.window(size)
    attention = rg.Attention(mask=rg.causal(), position=rg.RoPE(width), bias=rg.ALiBi(2))
    q, k, v = (drawn_tensor(data.draw, 1, 2, length, width) for _ in range(3))
    whole = attention.with_mask(rg.causal() & near)(q, k, v, engine="reference").output
    edges, cache, parts = data.draw(cuttings(length)), rg.caches.RingCache(size, sinks), []
    for start, stop in pairwise(edges):
        seen = attention(q[:, :, start:stop], k[:, :, start:stop], v[:, :, start:stop], cache=cache)
        cache = seen.cache
        assert cache.store.key.shape[2] <= size
        parts.append(seen.output)
    torch.testing.assert_close(torch.cat(parts, 2), whole, **CLOSE)


@drawn
@given(data=st.data(), length=st.integers(1, 40))
def test_recurrent_decoding_in_any_chunks_is_one_call(data, length):
    attention = rg.Attention(rg.scores.FeatureScore(), mask=rg.causal(), normalizer=rg.normalizers.SumNormalizer())
    width = data.draw(st.sampled_from(WIDTHS))
    q, k, v = (drawn_tensor(data.draw, 2, 2, length, width) for _ in range(3))
    whole = attention(q, k, v, engine="reference").output
    edges, cache, parts = data.draw(cuttings(length)), rg.caches.RecurrentCache(), []
    for start, stop in pairwise(edges):
        seen = attention(q[:, :, start:stop], k[:, :, start:stop], v[:, :, start:stop], cache=cache)
        cache = seen.cache
        parts.append(seen.output)
    torch.testing.assert_close(torch.cat(parts, 2), whole, **CLOSE)
