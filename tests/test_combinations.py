"""Any pieces together: hypothesis draws them, the NumPy reference decides."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import regard as rg
from regard.engine.plan import plan
from regard.engine.problem import Problem
from regard.engine.reference import reference
from regard.shapes import Sizes
from regard.spans import Spans

pytestmark = pytest.mark.usefixtures("small_blocks")
WIDTH = 4
CLOSE = {"rtol": 1e-8, "atol": 1e-9}
EXAMPLES = int(os.environ.get("REGARD_EXAMPLES", "150"))
drawn = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def masks(B, I, J, depth=2):
    """Any mask that fits, with &, | and ~ to the given depth."""
    length = max(I, J)
    simple = st.one_of(
        st.just(rg.causal()),
        st.builds(rg.window, st.integers(1, 9)),
        st.builds(rg.dilated, st.integers(1, 4), st.integers(1, 4)),
        st.builds(rg.prefix, st.integers(0, J)),
        st.builds(rg.block_local, st.integers(1, 7), st.integers(0, 2), st.integers(0, 2)),
        st.builds(rg.global_tokens, st.lists(st.integers(0, length), max_size=3)),
        st.lists(st.integers(0, J), min_size=B, max_size=B).map(rg.padding),
        st.integers(0, 2**31).map(lambda seed: rg.padding(coins(seed, B, J))),
        st.integers(0, 2**31).map(lambda seed: rg.given(coins(seed, B, 1, I, J))),
        st.just(rg.where(lambda b, h, i, j: (i + j + h) % 3 != b)),
        cuts(I, J),
    )
    if I <= J:
        seeded = st.builds(rg.random_blocks, st.integers(1, 5), st.just(1), st.just(J), st.integers(0, 99))
        simple = st.one_of(simple, seeded)
    if not depth:
        return simple
    deeper = masks(B, I, J, depth - 1)
    both, either = st.builds(rg.Mask.__and__, deeper, deeper), st.builds(rg.Mask.__or__, deeper, deeper)
    return st.one_of(simple, both, either, deeper.map(lambda m: ~m))


def coins(seed, *shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.7


def cuts(I, J):
    """Packed documents whose lengths add up to those of queries and keys."""
    if min(I, J) < 2:
        return st.just(rg.documents([I], [J]))
    at = st.integers(1, min(I, J) - 1)
    return at.map(lambda n: rg.documents([n, I - n], [n, J - n]))


SCORES = {
    "dot": lambda H: rg.Dot(),
    "unscaled": lambda H: rg.Dot(scale=1.0),
    "cosine": lambda H: rg.Cosine(3.0),
    "bilinear": lambda H: rg.Bilinear(WIDTH, WIDTH, num_heads=H),
    "additive": lambda H: rg.Additive(WIDTH, WIDTH, 3, bias=True),
    "concat": lambda H: rg.Concat(WIDTH, WIDTH, 3),
}
BIASES = {
    "alibi": lambda H: rg.ALiBi(H),
    "t5": lambda H: rg.T5Bias(H, num_buckets=8, max_distance=16),
    "shaw": lambda H: rg.ShawBias(WIDTH, reach=3),
    "transformer_xl": lambda H: rg.TransformerXLBias(H, WIDTH),
    "softcap": lambda H: rg.Softcap(1.5),
    "table": lambda H: rg.LearnedTable(H, reach=4),
}
NORMALIZERS = {
    "softmax": lambda H: rg.Softmax(),
    "warm": lambda H: rg.Softmax(temperature=3.0, sink=0.5),
    "sink": lambda H: rg.LearnedSink(H),
    "sparsemax": lambda H: rg.Sparsemax(),
    "entmax": lambda H: rg.Entmax15(),
    "top_k": lambda H: rg.TopK(3),
    "hardmax": lambda H: rg.Hardmax(),
}
POSITIONS = {
    "none": lambda: None,
    "rope": lambda: rg.RoPE(WIDTH),
    "interleaved": lambda: rg.RoPE(2, interleaved=True),
    "ntk": lambda: rg.RoPE(WIDTH, scaling=rg.NTK(4.0)),
    "sinusoidal": lambda: rg.Sinusoidal(),
}


@st.composite
def problems(draw, kernel=False, longest=40, equal=False):
    B, G, R = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    I = draw(st.integers(1, longest))
    J = I if equal else draw(st.integers(1, longest))
    H = G * R
    torch.manual_seed(draw(st.integers(0, 2**31)))
    mask = draw(st.none() | masks(B, I, J))
    if kernel:
        features = draw(st.sampled_from([rg.EluPlusOne(), rg.RandomFeatures(WIDTH, 16)]))
        simple = st.sampled_from([None, rg.causal(), rg.padding([J // 2] * B), rg.prefix(J // 2)])
        mask = draw(st.one_of(st.just(mask), simple, simple.map(lambda m: m if m is None else m & rg.causal())))
        attention = rg.Attention(rg.Kernel(features), mask=mask, normalizer=rg.Sum())
    else:
        attention = rg.Attention(
            SCORES[draw(st.sampled_from(sorted(SCORES)))](H),
            position=POSITIONS[draw(st.sampled_from(sorted(POSITIONS)))](),
            bias=[BIASES[name](H) for name in draw(st.lists(st.sampled_from(sorted(BIASES)), max_size=2))],
            mask=mask,
            normalizer=NORMALIZERS[draw(st.sampled_from(sorted(NORMALIZERS)))](H),
        )
    shapes = ((B, H, I, WIDTH), (B, G, J, WIDTH), (B, G, J, draw(st.integers(1, 6))))
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    positions = rg.Positions.aligned_to_end(I, J) if equal else draw(placings(I, J))
    problem = Problem(attention.double(), q, k, v, positions, Sizes.of(q, k, v))
    try:
        attention.check(problem.sizes, problem.positions, WIDTH)
    except rg.RegardError:  # a mask of a given length, drawn with positions beyond it
        assume(False)
    return problem


@st.composite
def placings(draw, I, J):
    """Where queries and keys stand: aligned to the end, or anywhere, with a gap among the keys."""
    if draw(st.booleans()):
        return rg.Positions.aligned_to_end(I, J)
    before, gap = draw(st.integers(0, J)), draw(st.integers(0, 9))
    keys = rg.Spans.of((0, before), (before + gap, J + gap))
    return rg.Positions(draw(st.integers(0, J + gap + 5)), keys)


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
            seen = rg.attend(*inputs, positions=problem.positions, engine=engine)
            torch.testing.assert_close(seen.output, output, **CLOSE)
            torch.testing.assert_close(seen.weights.dense(), weights, **CLOSE)


@drawn
@given(problem=problems())
def test_blocked_gradients_follow_dense_ones(problem):
    inputs = [t.requires_grad_() for t in (problem.query, problem.key, problem.value)]
    wanted = [*inputs, *problem.attention.parameters()]
    found = {}
    for engine in ("dense", "blocked"):
        output = rg.attend(problem.attention, *inputs, positions=problem.positions, engine=engine).output
        found[engine] = torch.autograd.grad((output * output.detach().cos()).sum(), wanted, allow_unused=True)
    for tensor, *both in zip(wanted, found["dense"], found["blocked"], strict=True):
        dense, blocked = (torch.zeros_like(tensor) if g is None else g for g in both)
        torch.testing.assert_close(blocked, dense, **CLOSE)


@pytest.mark.parametrize("mask", [rg.window(4), rg.causal() & rg.window(9), rg.dilated(3, 2), ~rg.window(2)], ids=str)
def test_a_gap_between_keys_is_no_shift(mask):
    """Blocks whose keys differ by a shift of their indices may be other blocks where positions leave some out."""
    for gaps in (((0, 11), (12, 24)), ((0, 9), (30, 44)), ((2, 20), (21, 22), (25, 29))):
        spans = Spans(gaps)
        q, k, v = (torch.randn(1, 2, n, 4, dtype=torch.float64) for n in (30, len(spans), len(spans)))
        positions = rg.Positions(0, spans)
        problem = Problem(rg.Attention(mask=mask), q, k, v, positions, Sizes.of(q, k, v))
        seen = rg.attend(problem.attention, q, k, v, positions=positions, engine="blocked")
        torch.testing.assert_close(seen.output, torch.from_numpy(reference(problem)[0]), **CLOSE)


@st.composite
def cuttings(draw, length):
    """A way to cut a text into calls: chunks of any size."""
    edges = draw(st.lists(st.integers(1, length - 1), max_size=6, unique=True)) if length > 1 else []
    return [0, *sorted(edges), length]


@drawn
@given(data=st.data(), size=st.integers(1, 12), sinks=st.integers(0, 3), length=st.integers(1, 40))
def test_a_ring_cache_in_any_chunks_is_a_window(data, size, sinks, length):
    near = rg.window(size) | rg.prefix(sinks) if sinks else rg.window(size)
    attention = rg.Attention(mask=rg.causal(), position=rg.RoPE(WIDTH), bias=rg.ALiBi(2))
    q, k, v = (torch.randn(1, 2, length, WIDTH, dtype=torch.float64) for _ in range(3))
    whole = rg.attend(attention.with_mask(rg.causal() & near), q, k, v, engine="reference").output
    edges, cache, parts = data.draw(cuttings(length)), rg.RingCache(size, sinks), []
    for start, stop in pairwise(edges):
        seen = rg.attend(attention, q[:, :, start:stop], k[:, :, start:stop], v[:, :, start:stop], cache=cache)
        cache = seen.cache
        assert cache.store.key.shape[2] <= size
        parts.append(seen.output)
    torch.testing.assert_close(torch.cat(parts, 2), whole, **CLOSE)


@drawn
@given(data=st.data(), length=st.integers(1, 40))
def test_recurrent_decoding_in_any_chunks_is_one_call(data, length):
    attention = rg.Attention(rg.Kernel(), mask=rg.causal(), normalizer=rg.Sum())
    q, k, v = (torch.randn(2, 2, length, WIDTH, dtype=torch.float64) for _ in range(3))
    whole = rg.attend(attention, q, k, v, engine="reference").output
    edges, cache, parts = data.draw(cuttings(length)), rg.RecurrentCache(), []
    for start, stop in pairwise(edges):
        seen = rg.attend(attention, q[:, :, start:stop], k[:, :, start:stop], v[:, :, start:stop], cache=cache)
        cache = seen.cache
        parts.append(seen.output)
    torch.testing.assert_close(torch.cat(parts, 2), whole, **CLOSE)
