"""The chosen engine and the compiled indexer at every level of the processor, against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import drawn
import regard as rg
from kernels import (
    LEVELS,
    at_level,
    every_level,
    gradient_budget,
    in_dtype,
    needs_kernel,
    problems,
    weight_errors,
    within,
)
from regard.base.positions import Positions
from regard.base.spans import Spans
from regard.engine.kernel.indexer import indexed
from regard.pieces.chosen import NO_ID
from regard.reference import reference
from rounding import FLOAT32, budget, unit_roundoff

pytestmark = needs_kernel
TINY = torch.finfo(torch.float32).tiny


@drawn.examples(60)
@given(problems(chooses=True))
@torch.no_grad()
def test_outputs_and_weights_stay_within_their_budget(drawn_problem):
    problem, tensors = drawn_problem
    attention, inputs = in_dtype(problem, tensors)
    dtype = inputs[0].dtype
    output, bound = budget(problem, dtype)
    weights = torch.from_numpy(reference(problem)[1])
    share = 2 * weight_errors(problem, unit_roundoff(dtype)) + (2 * problem.sizes.J + 40) * FLOAT32
    for level in LEVELS:
        with at_level(level):
            seen = attention(*inputs, positions=problem.positions, engine="chosen")
        assert seen.output.dtype == dtype
        within(seen.output, output, bound)
        within(seen.weights.dense(), weights, share * weights + TINY)


@drawn.examples(60)
@given(problems(chooses=True), st.data())
def test_gradients_stay_within_their_budget(drawn_problem, data):
    problem, tensors = drawn_problem
    attention, inputs = in_dtype(problem, tensors)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    dense = problem.attention(*exact, positions=problem.positions, engine="dense").output
    along = drawn.LAYOUTS[data.draw(drawn.layouts())](torch.randn(dense.shape, dtype=inputs[0].dtype))
    learned = [p for p in problem.attention.parameters() if p.requires_grad]
    expected = torch.autograd.grad(dense, [*exact, *learned], along.double(), allow_unused=True)
    bounds = gradient_budget(problem, along.double(), inputs[0].dtype)
    wanted = [*inputs, *(p for p in attention.parameters() if p.requires_grad)]
    for level in LEVELS:
        with at_level(level):
            output = attention(*inputs, positions=problem.positions, engine="chosen").output
            found = torch.autograd.grad(output, wanted, along, allow_unused=True)
        for mine, theirs, bound in zip(found, expected, bounds, strict=True):
            within(mine, theirs, bound)


def chosen_by(mask, n=300, heads=4, **pieces):
    """An attention to chosen keys that is long enough for the engine, and its inputs."""
    torch.manual_seed(0)
    return rg.Attention(mask=mask, **pieces), torch.randn(3, 1, heads, n, 16).unbind(0)


IDS = torch.arange(300)[None, None, :, None] - torch.tensor([0, 1, 40])


def test_it_is_chosen_for_long_calls_and_computes_the_chosen_pairs():
    attention, inputs = chosen_by(rg.causal() & rg.masks.chosen_keys(IDS))
    planned = rg.plan(*inputs, attention=attention)
    assert planned.engine == "chosen"
    assert planned.cost.pairs == 4 * 300 * 3


def test_few_queries_and_many_chosen_keys_run_on_other_engines():
    for mask, n in ((rg.masks.chosen_keys(IDS[:, :, :50]), 50), (rg.masks.chosen_keys(IDS, size=100), 300)):
        attention, inputs = chosen_by(mask, n)
        assert rg.plan(*inputs, attention=attention).engine != "chosen"


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ({"mask": rg.causal()}, "chosen keys"),
        ({"mask": rg.causal() | rg.masks.chosen_keys(IDS)}, "chosen keys"),
        ({"mask": rg.masks.chosen_keys(IDS), "bias": rg.ALiBi(4)}, "adds no biases"),
        ({"mask": rg.masks.chosen_keys(IDS), "dropout": 0.1}, "drops no weights"),
        ({"mask": rg.masks.chosen_keys(IDS), "normalizer": rg.normalizers.Sparsemax()}, "no softmax"),
    ],
)
def test_a_refusal_says_why(pieces, reason):
    attention, inputs = chosen_by(**pieces)
    with pytest.raises(rg.RegardError, match=f"the chosen engine cannot run .*{reason}"):
        attention(*inputs, engine="chosen")


@every_level
def test_a_long_row_of_single_keys_is_read_in_parts(level):
    """More keys than are gathered at once, and than stay in the cache."""
    torch.manual_seed(1)
    ids = torch.rand(1, 1, 30, 5000).argsort(-1)[..., :700]
    q, k, v = torch.randn(1, 4, 30, 16), torch.randn(1, 2, 5000, 16), torch.randn(1, 2, 5000, 16)
    attention, along = rg.Attention(mask=rg.masks.chosen_keys(ids, start=4970)), torch.randn(1, 4, 30, 16)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    exact = torch.autograd.grad(attention(*doubles, engine="dense").output, doubles, along.double())
    with at_level(level):
        found = torch.autograd.grad(attention(*leaves, engine="chosen").output, leaves, along)
    for mine, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-6)


def test_the_result_does_not_depend_on_the_number_of_threads():
    attention, inputs = chosen_by(
        rg.causal() & rg.masks.chosen_keys(torch.randint(0, 2000, (1, 2, 2000, 90)), num_heads=4), 2000
    )
    leaves = [t.clone().requires_grad_() for t in inputs]
    results, threads = [], torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            output = attention(*leaves, engine="chosen").output
            results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("size", [1, 50])
def test_keys_that_no_query_chose_have_no_effect_also_if_they_are_nan(size):
    attention, (q, k, v) = chosen_by(rg.causal() & rg.masks.chosen_keys(IDS[:, :, :, :2] // 100 * 0, size=size))
    expected = attention(q, k, v, engine="dense").output
    k[:, :, 60:], v[:, :, 60:] = torch.nan, torch.inf
    torch.testing.assert_close(attention(q, k, v, engine="chosen").output, expected, rtol=1e-4, atol=1e-5)


# The indexer


def first_best(scores, k):
    """Columns of the k greatest scores above -inf, of equal ones the first."""
    order = np.argsort(-scores, kind="stable")[:k]
    return sorted(int(j) for j in order if scores[j] > -math.inf)


@st.composite
def indexed_calls(draw):
    """Index queries, keys and weights that are integers, so their scores are exact and often equal; k and a mask."""
    B, N, I, J, W = (draw(st.integers(1, n)) for n in (2, 4, 130, 300, 20))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    most = draw(st.sampled_from([1, 2, 30]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    shapes = (B, N, I, W), (B, 1, J, W), (B, 1, I, N)
    tensors = [drawn.LAYOUTS[draw(drawn.layouts())](torch.randint(-most, most + 1, s).to(dtype)) for s in shapes]
    positions = Positions(draw(st.integers(0, 2)) + max(0, J - I), Spans(((0, J),)))
    masks = [None, rg.causal(), rg.causal() & rg.window(40), rg.masks.dilated(3, 60), rg.padding([J - J // 3] * B)]
    return tensors, draw(st.integers(1, 320)), positions, draw(st.sampled_from(masks))


@drawn.examples(80)
@given(indexed_calls())
def test_the_indexer_chooses_the_greatest_scores_and_of_equal_ones_the_first(drawn_call):
    (query, key, weights), k, positions, mask = drawn_call
    weights = weights[:, 0]
    products = (query.double() @ key.double().mT).relu()
    scores = (products * weights.double().transpose(1, 2)[..., None]).sum(1)
    B, I, J = scores.shape
    grid = rg.types.Grid.whole(positions, B, 1, I)
    if mask is not None:
        scores = scores.masked_fill(~mask.allowed(grid)[:, 0], -torch.inf)
    for level in LEVELS:
        with at_level(level):
            found = indexed(query, key, weights, k, positions, mask, 1)
        assert found.shape == (B, I, min(k, J))
        for entry, i in np.ndindex(B, I):
            chosen = [j for j in found[entry, i].tolist() if j != NO_ID]
            assert chosen == first_best(scores[entry, i].numpy(), k)


def test_the_keys_of_every_head_are_candidates_of_the_indexer():
    """Scores of index vectors choose among the keys that some query head may attend to."""
    torch.manual_seed(0)
    query, key, weights = (torch.randint(-9, 10, s).float() for s in ((1, 2, 20, 4), (1, 1, 20, 4), (1, 20, 2)))
    allowed = torch.rand(1, 3, 20, 20) > 0.7
    attention = rg.Attention(mask=rg.mask_tensor(allowed), selection=rg.selections.TokenIndexer(4))
    index = {"index_query": query, "index_key": key, "index_weights": weights}
    weights_of_heads = attention(*torch.randn(3, 1, 3, 20, 8), **index).weights.dense()
    scores = ((query @ key.mT).relu() * weights.transpose(1, 2)[..., None]).sum(1)[0]
    scores = scores.masked_fill(~allowed[0].any(0), -torch.inf)
    for i in range(20):
        chosen = torch.zeros(20, dtype=torch.bool)
        chosen[first_best(scores[i].numpy(), 4)] = True
        assert torch.equal(weights_of_heads[0, :, i] > 0, chosen & allowed[0, :, i])


@every_level
def test_the_indexer_of_random_numbers_leaves_out_no_key_with_a_clearly_greater_score(level):
    torch.manual_seed(3)
    query, key, weights = torch.randn(1, 4, 400, 32), torch.randn(1, 1, 400, 32), torch.randn(1, 400, 4)
    positions = Positions.aligned_to_end(400, 400)
    with at_level(level):
        found = indexed(query, key, weights, 50, positions, rg.causal(), 1)
    scores = ((query.double() @ key.double().mT).relu() * weights.double().mT[..., None]).sum(1)[0]
    for i, row in enumerate(found[0].tolist()):
        chosen = [j for j in row if j != NO_ID]
        assert len(chosen) == min(50, i + 1)
        assert chosen == sorted(set(chosen))
        assert max(chosen) <= i
        others = [j for j in range(i + 1) if j not in chosen]
        if others:
            assert scores[i, others].max() <= scores[i, chosen].min() + 1e-4


def test_a_key_of_nan_is_the_first_choice_and_a_hidden_one_is_not_chosen():
    query, key, weights = torch.ones(1, 2, 6, 4), torch.ones(1, 1, 6, 4), torch.ones(1, 6, 2)
    key[:, :, 3] = torch.nan
    found = indexed(query, key, weights, 1, Positions.aligned_to_end(6, 6), rg.causal(), 1)
    assert found[0, :, 0].tolist() == [0, 0, 0, 3, 3, 3]
