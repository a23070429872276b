"""The Triton kernel under Triton's interpreter, on the CPU; test_gpu_statistics.py runs this module in its own process.

The oracle is the definition of each reduction on dense float64 weights, as in
test_reductions.py. Small problems: the interpreter takes 0.1 s for a tile.
"""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

import regard as rg
from exact_reductions import wrong_results
from regard.engine.gpu import statistics
from regard.maps import compiled_reductions, gpu_reductions
from regard.maps.scored_map import ScoredMap

REDUCTIONS = (
    rg.maps.Entropy(),
    rg.maps.TopLinks(3),
    rg.maps.KeyTotals(),
    rg.maps.Distance(),
    rg.maps.MassOn([0, 5, 7]),
    rg.maps.Pool(9, 13),
)
#: Of every form that the kernel computes; for 70 queries, 90 keys, 2 heads that share one key head, 2 entries.
ATTENTIONS = {
    "plain": lambda: rg.Attention(),
    "causal window": lambda: rg.Attention(mask=rg.causal() & rg.window(20)),
    "dilated": lambda: rg.Attention(mask=rg.masks.dilated(20, 3)),
    "padding": lambda: rg.Attention(mask=rg.padding([90, 37])),
    "documents": lambda: rg.Attention(mask=rg.causal() & rg.documents([30, 25, 35])),
    "longformer": lambda: rg.Attention(mask=rg.window(9) | rg.masks.global_tokens([40, 60])),
    "a tensor of heads": lambda: rg.Attention(mask=rg.mask_tensor(torch.rand(1, 2, 70, 90) < 0.3)),
    "alibi": lambda: rg.Attention(mask=rg.causal(), bias=rg.ALiBi(2)),
    "t5, soft cap, alibi": lambda: rg.Attention(bias=[rg.biases.T5Bias(2), rg.biases.Softcap(3.0), rg.ALiBi(2)]),
    "temperature, sink": lambda: rg.Attention(normalizer=rg.normalizers.Softmax(temperature=0.5, sink=1.0)),
    "rope, cosine": lambda: rg.Attention(score=rg.scores.Cosine(5.0), position=rg.RoPE(24)),
    "rows without keys": lambda: rg.Attention(mask=rg.causal() & ~rg.window(40)),
    "no key": lambda: rg.Attention(mask=rg.causal() & ~rg.window(300)),
}


@pytest.fixture(autouse=True, scope="module")
def mended_interpreter():
    """The interpreter multiplies bfloat16 numbers as the integers that it stores them in; a GPU does not."""
    original = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest):
        a, b = (self.create_fp_ext(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return original(self, a, b, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        patch.setattr(gpu_reductions, "DEVICES", {"cpu"})
        patch.setattr(compiled_reductions, "FEWEST_PAIRS", 1)
        patch.setenv("REGARD_KERNEL", "off")
        yield


@pytest.fixture
def unverified(monkeypatch):
    """Programs are not verified at their first use, which would triple the time."""
    monkeypatch.setattr(gpu_reductions, "_is_right", lambda program, fault: True)


def tensors(lengths=(70, 90), heads=(2, 1), width=24, dtype=torch.float32):
    (I, J), (H, G) = lengths, heads
    return [torch.randn(2, n, length, width).to(dtype) for n, length in ((H, I), (G, J), (G, J))]


def maps(attention, query, key, value, **options):
    """The map of the tensors, and that of the same numbers in float64."""
    both = [[x.to(dtype) for x in (query, key, value)] for dtype in (query.dtype, torch.float64)]
    mine, precise = (attention(*given, engine="dense", **options).weights for given in both)
    return mine, precise


def check(mine, precise, reductions=REDUCTIONS):
    """The kernel computes every reduction, and they are those of the formulas."""
    assert (terms := mine._compiled_terms()) is not None
    states = {reduction: reduction.init(mine.shape, mine.device) for reduction in reductions}
    assert gpu_reductions.fill_on_gpu(terms, mine.row_statistic[0], states) == set(reductions)
    results = {reduction: reduction.finish(states[reduction]) for reduction in reductions}
    assert not wrong_results(results, precise.dense(), mine.grid.distance, 1e-4)


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.usefixtures("unverified")
@torch.no_grad()
def test_reductions_are_those_of_the_formula(name):
    check(*maps(ATTENTIONS[name](), *tensors()))


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.usefixtures("unverified")
@torch.no_grad()
def test_an_unknown_row_statistic_is_computed(name):
    """As of a model's own kernel, which returns no log-sum-exp."""
    attention = ATTENTIONS[name]()
    known, precise = maps(attention, *tensors(dtype=torch.float16 if name == "padding" else torch.float32))
    weights = ScoredMap(attention, known._prepared, known.positions, known.grid, None)
    (found, remainder), exact = weights.row_statistic, sum(precise.row_statistic)
    assert not remainder.any() and weights._compiled_terms() is not None
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-5)


@settings(max_examples=6)
@given(data=st.data())
@pytest.mark.usefixtures("unverified")
@torch.no_grad()
def test_drawn_sizes(data):
    I, J = data.draw(st.integers(1, 80)), data.draw(st.integers(1, 140))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    width, k = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 9))
    rows, cols = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 150))
    mask = data.draw(st.sampled_from([None, rg.window(30), rg.causal()]))
    reductions = (
        rg.maps.Entropy(),
        rg.maps.TopLinks(k),
        rg.maps.KeyTotals(),
        rg.maps.Distance(),
        rg.maps.Pool(rows, cols),
    )
    check(*maps(rg.Attention(mask=mask), *tensors((I, J), (1, 1), width, dtype)), reductions)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("unverified")
