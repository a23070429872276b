"""Additive scores by the compiled kernels against float64: tangents of every size, gradients, what is no number."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import drawn
import regard as rg
from kernels import LEVELS, at_level, every_level, in_dtype, needs_kernel, problems
from regard.engine.kernel import library

pytestmark = needs_kernel
#: name -> the pieces besides the score, the sizes (B, H, G, I, J, E), and the hidden units.
CASES = {
    "one query": (lambda: {}, (3, 1, 1, 1, 30, 16), 64),
    "one of each": (lambda: {}, (1, 1, 1, 1, 1, 1), 1),
    "no whole vectors": (lambda: {}, (2, 2, 2, 33, 70, 17), 23),
    "shared keys": (lambda: {"mask": rg.causal()}, (1, 4, 2, 150, 150, 8), 6),
    "padding": (lambda: {"mask": rg.padding([50, 3, 0])}, (3, 2, 1, 14, 50, 8), 33),
    "window": (lambda: {"mask": rg.causal() & rg.window(20)}, (1, 1, 1, 130, 230, 8), 16),
    "predicate": (lambda: {"mask": rg.mask_mod(lambda b, h, i, j: (i * 7 + j) % 3 > 0)}, (2, 2, 1, 45, 70, 5), 8),
    "biases under a cap": (
        lambda: {"bias": (rg.biases.T5Bias(2), rg.biases.Softcap(2.0), rg.ALiBi(2))},
        (1, 2, 2, 60, 77, 8),
        12,
    ),
    "clipped distances": (lambda: {"bias": rg.biases.ShawBias(9, 4), "mask": rg.causal()}, (1, 2, 1, 50, 60, 8), 9),
    "sink and temperature": (lambda: {"normalizer": rg.normalizers.Softmax(0.5, sink=0.5)}, (1, 2, 1, 30, 40, 8), 7),
    "many hidden units": (lambda: {}, (1, 1, 1, 20, 40, 4), 1000),
}
every_case = pytest.mark.parametrize("case", CASES)


class Projected(rg.scores.Additive):
    """Additive scores of queries and keys that are projected already."""

    def __init__(self, hidden):
        super().__init__(hidden, hidden, hidden)
        self.query, self.key = nn.Identity(), nn.Identity()

    def check(self, sizes, key_dim):
        pass


def made(case, size=1.0, dtype=torch.float32):
    """The pieces, and strided queries, keys and values of a case."""
    pieces, (B, H, G, I, J, E), hidden = CASES[case]
    attention = rg.Attention(Projected(hidden), **pieces()).to(dtype)
    shapes = (B, I, H, hidden), (B, J, G, hidden), (B, J, G, E)
    q, k, v = (torch.randn(shape).transpose(1, 2) for shape in shapes)
    return attention, [t.to(dtype).detach().requires_grad_() for t in (q * size, k * size, v)]


def results(attention, tensors, along, engine, positions=None):
    """The output, and the gradients of tensors and parameters."""
    output = attention(*tensors, engine=engine, positions=positions).output
    learned = [p for p in attention.parameters() if p.requires_grad]
    return output, *torch.autograd.grad(output, [*tensors, *learned], along.to(output.dtype))


def in_float64(attention, tensors, along, positions=None):
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    return results(copy.deepcopy(attention).double(), doubles, along, "dense", positions)


def assert_near(found, expected, dtype=torch.float32, least=0.05):
    """Every number is near the exact one, beside the largest of its tensor, or `least`.

    The error of a tangent is absolute, and the gradients of a parameter are sums of many that cancel.
    """
    share = 2e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    for one, other in zip(found, expected, strict=True):
        largest = max(float(other.detach().abs().amax()), least)
        torch.testing.assert_close(one.double(), other, rtol=share, atol=share * largest)


@every_level
@every_case
@pytest.mark.parametrize("size", [0.1, 1.0, 30.0, 500.0])
def test_outputs_and_gradients_are_those_of_float64(level, case, size):
    """With inputs of 30 some exponentials are packed, and with 500 few are: both ways to compute a score run."""
    attention, tensors = made(case, size)
    along = torch.randn(*tensors[0].shape[:3], tensors[2].shape[3])
    with at_level(level):
        found = results(attention, tensors, along, "kernel")
    assert_near(found, in_float64(attention, tensors, along))


@every_level
@pytest.mark.parametrize("case", ["no whole vectors", "window"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_summed_in_float32(level, case, dtype):
    attention, tensors = made(case, dtype=dtype)
    along = torch.randn(*tensors[0].shape[:3], tensors[2].shape[3]).to(dtype)
    with at_level(level):
        found = results(attention, tensors, along, "kernel")
    assert_near(found, in_float64(attention, tensors, along), dtype)


# The tangent


def scores_of(queries, keys, direction):
    """The score of query i with key i, as the kernels compute it: the log-sum-exp of a row with this key alone."""
    score = Projected(len(direction))
    score.direction.data = direction
    rows = (t[None, None] for t in (queries, keys, keys[:, :1]))
    weights = rg.Attention(score, mask=rg.masks.block_local(1))(*rows, engine="kernel").weights
    return weights.row_statistic[0][0, 0]


@every_level
@pytest.mark.parametrize("hidden", [1, 4, 7])
@pytest.mark.parametrize("shift", [0.0, 30.0, 1000.0])
@torch.no_grad()
def test_the_tangent_of_numbers_of_every_size(level, hidden, shift):
    """tanh(x + shift - shift) for positive and negative x of every exponent, in each hidden unit."""
    sizes = torch.arange(-149, 128, dtype=torch.float64).exp2()
    x = (sizes[:, None] * torch.tensor([1.0, -1.3, 1.9])).float().flatten()
    x = torch.cat((x, torch.linspace(-12, 12, 2001)))
    for unit in range(hidden):
        queries, keys = torch.randn(2, len(x), hidden)
        queries[:, unit], keys[:, unit] = x + shift, -shift
        direction = torch.zeros(hidden)
        direction[unit] = 1.0
        expected = torch.tanh(queries[:, unit].double() - shift)
        with at_level(level):
            found = scores_of(queries, keys, direction)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-7)
        assert (found[expected.abs() > 1 - 1e-9].abs() == 1).all()


@every_level
@torch.no_grad()
def test_infinite_inputs_have_a_tangent_and_others_do_not(level):
    """tanh(inf) is 1; NaN and inf - inf are NaN, in this row only."""
    inf, nan = torch.inf, torch.nan
    pairs = torch.tensor([[inf, 1.0], [1.0, -inf], [inf, inf], [inf, -inf], [nan, 1.0], [1.0, nan], [50.0, -50.5]])
    for hidden in (1, 6):
        queries, keys = torch.zeros(2, len(pairs), hidden)
        queries[:, -1], keys[:, -1] = pairs.T
        with at_level(level):
            found = scores_of(queries, keys, torch.ones(hidden))
        torch.testing.assert_close(found, torch.tanh(pairs.sum(-1)), equal_nan=True)


@every_level
@pytest.mark.parametrize("wrong", ["query", "key"])
@torch.no_grad()
def test_what_is_no_number_stays_in_the_rows_that_may_attend_to_it(level, wrong):
    attention, (q, k, v) = made("window")
    clean = attention.double()(*(t.double() for t in (q, k, v)), engine="dense").output
    if wrong == "query":
        q[:, :, 60] = torch.nan
    else:
        k[:, :, 160] = torch.nan
    pairs = attention.mask.dense(130, 230).expand(130, 230)
    touched = torch.arange(130) == 60 if wrong == "query" else pairs[:, 160]
    with at_level(level):
        found = attention.float()(q, k, v, engine="kernel").output[0, 0]
    assert found[touched].isnan().all()
    torch.testing.assert_close(found[~touched].double(), clean[0, 0, ~touched], rtol=1e-5, atol=1e-5)


@every_level
@pytest.mark.parametrize("size", [1e8, 1e15, 1e30])
@torch.no_grad()
def test_a_huge_direction(level, size):
    """Its products with denominators overflow; the scores do not."""
    queries, keys = torch.randn(2, 50, 8)
    direction = torch.randn(8) * size
    expected = (torch.tanh(queries.double() + keys.double()) * direction.double()).sum(-1)
    with at_level(level):
        found = scores_of(queries, keys, direction)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=8 * 4e-7 * size)


# What else the engine has to bear


@every_level
def test_dropout_drops_the_weights_that_every_engine_drops(level):
    attention, tensors = made("shared keys")
    attention.dropout, along, found = 0.4, torch.randn(1, 4, 150, 8), []
    for engine in ("kernel", "dense"):
        torch.manual_seed(7)
        with at_level(level):
            found.append(results(attention.train(), tensors, along, engine))
    assert_near(found[0], [t.double() for t in found[1]])


@every_level
def test_a_kept_plan_computes_with_the_direction_of_its_call(level):
    attention, (q, k, v) = made("no whole vectors")
    for _ in range(3):
        with at_level(level), torch.no_grad():
            attention.score.direction.normal_()
            found = attention(q, k, v, engine="kernel").output
            expected = attention(q, k, v, engine="dense").output
        assert_near([found], [expected.double()])


@pytest.mark.skipif(library.load_fast() is None, reason="without AVX2 no kernel is chosen")
def test_auto_takes_the_kernels_where_they_are_faster():
    def chosen(num_queries, learns):
        x, attention = torch.zeros(1, 1, 64, 40, requires_grad=learns), rg.Attention(rg.scores.Additive(40, 40, 64))
        return rg.plan(x[:, :, :num_queries], x, x, attention=attention.requires_grad_(learns)).engine

    assert (chosen(64, False), chosen(64, True)) == ("kernel", "kernel")
    assert (chosen(16, False), chosen(16, True)) == ("kernel", "dense")
    assert (chosen(1, False), chosen(1, True)) == ("dense", "dense")


def test_what_is_refused():
    class Doubled(rg.scores.Additive):
        def tile(self, query, key, grid):
            return 2 * super().tile(query, key, grid)

    x = torch.randn(1, 1, 5, 4)
    for score, reason in (
        (Doubled(4, 4, 8), "its weights are no softmax of scaled dot products or additive scores"),
        (rg.scores.Additive(4, 4, 1025), "vectors of width 1025 are wider than 1024"),
    ):
        with pytest.raises(rg.RegardError, match=reason):
            rg.Attention(score)(x, x, x, engine="kernel")
    with pytest.raises(rg.RegardError, match="no softmax of"):
        rg.Attention(rg.scores.Additive(4, 4, 8), normalizer=rg.normalizers.Sparsemax())(x, x, x, engine="kernel")


def test_the_projections_of_both_scores_learn():
    """Gradients reach the weights of the projections, by way of the prepared queries and keys."""
    for score in (rg.scores.Additive(6, 5, 11, bias=True), rg.scores.Concat(6, 5, 11, bias=True)):
        attention = rg.Attention(score, mask=rg.window(9))
        tensors = [torch.randn(2, 2, n, width, requires_grad=True) for n, width in ((30, 6), (40, 5), (40, 3))]
        along = torch.randn(2, 2, 30, 3)
        assert_near(results(attention, tensors, along, "kernel"), in_float64(attention, tensors, along))


@drawn.examples(40)
@given(problems(dtypes=(torch.float32,)), st.sampled_from([0.3, 3.0, 100.0]))
def test_drawn_masks_biases_and_positions(drawn_problem, size):
    """The pieces, sizes and strides that are drawn for dot products, under an additive score."""
    problem, tensors = drawn_problem
    attention, (q, k, v) = in_dtype(problem, tensors)
    attention.score = Projected(problem.sizes.D)
    tensors = [(size * t.detach()).requires_grad_() for t in (q, k)] + [v]
    along = torch.randn(*q.shape[:3], v.shape[3])
    expected = in_float64(attention, tensors, along, problem.positions)
    largest_grad = (along.norm(dim=-1).max() * v.detach().norm(dim=-1).max()).item()  # of a score, at most twice that
    least = max(0.1 * along[..., 0].numel() ** 0.5, 1.0) * max(largest_grad, 0.05)
    for level in LEVELS:
        with at_level(level):
            found = results(attention, tensors, along, "kernel", problem.positions)
        assert_near(found[:1], expected[:1])
        assert_near(found[1:], expected[1:], least=least)
