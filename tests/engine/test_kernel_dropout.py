"""Dropout of the kernel engine: it drops the weights that the hash of pieces/dropout.py names, at every level."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from test_kernel import within

import drawn
import regard as rg
from kernels import LEVELS, at_level, every_level, gradient_budget, in_dtype, needs_kernel, problems
from regard.base.shapes import Sizes
from regard.engine.dense import Dense
from regard.engine.kernel import Kernel
from regard.engine.problem import Problem
from regard.pieces.dropout import kept
from rounding import budget

pytestmark = needs_kernel
RATES = [1e-11, 1e-3, 0.1, 0.5, 0.9, 0.999, 1 - 1e-11]
#: Numbers around those that 31, 32 and 33 bits hold, and others of up to 63 bits.
WORDS = st.one_of(st.integers(0, 300), st.sampled_from([2**n + d for n in (31, 32, 33) for d in (-150, -1, 0, 1)]))
POSITIONS = WORDS | st.integers(0, 2**62)
SEEDS = WORDS | st.integers(-(2**63), 2**63)


def dropping(rate, seed, start, first_key, query, key, value):
    positions = rg.types.Positions(start, rg.types.Spans.of((first_key, first_key + key.shape[2])))
    sizes = Sizes.of(query, key, value)
    return Problem(rg.Attention(dropout=rate), query, key, value, positions, sizes, seed=seed)


def ones(count, length):
    """A unit vector for each token: (2, 3, count, length)."""
    return torch.eye(count, length).expand(2, 3, count, length).contiguous()


@drawn.examples(100)
@given(st.sampled_from(RATES), SEEDS, POSITIONS, POSITIONS, st.integers(1, 130), st.integers(1, 256))
def test_the_dropped_weights_are_those_of_the_hash_bit_for_bit(rate, seed, start, first_key, I, J):
    """With equal scores and a unit vector as each value, the output shows each weight. With one query in each
    channel of the output, the gradient of the values shows it once more.
    """
    nothing = torch.zeros(2, 3, max(I, J), 4, requires_grad=True)
    values = torch.randn(2, 3, J, I, requires_grad=True)
    shown = dropping(rate, seed, start, first_key, nothing[:, :, :I], nothing[:, :, :J], ones(J, J))
    learned = dropping(rate, seed, start, first_key, nothing[:, :, :I], nothing[:, :, :J], values)
    expected = kept(shown.grid, rate, seed).double() / (J * (1 - rate))
    for level in LEVELS:
        with at_level(level):
            output = Kernel().run(shown).output
            grad = torch.autograd.grad(Kernel().run(learned).output, values, ones(I, I))[0]
        for found in (output, grad.mT):
            torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


@every_level
@pytest.mark.parametrize("num_queries", [1, 3])
@torch.no_grad()
def test_few_queries_drop_the_same_weights(level, num_queries):
    nothing, values = torch.zeros(2, 3, num_queries, 4), ones(150, 150)
    shown = dropping(0.3, 5, 2**31, 2**31 - 100, nothing, torch.zeros(2, 3, 150, 4), values)
    with at_level(level):
        found = Kernel().run(shown).output
    torch.testing.assert_close(found.double(), kept(shown.grid, 0.3, 5).double() / (150 * 0.7), rtol=1e-6, atol=0)


def with_dropout(problem, attention, tensors, rate, seed):
    """The problem of these tensors, where weights are dropped."""
    attention = copy.copy(attention)
    attention.dropout = rate
    return Problem(attention, *tensors, problem.positions, problem.sizes, seed=seed)


@drawn.examples(60)
@given(problems(), st.sampled_from([0.1, 0.5, 0.8]), SEEDS)
def test_outputs_and_gradients_stay_within_their_budget(drawn_problem, rate, seed):
    problem, tensors = drawn_problem
    assume(len(problem.positions.keys.intervals) == 1)
    stays_within(problem, tensors, rate, seed)


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_stay_within_their_budget_where_values_cancel_in_the_output(dtype, rate):
    """The key of the value 0, too, has a gradient that is off by the rounding of the other keys."""
    tensors = [torch.randn(1, 1, *shape, dtype=dtype) for shape in ((1, 8), (30, 8), (30, 1))]
    positions, sizes = rg.types.Positions.aligned_to_end(1, 30), Sizes.of(*tensors)
    problem = Problem(rg.Attention(position=rg.RoPE(8)).double(), *(t.double() for t in tensors), positions, sizes)
    each = problem.query, problem.key, torch.eye(30, dtype=torch.float64).expand(1, 1, 30, 30)
    weights = Dense().run(with_dropout(problem, problem.attention, each, rate, 5)).output[0, 0, 0]
    first, numbers = int(weights.argmax()), tensors[2][0, 0, :, 0]
    numbers[first] = numbers[-1] = 0
    numbers[first] = -(weights @ numbers.double()) / weights[first]
    problem.value.copy_(tensors[2])
    stays_within(problem, tensors, rate, 5)


def stays_within(problem, tensors, rate, seed):
    """The outputs and gradients of the kernels, with this dropout, are as near to float64 as rounding leaves them."""
    attention, inputs = in_dtype(problem, tensors)
    dtype = inputs[0].dtype
    exact = with_dropout(
        problem, problem.attention, [t.detach().double().requires_grad_() for t in tensors], rate, seed
    )
    problem = with_dropout(problem, attention, inputs, rate, seed)
    dense = Dense().run(exact).output
    along = torch.randn(dense.shape, dtype=dtype)
    exact_tensors = [exact.query, exact.key, exact.value, *(p for p in exact.attention.parameters() if p.requires_grad)]
    expected = torch.autograd.grad(dense, exact_tensors, along.double(), allow_unused=True)
    bounds = [bound / (1 - rate) for bound in gradient_budget(exact, along.double(), dtype)]
    output, bound = budget(exact, dtype)
    wanted = [*inputs, *(p for p in attention.parameters() if p.requires_grad)]
    for level in LEVELS:
        with at_level(level):
            seen = Kernel().run(with_dropout(problem, attention, inputs, rate, seed)).output
            found = torch.autograd.grad(seen, wanted, along, allow_unused=True)
        within(seen, output, bound / (1 - rate))
        for mine, theirs, gradient_bound in zip(found, expected, bounds, strict=False):
            if theirs is not None and mine is not None:
                within(mine, theirs, gradient_bound)
            else:
                assert all(t is None or not t.any() for t in (mine, theirs)), "one engine omits a gradient"


def test_the_weights_of_a_map_are_those_before_dropout():
    q, k, v = torch.randn(3, 1, 2, 300, 16).unbind()
    dropped = rg.Attention(mask=rg.causal(), dropout=0.5)(q, k, v, engine="kernel")
    plain = rg.Attention(mask=rg.causal())(q, k, v, engine="kernel")
    assert torch.equal(dropped.weights.dense(), plain.weights.dense())
    assert not torch.allclose(dropped.output, plain.output, atol=0.1)


def test_each_call_drops_other_weights_and_the_same_ones_after_the_same_seed():
    """Also where the plan of the first call is used again."""
    nothing, values = torch.zeros(1, 2, 64, 4, requires_grad=True), torch.eye(64).expand(1, 2, 64, 64)
    attention = rg.Attention(dropout=0.5)

    def patterns():
        torch.manual_seed(0)
        return [attention(nothing, nothing, values, engine="kernel").output != 0 for _ in range(4)]

    first, second = patterns(), patterns()
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert not any(torch.equal(first[0], other) for other in first[1:])
