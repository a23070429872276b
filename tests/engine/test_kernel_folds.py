"""Statistics that the forward kernel computes with the output, beside their definitions in float64."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import drawn
import regard as rg
from exact_reductions import check
from kernels import at_level, every_level, in_dtype, needs_kernel, problems, statistic_budget, weight_errors
from regard.engine.kernel import library
from regard.maps import compiled_reductions
from regard.maps.gradients import _ReductionReading
from regard.maps.scored_map import ScoredMap
from regard.pieces.normalizer import any_coarse
from regard.reference import reference
from rounding import FLOAT32, unit_roundoff

pytestmark = needs_kernel

FOLDED = (rg.maps.Entropy(), rg.maps.Distance(), rg.maps.TopLinks(1))


@pytest.fixture(autouse=True)
def any_level(monkeypatch):
    monkeypatch.setattr(library, "LOWEST_LEVEL", 0)


def no_pass():
    """A block in which statistics that need a pass of their own are an error."""
    return mock.patch.multiple(
        ScoredMap, _compiled_terms=mock.Mock(side_effect=AssertionError), tiles=mock.Mock(side_effect=AssertionError)
    )


def inputs(length=273, heads=(6, 2), dtype=torch.float32, width=16):
    shapes = ((2, heads[0], length, width), *[(2, heads[1], length, width)] * 2)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def states_of(seen):
    """The states after the call, all of which it computed: distances only if no position lies between the keys."""
    has_gaps = len(seen.weights.positions.keys.intervals) > 1
    assert set(seen.weights.known_states) == {f for f in FOLDED if not (has_gaps and isinstance(f, rg.maps.Distance))}
    return seen.weights.reduction_states(FOLDED)


@settings(max_examples=60)
@given(problem=problems(), level=st.sampled_from(library.VECTORS), learns=st.booleans())
def test_drawn_problems(problem, level, learns):
    problem, tensors = problem
    attention, leaves = in_dtype(problem, tensors)
    leaves = [t.detach().requires_grad_(learns) for t in leaves]
    level = min(level, library.load().level_name, key=library.LEVELS.index)
    s = problem.sizes
    with at_level(level), mock.patch.object(rg.engine.kernel.attention, "FEW_ROWS", 0):
        seen = attention(*leaves, positions=problem.positions, engine="kernel", statistics=FOLDED)
    if not seen.weights.known_states:
        assert any_coarse(seen.weights.row_statistic[0])
        return
    _, w = (torch.from_numpy(a) for a in reference(problem))
    share = weight_errors(problem, unit_roundoff(tensors[0].dtype)).nan_to_num(0.0).amax().detach()
    tolerance = float(share) + (s.I + s.J + 60) * FLOAT32
    with torch.no_grad():
        check(states_of(seen), w, problem.grid.distance, tolerance)


def exact_statistics(weights, distance):
    """The entropy and the distance of each row, with derivatives."""
    return torch.special.entr(weights.masked_fill(weights == 0, 1.0)).sum(-1), (weights * distance.abs()).sum(-1)


@settings(max_examples=60)
@given(problem=problems(), level=st.sampled_from(library.VECTORS), seed=st.integers(0, 2**31))
def test_drawn_gradients(problem, level, seed):
    problem, tensors = problem
    attention, inputs = in_dtype(problem, tensors)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    distance = problem.grid.distance
    along = (
        torch.randn(2, *inputs[0].shape[:3], generator=torch.Generator().manual_seed(seed))
        / torch.tensor([1, 50])[:, None, None, None]
    )
    learned = [p for p in problem.attention.parameters() if p.requires_grad]
    dense = problem.attention(*exact, positions=problem.positions, engine="dense").weights.dense()
    expected = gradients(exact_statistics(dense, distance), [*exact[:2], *learned], along.double())
    level = min(level, library.load().level_name, key=library.LEVELS.index)
    with at_level(level), mock.patch.object(compiled_reductions, "FEWEST_PAIRS", 0), only_compiled(problem):
        seen = attention(*inputs, positions=problem.positions, engine="kernel", statistics=FOLDED[:2])
        if any_coarse(seen.weights.row_statistic[0]):
            return
        wanted = [*inputs[:2], *(p for p in attention.parameters() if p.requires_grad)]
        found = gradients(seen.statistics, wanted, along)
    for mine, theirs, bound in zip(found, expected, statistic_budget(problem, along, inputs[0].dtype), strict=True):
        if theirs is not None and mine is not None:
            within(mine, theirs, bound)
        else:
            assert all(t is None or not t.any() for t in (mine, theirs)), "one engine omits a gradient"


def gradients(statistics, wanted, along):
    loss = sum((grad * statistic).sum() for grad, statistic in zip(along, statistics, strict=True))
    return torch.autograd.grad(loss, wanted, allow_unused=True)


def only_compiled(problem):
    """A block in which gradients by rows of weights are an error, unless positions lie between the keys."""
    if len(problem.positions.keys.intervals) > 1:
        return nullcontext()
    return mock.patch.object(_ReductionReading, "_blocks", side_effect=AssertionError("rows of weights"))


def within(mine, theirs, bound):
    off = (mine.double() - theirs).abs()
    assert (off <= bound).all(), f"off by {float((off / bound).nan_to_num(torch.inf).max()):.3g} times the bound"


@every_level
@torch.no_grad()
def test_large_scores_that_no_later_key_may_lose(level):
    """Scores from -900 to 900, whose greatest comes last, first, or in the middle: log p changes at every block."""
    s = torch.linspace(-900, 900, 800)
    orders = torch.stack([s, s.flip(0), s.roll(400), s[torch.randperm(800)], s * 1e-6, torch.zeros(800)])
    key = orders[None, :, :, None]
    query = torch.ones(1, 6, 200, 1)
    with at_level(level):
        seen = rg.attend(query, key, key, scale=1.0, engine="kernel", statistics=FOLDED)
    w = torch.softmax(query.double() @ key.double().mT, -1)
    check(states_of(seen), w, seen.weights.grid.distance, 900 * 8 * FLOAT32)


@pytest.mark.parametrize(
    "pieces",
    [
        {"mask": rg.causal() & rg.window(3)},
        {"mask": rg.mask_tensor(torch.rand(230, 230) < 0.02)},
        {"mask": rg.padding(torch.tensor([0, 190]))},
        {"normalizer": rg.normalizers.Softmax(sink=40.0), "mask": rg.causal()},
        {"normalizer": rg.normalizers.Softmax(sink=-40.0)},
        {"normalizer": rg.normalizers.LearnedSink(6)},
    ],
    ids=["window", "sparse", "empty rows", "large sink", "small sink", "sink"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_no_pass_follows(pieces, dtype):
    q, k, v = inputs(230, dtype=dtype)
    attention = rg.Attention(**pieces)
    with no_pass():
        seen = attention(q, k, v, engine="kernel", statistics=FOLDED)
        states = states_of(seen)
    exact = attention(*(t.double() for t in (q, k, v)), engine="dense").weights
    check(states, exact.dense(), exact.grid.distance, 1e-5)


@pytest.mark.parametrize(("I", "J"), [(1, 1), (1, 300), (300, 1), (2, 5), (0, 7), (7, 0)])
@torch.no_grad()
def test_few_queries_or_keys(I, J):
    q, k = torch.randn(1, 4, I, 8), torch.randn(1, 2, J, 8)
    seen = rg.attend(q, k, k, statistics=FOLDED)
    states = {reduction: seen.weights.reduction_states(FOLDED)[reduction] for reduction in FOLDED}
    if 0 in (I, J):
        assert all(not state[0].any() for state in states.values())
        return
    check(states, seen.weights.dense().double(), seen.weights.grid.distance, 1e-4)


@torch.no_grad()
@pytest.mark.parametrize("layout", drawn.LAYOUTS)
def test_any_strides(layout):
    tensors = [drawn.LAYOUTS[layout](t) for t in inputs(140)]
    seen = rg.attend(*tensors, is_causal=True, engine="kernel", statistics=FOLDED)
    check(states_of(seen), seen.weights.dense().double(), seen.weights.grid.distance, 1e-4)


@torch.no_grad()
def test_the_output_has_the_same_bits():
    q, k, v = inputs(600)
    plain = rg.attend(q, k, v, is_causal=True, engine="kernel")
    seen = rg.attend(q, k, v, is_causal=True, engine="kernel", statistics=FOLDED)
    assert torch.equal(plain.output, seen.output)
    assert torch.equal(plain.weights.row_statistic[0], seen.weights.row_statistic[0])


@torch.no_grad()
def test_threads_change_no_bit():
    q, k, v = inputs(700)
    before, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        seen = rg.attend(q, k, v, is_causal=True, engine="kernel", statistics=FOLDED)
        results.append([t for state in states_of(seen).values() for t in state])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@torch.no_grad()
def test_equal_scores_have_the_first_key():
    x = torch.zeros(1, 2, 400, 8)
    seen = rg.attend(x, x, x, engine="kernel", statistics=FOLDED)
    assert not states_of(seen)[rg.maps.TopLinks(1)][1].any()


@torch.no_grad()
def test_coarse_and_nan_rows_are_left_to_a_pass():
    q, k, v = inputs()
    seen = rg.Attention(rg.Dot(1e6))(q, k, v, engine="kernel", statistics=FOLDED)
    assert any_coarse(seen.weights.row_statistic[0])
    assert not seen.weights.known_states
    q[0, 0, 3] = torch.nan
    seen = rg.attend(q, k, v, engine="kernel", statistics=FOLDED)
    assert not seen.weights.known_states
    assert seen.statistics[0][0, 0, 3].isnan()


def test_dropout_changes_no_statistic():
    q, k, v = inputs(200)
    plain, dropping = (rg.attend(q, k, v, dropout_p=p, engine="kernel", statistics=FOLDED) for p in (0.0, 0.5))
    assert not torch.equal(plain.output, dropping.output)
    for mine, theirs in zip(states_of(plain).values(), states_of(dropping).values(), strict=True):
        assert all(map(torch.equal, mine, theirs))


# attend(statistics=)


ALL = (*FOLDED, rg.maps.TopLinks(3), rg.maps.KeyTotals(), rg.maps.Entropy())


@pytest.mark.parametrize("engine", ["auto", "reference", "dense", "fused", "kernel", "blocked"])
@torch.no_grad()
def test_every_engine_has_statistics(engine):
    q, k, v = inputs(150)
    seen = rg.attend(q, k, v, is_causal=True, engine=engine, statistics=ALL)
    w = rg.attend(q, k, v, is_causal=True, engine="dense").weights
    for mine, theirs in zip(seen.statistics, w.summarize(*ALL), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_statistics_of_other_layouts_and_mechanisms():
    q, k, v = inputs(150, heads=(6, 6))
    seen = rg.attend(*(t.transpose(1, 2) for t in (q, k, v)), layout="blhd", statistics=ALL)
    assert seen.output.shape == (2, 150, 6, 16)
    torch.testing.assert_close(seen.statistics[0], rg.attend(q, k, v).weights.entropy())
    linear = rg.mechanism("linear").build()(q, k, v, statistics=[rg.maps.KeyTotals()])
    torch.testing.assert_close(linear.statistics, linear.weights.summarize(rg.maps.KeyTotals()))


def test_gradients_reach_statistics():
    q, k, v = (t.requires_grad_() for t in inputs(150))
    known = rg.attend(q, k, v, is_causal=True, engine="kernel", statistics=[rg.maps.Entropy()]).statistics[0]
    dense = rg.attend(q, k, v, is_causal=True, engine="dense").weights.dense()
    exact = torch.special.entr(dense.masked_fill(dense == 0, 1.0)).sum(-1)
    mine, theirs = (torch.autograd.grad(entropy.square().sum(), (q, k)) for entropy in (known, exact))
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_results_are_the_callers_own():
    q, k, v = inputs(150)
    seen = rg.attend(q, k, v, engine="kernel", statistics=[rg.maps.Distance()])
    before = seen.statistics[0].clone()
    seen.statistics[0].zero_()
    assert torch.equal(seen.weights.distance(), before)


@torch.no_grad()
def test_a_changed_tensor_is_refused():
    q, k, v = inputs(150)
    weights = rg.attend(q, k, v, engine="kernel", statistics=FOLDED).weights
    q.zero_()
    with pytest.raises(rg.RegardError, match="changed in place"):
        weights.entropy()


@pytest.mark.parametrize("wrong", [rg.maps.Entropy(), rg.maps.Entropy, [rg.maps.Entropy], ["entropy"], 3])
def test_wrong_statistics(wrong):
    with pytest.raises(rg.RegardError, match=r"attend\(statistics=.*Entropy\(\)"):
        rg.attend(*inputs(5), statistics=wrong)


@torch.no_grad()
def test_a_plan_that_is_kept_has_statistics():
    q, k, v = inputs(300)
    for n in range(3):
        seen = rg.attend(q + n, k, v, is_causal=True, engine="kernel", statistics=FOLDED if n else ())
    check(states_of(seen), seen.weights.dense().double(), seen.weights.grid.distance, 1e-4)


# watch(keep="statistics")


def watched_statistics(run, **options):
    with torch.no_grad(), rg.watch(keep="statistics", reductions=FOLDED, **options) as seen:
        run()
    (statistics,) = seen.statistics.values()
    return statistics


def test_a_watched_call_needs_no_pass():
    q, k, v = inputs(300)
    with no_pass():
        statistics = watched_statistics(lambda: rg.attend(q, k, v, is_causal=True, engine="kernel"))
    weights = rg.attend(q, k, v, is_causal=True).weights
    check({r: compiled_state(statistics.of(r)) for r in FOLDED}, weights.dense().double(), weights.grid.distance, 1e-4)


def compiled_state(result):
    return list(result) if isinstance(result, tuple) else [result]


def test_only_what_is_left_needs_a_pass():
    q, k, v = inputs(300)
    add_statistics = mock.patch.object(compiled_reductions, "add_statistics", wraps=compiled_reductions.add_statistics)
    with add_statistics as add, torch.no_grad(), rg.watch(keep="statistics"):
        rg.attend(q, k, v, is_causal=True, engine="kernel")
    (call,) = add.call_args_list
    assert set(call.args[3]) == {"received", "shift"}
