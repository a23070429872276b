"""The laws: each holds for every mechanism of the catalog, found automatically."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch.autograd import gradcheck

import regard as rg
from cataloged import SINGLE, WITH_TENSORS
from regard.catalog import mechanisms
from regard.diagnosis.laws import (
    LAWS,
    agrees_with_the_reference,
    dense_slope_is_that_of_the_reference,
    gradients_agree_with_dense,
    problem_of,
    runs,
    sees_the_future,
)
from regard.engine import ENGINES
from rounding import budget

pytestmark = pytest.mark.usefixtures("small_blocks")
NAMES = SINGLE
every_mechanism = pytest.mark.parametrize("name", NAMES)
and_those_with_tensors = pytest.mark.parametrize("name", [*NAMES, *WITH_TENSORS])
TORCH_ENGINES = sorted(set(ENGINES) - {"reference"})


@pytest.mark.parametrize("law", LAWS)
@and_those_with_tensors
def test_the_laws_hold(name, law):
    LAWS[law](mechanisms()[name].example)


def test_the_laws_of_causal_masks_have_mechanisms():
    """They pass for a mechanism that sees the future, so some must not."""
    causal = [name for name in NAMES if not sees_the_future(*mechanisms()[name].example()[:3])]
    assert {"masked", "rope", "linear", "sliding_window", "grouped_query"} <= set(causal) and "cross" not in causal


@pytest.mark.parametrize("name", ["self_attention", "cross"])
def test_the_law_of_empty_rows_empties_the_first_row_alone(name, monkeypatch):
    """In engines that work by blocks too."""
    empty = {}

    def recorded(engine, *example):
        seen = runs(engine, *example)
        if seen is not None:
            empty[engine] = (seen.weights.dense() == 0).all(-1).any(0).any(0).nonzero().flatten().tolist()
        return seen

    monkeypatch.setattr("regard.diagnosis.laws.runs", recorded)
    LAWS["an empty row gives zeros and finite gradients"](mechanisms()[name].example)
    assert empty == {engine: [0] for engine in empty} and {"dense", "blocked"} <= set(empty)


@pytest.mark.parametrize("engine", TORCH_ENGINES)
@and_those_with_tensors
def test_engines_agree_with_the_reference(name, engine):
    agrees_with_the_reference(engine, mechanisms()[name].example())


@pytest.mark.parametrize("engine", sorted(set(TORCH_ENGINES) - {"dense"}))
@and_those_with_tensors
def test_gradients_agree_between_engines(name, engine):
    gradients_agree_with_dense(engine, mechanisms()[name].example())


@and_those_with_tensors
def test_gradients_are_slopes_of_the_reference(name):
    dense_slope_is_that_of_the_reference(mechanisms()[name].example())


@pytest.mark.parametrize("engine", ["blocked", "dense"])
@every_mechanism
def test_gradients_agree_with_finite_differences(name, engine):
    attention, q, k, v = mechanisms()[name].example(batch=1, queries=6, keys=mechanisms()[name].sizes.get("keys", 6))
    inputs = [t[:, :, :6].clone().requires_grad_() for t in (q, k, v)]

    def output(query, key, value):
        return attention(query, key, value, engine=engine).output

    assert gradcheck(output, inputs, eps=1e-6, atol=1e-5, fast_mode=True)
    torch.testing.assert_close(jacobian(output, inputs), slopes(output, inputs, eps=1e-6), rtol=1e-3, atol=1e-5)


def jacobian(function, inputs):
    """The derivative of each number of the output (columns) with respect to each number of the inputs (rows)."""
    output = function(*inputs)
    units = torch.eye(output.numel(), dtype=output.dtype).view(-1, *output.shape)
    gradients = [torch.autograd.grad(output, inputs, unit, retain_graph=True) for unit in units]
    return torch.stack([torch.cat([g.flatten() for g in each]) for each in gradients], -1)


@torch.no_grad()
def slopes(function, inputs, eps):
    """The same by central differences, in one call: each step of an input is an entry of the batch.

    `gradcheck` makes two calls for each number of the inputs, which took four minutes for all mechanisms.
    """
    sizes = [x.numel() for x in inputs]
    steps = eps * torch.eye(sum(sizes), dtype=inputs[0].dtype)
    parts = torch.cat([steps, -steps]).split(sizes, -1)
    up, down = function(*(x + part.view(-1, *x.shape[1:]) for x, part in zip(inputs, parts, strict=True))).chunk(2)
    return (up - down).flatten(1) / (2 * eps)


@every_mechanism
@torch.no_grad()
def test_a_batch_gives_what_its_entries_give_alone(name):
    attention, q, k, v = mechanisms()[name].example(batch=3)
    whole = attention(q, k, v)
    for b in range(3):
        alone = attention(q[b : b + 1], k[b : b + 1], v[b : b + 1])
        torch.testing.assert_close(whole.output[b : b + 1], alone.output, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(whole.weights[b], alone.weights[0], rtol=1e-9, atol=1e-10)


def exact_problem(name, dtype):
    """A mechanism and its inputs, rounded to `dtype`, as they are and in float64."""
    attention, *inputs = mechanisms()[name].example(dtype=dtype)
    return (attention, *inputs), problem_of(copy.deepcopy(attention).double(), *(t.double() for t in inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every_mechanism
@torch.no_grad()
def test_low_precision_stays_within_its_budget(name, dtype):
    """The rounding of inputs is given to both; what remains is the arithmetic inside, element by element."""
    example, problem = exact_problem(name, dtype)
    output, allowed = budget(problem, dtype)
    for engine in ("auto", "dense", "blocked"):
        seen = example[0](*example[1:], engine=engine)
        assert ((seen.output.double() - output).abs() <= allowed).all()
        assert seen.weights.dense().dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_mechanism
@torch.no_grad()
def test_the_budget_has_no_room_for_a_mistake(name, dtype):
    """Zeros, scores without their factor and a mask that is off by one key are all beyond it."""
    _, problem = exact_problem(name, dtype)
    output, allowed = budget(problem, dtype)
    attention, inputs = problem.attention, (problem.query, problem.key, problem.value)
    wrong = {"zeros": torch.zeros_like(output)}
    if isinstance(attention.score, rg.Dot) and not isinstance(attention.normalizer, rg.normalizers.Hardmax):
        scale = 1.0 if attention.score.factor is None else attention.score.factor / 2
        wrong["factor"] = with_score(attention, rg.Dot(scale=scale))(*inputs).output
    if attention.mask is not None:
        shifted = attention.mask.allowed(problem.grid).roll(1, -1)
        wrong["mask"] = attention.with_mask(rg.mask_tensor(shifted))(*inputs).output
    for mistake, mistaken in wrong.items():
        assert ((mistaken - output).abs() > allowed).any(), mistake


def with_score(attention, score):
    slots = {name: getattr(attention, name) for name in ("position", "bias", "mask", "normalizer", "dropout")}
    return rg.Attention(score, **slots)


MIXED = [
    (torch.float32, torch.float64),
    (torch.float64, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
]


@pytest.mark.parametrize(("learned", "given"), MIXED)
@every_mechanism
def test_parameters_and_inputs_may_have_different_dtypes(name, learned, given):
    """The output has the dtype of the values; between float32 and float64 it is precise to float32."""
    attention, *inputs = mechanisms()[name].example(batch=1)
    q, k, v = (t.to(given).requires_grad_() for t in inputs)
    exact = copy.deepcopy(attention)(*(t.detach().double() for t in (q, k, v))).output
    attention.to(learned)
    for engine in TORCH_ENGINES:
        if (seen := runs(engine, attention, q, k, v)) is not None:
            gradients = torch.autograd.grad(seen.output.sum(), (q, k, v), retain_graph=True)
            assert {seen.output.dtype, *(g.dtype for g in gradients)} == {given}
            if torch.bfloat16 not in (learned, given):
                torch.testing.assert_close(seen.output.double(), exact, rtol=1e-4, atol=1e-4)


@every_mechanism
@torch.no_grad()
def test_an_attention_survives_copies_and_files(name):
    attention, q, k, v = mechanisms()[name].example()
    expected = attention(q, k, v).output
    saved = io.BytesIO()
    torch.save(attention.state_dict(), saved)
    for other in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
        assert repr(other) == repr(attention)
        assert torch.equal(other(q, k, v).output, expected)
    fresh = mechanisms()[name].build(**mechanisms()[name].tiny).double()
    fresh.load_state_dict(torch.load(io.BytesIO(saved.getvalue()), weights_only=True))
    assert torch.equal(fresh(q, k, v).output, expected)


@every_mechanism
@torch.no_grad()
def test_every_engine_runs_or_refuses_with_a_remedy(name):
    attention, q, k, v = mechanisms()[name].example()
    plan = rg.plan(q, k, v, attention=attention)
    assert plan.engine in ENGINES and plan.engine not in plan.refused
    for engine in ENGINES:
        refused = runs(engine, attention, q, k, v) is None
        assert refused == (engine in plan.refused)
        assert not refused or plan.refused[engine] in str(plan)


@pytest.mark.parametrize("engine", ["dense", "blocked"])
@every_mechanism
def test_dropout_drops_the_same_weights_in_every_engine(name, engine):
    attention, q, k, v = mechanisms()[name].example()
    dropping = rg.Attention(
        attention.score,
        position=attention.position,
        bias=attention.bias,
        mask=attention.mask,
        normalizer=attention.normalizer,
        dropout=0.4,
    )
    torch.manual_seed(3)
    seen = dropping(q, k, v, engine=engine)
    torch.manual_seed(3)
    with torch.no_grad():
        expected = dropping(q, k, v, engine="reference")
    torch.testing.assert_close(seen.output, expected.output, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(seen.weights.dense(), attention(q, k, v).weights.dense())
    assert torch.equal(dropping.eval()(q, k, v).output, attention(q, k, v).output)
