"""Every reduction that the kernels compute, at every level, against its definition on float64 weights of the
reference.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import drawn
import regard as rg
from exact_reductions import check, some_reductions
from kernels import DTYPES, at_level, every_level, in_dtype, needs_kernel, problems, weight_errors
from regard.base.shapes import Sizes
from regard.engine.kernel import library
from regard.engine.problem import Problem
from regard.maps import compiled_reductions
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


@pytest.fixture
def no_tiles(monkeypatch):
    """Computing a tile of weights is an error."""

    def refused(self):
        raise AssertionError("tiles were computed")

    monkeypatch.setattr(rg.AttentionMap, "tiles", refused)


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


MASKS = {
    "none": lambda: None,
    "causal": rg.causal,
    "window": lambda: rg.causal() & rg.window(40),
    "documents": lambda: rg.causal() & rg.documents([60, 150, 63]),
    "padding": lambda: rg.padding([130, 0]),
    "predicate": lambda: rg.mask_mod(lambda b, h, i, j: (i + j + h) % 3 > 0),
    "no key": lambda: rg.causal() & ~rg.window(900),
}


def inputs(length=273, heads=(6, 2), dtype=torch.float32, width=16):
    shapes = ((2, heads[0], length, width), *[(2, heads[1], length, width)] * 2)
    return [torch.randn(shape).to(dtype) for shape in shapes]


@every_level
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
@pytest.mark.usefixtures("no_tiles")
def test_no_tile_is_computed(mask, dtype, level):
    """Neither for the reductions of a profile and of the page."""
    q, k, v = inputs(dtype=dtype)
    attention = rg.Attention(mask=MASKS[mask]())
    with at_level(level):
        seen = attention(q, k, v, engine="kernel").weights
        states = seen.reduction_states((*some_reductions(2, 6, 273, 273), allowed := Allowed(seen)))
    problem = Problem(attention, *(t.double() for t in (q, k, v)), seen.positions, Sizes.of(q, k, v))
    _, w = (torch.from_numpy(a) for a in reference(problem))
    counts = states.pop(allowed)[0]
    check(states, w, problem.grid.distance, 1e-4)
    dense = torch.ones(273, 273) if attention.mask is None else attention.mask.dense(273, num_heads=6)
    assert torch.equal(counts, dense.expand(2, 6, 273, 273).sum(-1).float())


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
