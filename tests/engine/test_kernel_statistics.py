"""Statistics by the compiled kernels equal those of tiles: the same reductions of the same map, computed the other
way.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard as rg
from regard.engine.kernel.library import LEVELS, load
from regard.maps import compiled_reductions
from regard.maps.scored_map import ScoredMap

HIGHEST = load()
pytestmark = pytest.mark.skipif(HIGHEST is None, reason="the library of the kernels is not built")
REDUCTIONS = (
    rg.maps.Entropy(),
    rg.maps.TopLinks(3),
    rg.maps.KeyTotals(),
    rg.maps.Distance(),
    rg.maps.MassOn([0, 5, 7]),
    rg.maps.Pool(9, 13),
)
ATTENTIONS = {
    "plain": lambda: rg.Attention(),
    "causal window": lambda: rg.Attention(mask=rg.causal() & rg.window(50)),
    "dilated": lambda: rg.Attention(mask=rg.masks.dilated(20, 3)),
    "padding": lambda: rg.Attention(mask=rg.padding([130, 77])),
    "documents": lambda: rg.Attention(mask=rg.causal() & rg.documents([60, 150, 40])),
    "alibi": lambda: rg.Attention(mask=rg.causal(), bias=rg.ALiBi(4)),
    "t5 and soft cap": lambda: rg.Attention(bias=[rg.biases.T5Bias(4), rg.biases.Softcap(3.0)]),
    "temperature and sink": lambda: rg.Attention(normalizer=rg.normalizers.Softmax(temperature=0.5, sink=1.0)),
    "no key": lambda: rg.Attention(mask=rg.causal() & ~rg.window(300)),
    "additive": lambda: rg.Attention(rg.scores.Additive(24, 24, 10), mask=rg.causal()),
}


@pytest.fixture(params=LEVELS)
def level(request, monkeypatch):
    """Each level of the library that this processor can run."""
    if LEVELS.index(request.param) > LEVELS.index(HIGHEST.level_name):
        pytest.skip(f"this processor does not run {request.param}")
    monkeypatch.setenv("REGARD_KERNEL", request.param)


def tensors(lengths=(250, 250), heads=(4, 2), width=24, dtype=torch.float32):
    (I, J), (H, G) = lengths, heads
    return (torch.randn(2, n, length, width, dtype=dtype) for n, length in ((H, I), (G, J), (G, J)))


def by_tiles(monkeypatch, weights, reductions):
    with monkeypatch.context() as off:
        off.setattr(compiled_reductions, "FEWEST_PAIRS", 1 << 60)
        return weights.summarize(*reductions)


def check_equal(compiled, tiled):
    for mine, theirs in zip(compiled, tiled, strict=True):
        if isinstance(mine, rg.maps.RowLinks):
            torch.testing.assert_close(mine.weights, theirs.weights, atol=2e-6, rtol=1e-4)
            assert torch.equal(mine.keys < 0, theirs.keys < 0)
        else:
            torch.testing.assert_close(mine, theirs, atol=5e-5, rtol=1e-4)


def uses_kernel(weights):
    return weights._compiled_terms() is not None


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.usefixtures("level")
def test_reductions_are_those_of_tiles(name, monkeypatch):
    if load().level == 0:
        monkeypatch.setattr(load(), "level", 1)
    weights = ATTENTIONS[name]()(*tensors(), engine="blocked").weights
    assert uses_kernel(weights)
    check_equal(weights.summarize(*REDUCTIONS), by_tiles(monkeypatch, weights, REDUCTIONS))


@pytest.mark.parametrize("name", ATTENTIONS)
def test_an_unknown_row_statistic_is_computed(name, monkeypatch):
    """As of a model's own kernel, which returns no log-sum-exp."""
    known = ATTENTIONS[name]()(*tensors(), engine="blocked").weights
    weights = ScoredMap(known.attention, known._prepared, known.positions, known.grid, None)
    for mine, theirs in zip(weights.row_statistic, known.row_statistic, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_an_unknown_row_statistic_of_few_queries_is_computed():
    """They are read by the kernel of decoding, with values of width 0."""
    known = rg.Attention(mask=rg.window(900))(*tensors((3, 6000)), engine="blocked").weights
    weights = ScoredMap(known.attention, known._prepared, known.positions, known.grid, None)
    for mine, theirs in zip(weights.row_statistic, known.row_statistic, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_keys_of_the_strongest_links_hold_their_weights():
    weights = rg.Attention()(*tensors()).weights
    (links,) = weights.summarize(rg.maps.TopLinks(5))
    dense = weights.dense()
    torch.testing.assert_close(dense.gather(-1, links.keys), links.weights)
    torch.testing.assert_close(dense.topk(5).values, links.weights)


def test_selected_heads_keep_their_own_bias(monkeypatch):
    weights = rg.Attention(bias=rg.ALiBi(4))(*tensors()).weights.select(None, [3, 1])
    check_equal(weights.summarize(*REDUCTIONS), by_tiles(monkeypatch, weights, REDUCTIONS))


def test_a_fold_of_the_users_own_runs_beside(monkeypatch):
    class Squares(rg.maps.Reduction):
        def init(self, shape, device):
            return [torch.zeros(shape[:2], device=device)]

        def add(self, state, tile):
            state[0] += tile.weights.square().sum((-2, -1))

    weights = rg.Attention(mask=rg.causal())(*tensors()).weights
    reductions = (rg.maps.Entropy(), Squares(), rg.maps.TopLinks(1), rg.maps.TopLinks(2))
    check_equal(weights.summarize(*reductions), by_tiles(monkeypatch, weights, reductions))


def test_keys_with_gaps_have_their_own_distances(monkeypatch):
    positions = rg.types.Positions(300, rg.types.Spans.of((0, 100), (150, 300)))
    weights = rg.Attention(mask=rg.causal() & rg.window(190))(*tensors(), positions=positions).weights
    check_equal(weights.summarize(*REDUCTIONS), by_tiles(monkeypatch, weights, REDUCTIONS))


def test_threads_change_no_bit():
    weights, results = rg.Attention(mask=rg.causal())(*tensors((700, 700))).weights, []
    before = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(
            weights.summarize(rg.maps.Entropy(), rg.maps.KeyTotals(), rg.maps.Pool(5, 7), rg.maps.Distance())
        )
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@settings(max_examples=25)
@given(data=st.data())
def test_drawn_sizes(data):
    I, J = data.draw(st.integers(1, 300)), data.draw(st.integers(130, 300))
    I = max(I, compiled_reductions.FEWEST_PAIRS // J + 1)
    width, k = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 9))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    reductions = (
        rg.maps.Entropy(),
        rg.maps.TopLinks(k),
        rg.maps.KeyTotals(),
        rg.maps.Distance(),
        rg.maps.Pool(data.draw(st.integers(1, 40)), 7),
    )
    weights = rg.Attention(mask=rg.window(data.draw(st.integers(1, 200))))(
        *tensors((I, J), width=width, dtype=dtype)
    ).weights
    with pytest.MonkeyPatch.context() as patch:
        check_equal(weights.summarize(*reductions), by_tiles(patch, weights, reductions))
