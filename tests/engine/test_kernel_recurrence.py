"""Recurrences with one decay a token by the compiled kernels: those of float64, in every layout, with gradients."""

from __future__ import annotations

import pytest
import torch

from kernels import every_level, needs_kernel
from regard.engine.kernel import recurrence
from regard.engine.recurrent import recur
from regard.pieces.transition import Steps
from transports import drawn, steps_of

pytestmark = needs_kernel
SCALAR = ("retnet", "decay", "ssd", "deltanet", "gated_deltanet")


@pytest.fixture
def runs(monkeypatch):
    """Of each run of the kernels: what they compute, the number of tokens, and whether there are queries."""
    seen = []

    def counted(library, name, call, work, *more):
        seen.append((name.removeprefix("recurrence_"), call.n, bool(call.query.data)))
        return run(library, name, call, work, *more)

    run = recurrence.run
    monkeypatch.setattr(recurrence, "run", counted)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield seen
    torch.set_num_threads(threads)


def single(steps, layout=lambda x: x):
    return steps.with_tensors(layout(x.float()) for x in steps.tensors())


@every_level
@pytest.mark.parametrize(("J", "I"), [(1, 1), (4, 3), (5, 5), (48, 48), (49, 49), (101, 40), (60, 0)])
@pytest.mark.parametrize("name", SCALAR)
def test_outputs_and_states_are_those_of_float64(name, J, I, level, monkeypatch, runs):
    monkeypatch.setenv("REGARD_KERNEL", level)
    transition, q, k, v, tensors = drawn(name, J, I)
    steps, state = steps_of(transition, q, k, tensors), torch.randn(2, 3, 4, 5).double()
    for layout in (lambda x: x, lambda x: x.mT.contiguous().mT if x.ndim == 4 else x):
        output, last = recur(single(steps, layout), layout(v.float()), state.float())
        for found, exact in zip((output, last), recur(steps, v, state), strict=True):
            torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)
    assert runs == 2 * parts_of(J, I)


def parts_of(J, I):
    """The runs forward: tokens before the first query, then those with one."""
    return [("forward", n, has_queries) for n, has_queries in ((J - I, False), (I, True)) if n]


@every_level
@pytest.mark.parametrize("n", [1, 3, 60])
def test_wide_vectors_and_values(n, level, monkeypatch):
    """Whole blocks of channels and a rest, with gradients; float64 is the oracle."""
    monkeypatch.setenv("REGARD_KERNEL", level)
    torch.manual_seed(0)
    q, k, w, v = (torch.randn(2, 1, n, width).double() for width in (23, 23, 23, 150))
    given = [q, k / 9, v, -torch.rand(2, 1, n, 1).double(), w / 9, torch.randn(2, 1, 23, 150).double()]
    answers = []
    for dtype in (torch.float64, torch.float32):
        inputs = [x.to(dtype).requires_grad_() for x in given]
        for mode in (torch.no_grad(), torch.enable_grad()):
            with mode:
                output, last = recur(Steps(*inputs[:2], log_decay=inputs[3], address=inputs[4]), inputs[2], inputs[5])
                answers.append([output, last])
        answers[-1] += torch.autograd.grad(output.sin().sum() + last.square().sum(), inputs)
    for exact, found in zip(answers[:2], answers[2:], strict=True):
        for one, other in zip(exact, found, strict=True):
            torch.testing.assert_close(other.double(), one, rtol=1e-4, atol=1e-4 * float(one.detach().abs().max()))


@every_level
@pytest.mark.parametrize(("J", "I"), [(3, 3), (70, 70), (101, 40), (60, 0)])
@pytest.mark.parametrize("name", SCALAR)
def test_gradients_are_those_of_float64(name, J, I, level, monkeypatch, runs):
    """Of every tensor of the call and of the state before it, in any strides."""
    monkeypatch.setenv("REGARD_KERNEL", level)
    transition, q, k, v, tensors = drawn(name, J, I)
    given = [q, k, v, *tensors.values(), torch.randn(2, 3, 4, 5).double()]
    exact = gradients(transition, tensors, given)
    atol = 1e-5 * float(max(one.abs().max() for one in exact if one.numel()))
    for layout in (lambda x: x, lambda x: x.mT.contiguous().mT):
        found = gradients(transition, tensors, [layout(x.float()) for x in given], layout)
        for one, other in zip(exact, found, strict=True):
            torch.testing.assert_close(other.double(), one, rtol=1e-3, atol=atol)
    parts = parts_of(J, I)
    assert runs == 2 * (parts + [("backward", *part[1:]) for part in reversed(parts)])