@torch.no_grad()
def test_half_precision_sums_in_float32(dtype):
    check(*maps(rg.Attention(mask=rg.causal() & rg.window(20)), *tensors(dtype=dtype, heads=(4, 2))))


@pytest.mark.usefixtures("unverified")
@torch.no_grad()
def test_any_strides():
    query, key, value = tensors()
    key = key.transpose(2, 3).contiguous().transpose(2, 3)
    query = torch.stack([query, query], -1)[..., 0][:, :1].expand(2, 2, 70, 24)
    check(*maps(rg.Attention(), query, key, value))


@pytest.mark.usefixtures("unverified")
@torch.no_grad()
def test_positions_of_a_cache_and_keys_with_gaps():
    later = rg.types.Positions(100, rg.types.Spans.of((70, 160)))
    check(*maps(rg.Attention(mask=rg.causal() & rg.window(50), bias=rg.ALiBi(2)), *tensors(), positions=later))
    gaps = rg.types.Positions(90, rg.types.Spans.of((0, 40), (60, 110)))
    reductions = tuple(reduction for reduction in REDUCTIONS if not isinstance(reduction, rg.maps.Distance))
    check(*maps(rg.Attention(mask=rg.causal() & rg.window(70)), *tensors(), positions=gaps), reductions)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
@pytest.mark.usefixtures("unverified")
@torch.no_grad()
def test_forbidden_keys_of_any_number_change_nothing():
    query, key, value = tensors()
    attention = rg.Attention(mask=rg.padding([90, 37]))
    states = []
    for number in (0.0, torch.nan, torch.inf):
        key[1, :, 37:] = number
        weights = attention(query, key, value, engine="dense").weights
        states.append(weights.summarize(*REDUCTIONS[2:]))
    assert all(torch.equal(a, b) for other in states[1:] for a, b in zip(states[0], other, strict=True))


@pytest.mark.usefixtures("unverified")
@torch.no_grad()
def test_of_some_queries():
    weights, precise = maps(rg.Attention(mask=rg.causal() & rg.window(20)), *tensors())
    terms = weights._compiled_terms()
    reduction, I = rg.maps.KeyTotals(), weights.shape[2]
    parts = []
    for queries in (range(0, 3), range(3, 66), range(66, I)):
        states = {reduction: reduction.init(weights.shape, weights.device)}
        wanted, _ = gpu_reductions.wanted_statistics(states, terms.problem)
        statistics.add_statistics(terms, weights.row_statistic[0], wanted, queries)
        expected = precise.dense()[:, :, queries.start : queries.stop].sum(2)
        torch.testing.assert_close(states[reduction][0].double(), expected, atol=1e-5, rtol=1e-4)
        parts.append(states[reduction][0])
    torch.testing.assert_close(sum(parts), weights.received(), atol=1e-5, rtol=1e-4)


# What tiles compute


def terms(attention, *given):
    return attention(*(given or tensors()), engine="dense").weights._compiled_terms()


def test_maps_that_tiles_compute():
    assert terms(rg.Attention()) is not None
    assert terms(rg.Attention(normalizer=rg.normalizers.Sparsemax())) is None
    assert terms(rg.Attention(bias=rg.biases.ShawBias(24, 4))) is None
    assert terms(rg.Attention(bias=[rg.biases.Softcap(3.0), rg.biases.Softcap(4.0)])) is None
    assert terms(rg.Attention(mask=rg.mask_mod(lambda b, h, i, j: i != j))) is None
    assert terms(rg.Attention(), *tensors(dtype=torch.float64)) is None
    assert terms(rg.Attention(), *tensors(width=257)) is None
    assert rg.Attention()(*tensors(), engine="dense").weights.select([0], [1])._compiled_terms() is None


# Verification at the first use of a program


@pytest.fixture
def unknown(monkeypatch):
    monkeypatch.setattr(gpu_reductions, "FAULTS", {})


@pytest.mark.usefixtures("unknown")
def test_a_right_program_is_verified_once():
    weights = rg.Attention(mask=rg.causal(), bias=rg.ALiBi(2))(*tensors(), engine="dense").weights
    weights.summarize(*REDUCTIONS)
    assert list(gpu_reductions.FAULTS.values()) == [None]
