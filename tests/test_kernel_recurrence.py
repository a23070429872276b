"""Recurrences with one decay a token by the compiled kernels: those of float64, in every layout, with gradients."""

from __future__ import annotations

import pytest
import torch

from kernels import every_level, needs_kernel
from regard.engine.kernel import recurrence
from regard.engine.recurrent import recur, running
from transports import drawn, steps_of

pytestmark = needs_kernel
SCALAR = ("retnet", "decay", "ssd", "deltanet", "gated_deltanet")


@pytest.fixture
def runs(monkeypatch):
    """The sizes (tokens, whether there are queries) of each run of the kernel."""
    seen = []

    def counted(library, name, call, work, *more):
        seen.append((call.n, bool(call.query.data)))
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
@pytest.mark.parametrize(("J", "I"), [(5, 5), (48, 48), (49, 49), (101, 40), (60, 0)])
@pytest.mark.parametrize("name", SCALAR)
def test_outputs_and_states_are_those_of_float64(name, J, I, level, monkeypatch, runs):
    monkeypatch.setenv("REGARD_KERNEL", level)
    transition, q, k, v, tensors = drawn(name, J, I)
    steps, state = steps_of(transition, q, k, tensors), torch.randn(2, 3, 4, 5).double()
    for layout in (lambda x: x, lambda x: x.mT.contiguous().mT if x.ndim == 4 else x):
        output, last = recur(single(steps, layout), layout(v.float()), state.float())
        for found, exact in zip((output, last), recur(steps, v, state), strict=True):
            torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)
    expected = [(J - I, False)] if J - I else []
    assert runs == 2 * (expected + ([(I, True)] if I else []))


@pytest.mark.parametrize("name", SCALAR)
def test_gradients_are_those_of_float64(name, runs):
    """The forward pass is that of the kernel; the backward pass needs its states."""
    transition, q, k, v, tensors = drawn(name, 70)
    exact, found = (
        [x.to(dtype).requires_grad_() for x in (q, k, v, *tensors.values())] for dtype in (torch.float64, torch.float32)
    )
    gradients = []
    for inputs in (exact, found):
        named = dict(zip(tensors, inputs[3:], strict=True))
        output, last = recur(steps_of(transition, inputs[0], inputs[1], named), inputs[2])
        gradients.append(torch.autograd.grad(output.sin().sum() + last.sum(), inputs))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(other.double(), one, rtol=1e-3, atol=1e-4 * float(one.abs().max()))
    assert runs == [(70, True)]


def test_what_the_kernel_does_not_compute_runs_in_torch(runs, monkeypatch):
    for name in ("gla", "rwkv_6", "kimi_delta", "rwkv_7"):
        transition, q, k, v, tensors = drawn(name, 9)
        recur(single(steps_of(transition, q, k, tensors)), v.float())
    transition, q, k, v, tensors = drawn("gated_deltanet", 9)
    steps = steps_of(transition, q, k, tensors)
    recur(steps, v)
    recur(single(steps).with_tensors(x[:, :, :2].float() for x in steps.tensors()), v[:, :, :2].float())
    monkeypatch.setattr(recurrence.Library, "has", lambda self, name: False)  # a library of an earlier build
    torch.testing.assert_close(recur(single(steps), v.float())[0].double(), recur(steps, v)[0], rtol=1e-4, atol=1e-5)
    assert runs == [] and running.FEW >= 2


def test_threads_do_not_change_the_result(runs):
    transition, q, k, v, tensors = drawn("gated_deltanet", 300)
    steps = single(steps_of(transition, q, k, tensors))
    one = recur(steps, v.float())
    torch.set_num_threads(3)
    recurrence_many = recur(steps, v.float())
    assert all(torch.equal(a, b) for a, b in zip(one, recurrence_many, strict=True))