def gradients(transition, names, given, layout=lambda x: x):
    """Gradients of the inputs: query, key, value, the tensors of the call and the first state."""
    inputs = [x.detach().requires_grad_() for x in given]
    steps = steps_of(transition, *inputs[:2], dict(zip(names, inputs[3:-1], strict=True)))
    steps = steps.with_tensors(layout(x) if x.ndim == 4 else x for x in steps.tensors())
    output, last = recur(steps, inputs[2], inputs[-1])
    found = torch.autograd.grad(output.sin().sum() + last.square().sum(), inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


@pytest.mark.parametrize("strength", [60.0, torch.inf])
@pytest.mark.parametrize("name", ["decay", "gated_deltanet"])
def test_gradients_beside_strong_decays(name, strength, runs):
    """A decay of e^-60 or of 0 between weak ones; keys of length 1, whose products do not grow."""
    transition, q, k, v, tensors = drawn(name, 120)
    tensors["log_decay"].mul_(0.01)[:, :, 5::17] = -strength
    given = [q, k, v, *tensors.values(), torch.zeros(2, 3, 4, 5).double()]
    exact = gradients(transition, tensors, given)
    found = gradients(transition, tensors, [x.float() for x in given])
    for one, other in zip(exact, found, strict=True):
        torch.testing.assert_close(other.double(), one, rtol=1e-3, atol=1e-4 * float(one.abs().max()))
    assert [name for name, *_ in runs] == ["forward", "backward"]


@pytest.mark.parametrize("wanted", ["query", "key", "value", "log_decay", "address", "state"])
def test_only_what_is_needed_gets_a_gradient(wanted, runs):
    transition, q, k, v, tensors = drawn("gated_deltanet", 50)
    steps, state = single(steps_of(transition, q, k, tensors)), torch.randn(2, 3, 4, 5)
    leaf = {"value": v.float(), "state": state}.get(wanted, getattr(steps, wanted, None)).requires_grad_()
    value = leaf if wanted == "value" else v.float()
    output, last = recur(steps, value, state)
    (found,) = torch.autograd.grad(output.sum() + last.sum(), leaf)
    every = [x.detach().requires_grad_() for x in (*steps.tensors(), v.float(), state)]
    output, last = recur(steps.with_tensors(every[:-2]), *every[-2:])
    place = {"value": -2, "state": -1}.get(wanted)
    place = [name for name in ("query", "key", "log_decay", "address")].index(wanted) if place is None else place
    assert torch.equal(found, torch.autograd.grad(output.sum() + last.sum(), every)[place])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype, runs):
    transition, q, k, v, tensors = drawn("gated_deltanet", 50)
    half = [x.to(dtype) for x in (q, k, v, *tensors.values(), torch.zeros(2, 3, 4, 5))]
    found = gradients(transition, tensors, half)
    exact = gradients(transition, tensors, [x.double() for x in half])
    for one, other in zip(exact, found, strict=True):
        assert other.dtype == dtype
        assert (other.double() - one).abs().max() < 20 * torch.finfo(dtype).eps * one.abs().max()
    assert [name for name, *_ in runs] == ["forward", "backward"]


def test_what_the_kernel_does_not_compute_runs_in_torch(runs, monkeypatch):
    for name in ("gla", "rwkv_6", "kimi_delta", "rwkv_7"):
        transition, q, k, v, tensors = drawn(name, 9)
        recur(single(steps_of(transition, q, k, tensors)), v.float())
    transition, q, k, v, tensors = drawn("gated_deltanet", 9)
    steps = steps_of(transition, q, k, tensors)
    recur(steps, v)
    monkeypatch.setattr(recurrence.Library, "has", lambda self, name: False)  # a library of an earlier build
    torch.testing.assert_close(recur(single(steps), v.float())[0].double(), recur(steps, v)[0], rtol=1e-4, atol=1e-5)
    assert runs == []


def test_threads_do_not_change_the_result(runs):
    transition, q, k, v, tensors = drawn("gated_deltanet", 300)
    steps = single(steps_of(transition, q, k, tensors))
    one = recur(steps, v.float())
    torch.set_num_threads(3)
    recurrence_many = recur(steps, v.float())
    assert all(torch.equal(a, b) for a, b in zip(one, recurrence_many, strict=True))
