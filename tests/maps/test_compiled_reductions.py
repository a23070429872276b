"""What is special to reductions by the compiled kernels. test_reductions.py compares them with their definitions."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import drawn
import regard as rg
from exact_reductions import COMPILED, check, some_reductions
from kernels import at_level, in_dtype, needs_kernel, problems, weight_errors
from reduction_backends import ATTENTIONS, MASKS
from regard.diagnosis.laws import problem_of
from regard.engine.kernel import library
from regard.maps import compiled_reductions
from regard.maps.scored_map import ScoredMap
from regard.pieces.normalizer import any_coarse
from regard.reference import reference
from regard.stats.statistics import Agreement, Allowed, Offset, Offsets
from rounding import FLOAT32, unit_roundoff

pytestmark = needs_kernel


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    """The kernels run for few pairs and at the lowest level too."""
    monkeypatch.setattr(compiled_reductions, "FEWEST_PAIRS", 0)
    monkeypatch.setattr(library, "LOWEST_LEVEL", 0)


@settings(max_examples=60)
@given(problem=problems(), seed=st.integers(0, 1000), level=st.sampled_from(library.LEVELS))
def test_drawn_problems(problem, seed, level):
    problem, tensors = problem
    attention, leaves = in_dtype(problem, tensors)
    s = problem.sizes
    level = min(level, library.load().level_name, key=library.LEVELS.index)
    with at_level(level), mock.patch.object(compiled_reductions, "FEWEST_PAIRS", 0), torch.no_grad():
        seen = attention(*leaves, positions=problem.positions, engine="kernel").weights
        states = seen.reduction_states(some_reductions(s.B, s.H, s.I, s.J, seed))
    _, w = (torch.from_numpy(a) for a in reference(problem))
    u = unit_roundoff(tensors[0].dtype)
    share = weight_errors(problem, u).nan_to_num(0.0).amax().detach()
    check(states, w, problem.grid.distance, float(share) + (s.I + s.J + 60) * FLOAT32)


def inputs(length=273, heads=(6, 2), dtype=torch.float32, width=16):
    shapes = ((2, heads[0], length, width), *[(2, heads[1], length, width)] * 2)
    return [torch.randn(shape).to(dtype) for shape in shapes]


@pytest.mark.parametrize(("I", "J"), [(1, 1), (1, 300), (300, 1), (2, 5), (0, 7), (7, 0)])
@torch.no_grad()
def test_few_queries_or_keys(I, J):
    q, k = torch.randn(1, 4, I, 8), torch.randn(1, 2, J, 8)
    seen = rg.Attention()(q, k, k).weights
    if 0 in (I, J):
        reductions = (rg.maps.Entropy(), rg.maps.Similarity(), rg.maps.KeyTotals(), Offset(0), Offsets(), Allowed(seen))
        assert all(not state[0].any() for state in seen.reduction_states(reductions).values())
        return
    w = seen.dense().double()
    check(seen.reduction_states(some_reductions(1, 4, I, J)), w, seen.grid.distance, 1e-4)


@torch.no_grad()
def test_threads_change_no_bit():
    seen, results = rg.Attention(mask=rg.causal())(*inputs(700)).weights, []
    before = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(seen.reduction_states(some_reductions(2, 6, 700, 700)).values())
    torch.set_num_threads(before)
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert all(map(torch.equal, one, two))


@torch.no_grad()
def test_many_heads_take_blocks_of_one_panel():
    q, k, v = inputs(60, heads=(67, 1))
    seen = rg.Attention(mask=rg.window(20))(q, k, v).weights
    reductions = (rg.maps.Similarity(), Agreement((3, 30)), rg.maps.Similarity(2))
    w = seen.dense().double()
    check(seen.reduction_states(reductions), w, seen.grid.distance, 1e-4)


@torch.no_grad()
def test_a_subclass_is_computed_by_its_own_definition():
    class Doubled(rg.maps.Entropy):
        def finish(self, state):
            return 2 * state[0]

        def add(self, state, tile):
            super().add(state, tile)
            state[0][:, :, tile.rows] += 1

    seen = rg.Attention()(*inputs()).weights
    plain, doubled = seen.summarize(rg.maps.Entropy(), Doubled())
    torch.testing.assert_close(doubled, 2 * plain + 2)


@torch.no_grad()
@pytest.mark.parametrize("layout", drawn.LAYOUTS)
def test_any_strides(layout):
    tensors = [drawn.LAYOUTS[layout](t) for t in inputs(140)]
    seen = rg.Attention(mask=rg.causal())(*tensors).weights
    check(seen.reduction_states(some_reductions(2, 6, 140, 140, 5)), seen.dense().double(), seen.grid.distance, 1e-4)


@torch.no_grad()
def test_a_coarse_logsumexp_is_left_to_tiles():
    q, k, v = inputs()
    seen = rg.Attention(rg.Dot(1e6))(q, k, v).weights
    assert any_coarse(seen.row_statistic[0])
    with mock.patch.object(compiled_reductions, "add_statistics", side_effect=AssertionError):
        assert seen.summarize(rg.maps.KeyTotals())[0].sum().isclose(torch.tensor(2.0 * 6 * 273))


@torch.no_grad()
def test_additive_scores_compare_heads_on_tiles():
    seen = rg.Attention(rg.scores.Additive(4, 4, 8))(*inputs(150, heads=(1, 1), width=4)).weights
    with mock.patch.object(compiled_reductions, "add_products", side_effect=AssertionError):
        states = seen.reduction_states(some_reductions(2, 1, 150, 150, 4))
    check(states, seen.dense().double(), seen.grid.distance, 1e-4)


# Beside what tiles compute


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


@pytest.mark.parametrize(
    "make",
    [*ATTENTIONS.values(), *(lambda make=make: rg.Attention(mask=make()) for make in MASKS.values())],
    ids=[*ATTENTIONS, *MASKS],
)
def test_an_unknown_row_statistic_is_computed(make):
    """As of a model's own kernel, which returns no log-sum-exp."""
    known = make()(*tensors((250, 273)), engine="blocked").weights
    weights = ScoredMap(known.attention, known._prepared, known.positions, known.grid, None)
    for mine, theirs in zip(weights.row_statistic, known.row_statistic, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_an_unknown_row_statistic_of_few_queries_is_computed():
    """They are read by the kernel of decoding, with values of width 0."""
    known = rg.Attention(mask=rg.window(900))(*tensors((3, 6000)), engine="blocked").weights
    weights = ScoredMap(known.attention, known._prepared, known.positions, known.grid, None)
    for mine, theirs in zip(weights.row_statistic, known.row_statistic, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_selected_heads_keep_their_own_bias(monkeypatch):
    weights = rg.Attention(bias=rg.ALiBi(4))(*tensors()).weights.select(None, [3, 1])
    check_equal(weights.summarize(*COMPILED), by_tiles(monkeypatch, weights, COMPILED))


def test_a_fold_of_the_users_own_runs_beside(monkeypatch):
    class Squares(rg.maps.Reduction):
        def init(self, shape, device):
            return [torch.zeros(shape[:2], device=device)]

        def add(self, state, tile):
            state[0] += tile.weights.square().sum((-2, -1))

    weights = rg.Attention(mask=rg.causal())(*tensors()).weights
    reductions = (rg.maps.Entropy(), Squares(), rg.maps.TopLinks(1), rg.maps.TopLinks(2))
    check_equal(weights.summarize(*reductions), by_tiles(monkeypatch, weights, reductions))


@settings(max_examples=25)
@given(data=st.data())
def test_drawn_sizes(data):
    I, J = data.draw(st.integers(1, 300)), data.draw(st.integers(130, 300))
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


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_weight_on_later_keys_is_computed_without_a_tile(shift, monkeypatch):
    """The kernels know the sum over the keys after the query, and of no other pairs."""
    weights = rg.Attention()(*tensors((90, 90))).weights
    allowed = torch.ones(90, 90).triu(1 + shift)
    exact, tiles = (weights.dense() * allowed).sum(-1), []
    strip = ScoredMap._weights_of_strip
    monkeypatch.setattr(ScoredMap, "_weights_of_strip", lambda *given, **more: tiles.append(1) or strip(*given, **more))
    later = rg.mask_mod(lambda b, h, i, j: j > i + shift) if shift else ~rg.causal()
    torch.testing.assert_close(weights.summarize(rg.maps.MassWhere(later))[0], exact)
    assert bool(tiles) is (shift != 0)


def test_a_call_folds_statistics_of_rows_each_part_once():
    """A second kind of strongest link, more than one link, sums over keys and, beside gaps, distances are left out."""
    entropy, distance, top = rg.maps.Entropy(), rg.maps.Distance(), rg.maps.TopLinks(1)
    x = torch.randn(1, 2, 9, 8)
    attention, gaps = rg.Attention(), rg.types.Positions(9, rg.types.Spans.of((0, 4), (5, 10)))

    def folded(*reductions, positions=None, x=x):
        folds = compiled_reductions.folds_of(reductions, problem_of(attention, x, x, x, positions))
        return None if folds is None else list(folds.states)

    assert folded(entropy, rg.maps.TopLinks(2), rg.maps.KeyTotals(), top, entropy) == [entropy, top]
    assert folded(distance, rg.maps.Entropy()) == [distance, entropy]
    assert folded(entropy, distance, positions=gaps) == [entropy]
    assert folded(rg.maps.KeyTotals()) is folded(entropy, x=x[:, :, :0]) is folded(entropy, x=x.to("meta")) is None


@pytest.mark.parametrize("wrong", [1e5, torch.nan])
def test_rows_that_are_coarse_or_unknown_have_no_compiled_gradients(wrong):
    weights, states = rg.attend(*torch.randn(3, 1, 2, 9, 8)).weights, {rg.maps.Entropy(): [torch.zeros(1, 2, 9)]}
    terms, statistic = weights._compiled_terms(), weights.row_statistic[0].clone()
    assert compiled_reductions.differentiable(terms, statistic, states).keys() == states.keys()
    statistic[0, 1, 3] = wrong
    assert not compiled_reductions.differentiable(terms, statistic, states)
