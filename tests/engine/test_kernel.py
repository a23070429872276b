"""The kernel engine at every level of the processor: outputs, statistics and gradients against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import drawn
import regard as rg
from kernel_harness import stand_in
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
from regard.base.shapes import Sizes
from regard.engine.kernel import Kernel
from regard.engine.kernel.running import run
from regard.engine.problem import Problem
from regard.reference import reference
from rounding import FLOAT32, budget, unit_roundoff

pytestmark = needs_kernel
TINY = torch.finfo(torch.float32).tiny


@drawn.examples(60)
@given(problems())
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
            seen = attention(*inputs, positions=problem.positions, engine="kernel")
        assert seen.output.dtype == dtype
        within(seen.output, output, bound)
        within(seen.weights.dense(), weights, share * weights + TINY)


@drawn.examples(60)
@given(problems(), st.data())
def test_gradients_stay_within_their_budget(drawn_problem, data):
    problem, tensors = drawn_problem
    attention, inputs = in_dtype(problem, tensors)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    dense = problem.attention(*exact, positions=problem.positions, engine="dense").output
    shape = dense.shape
    layouts = drawn.LAYOUTS if min(shape) > 0 else drawn.KEEPING
    along = layouts[data.draw(drawn.layouts(layouts))](torch.randn(shape, dtype=inputs[0].dtype))
    learned = [p for p in problem.attention.parameters() if p.requires_grad]
    expected = torch.autograd.grad(dense, [*exact, *learned], along.double(), allow_unused=True)
    bounds = gradient_budget(problem, along.double(), inputs[0].dtype)
    wanted = [*inputs, *(p for p in attention.parameters() if p.requires_grad)]
    for level in LEVELS:
        with at_level(level):
            output = attention(*inputs, positions=problem.positions, engine="kernel").output
            found = torch.autograd.grad(output, wanted, along, allow_unused=True)
        for mine, theirs, bound in zip(found, expected, bounds, strict=False):
            if theirs is not None and mine is not None:
                within(mine, theirs, bound)
            else:
                assert all(t is None or not t.any() for t in (mine, theirs)), "one engine omits a gradient"


# Every number of half precision


def values_of(dtype):
    """All 65,536 bit patterns of a dtype, as values of width 256."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).reshape(1, 256, 1, 256)


def same_numbers(found, expected):
    """The same bits, but that NaN is any NaN and -0, a sum that starts from 0, may be 0."""
    either = found.isnan() & expected.isnan() | (found == 0) & (expected == 0)
    return bool((either | (found.view(torch.int16) == expected.view(torch.int16))).all())


@every_level
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("flushes", [False, True])
@torch.no_grad()
def test_the_output_of_one_key_is_its_value_bit_by_bit(level, dtype, flushes):
    value = values_of(dtype)
    nothing = torch.zeros(1, 256, 1, 1, dtype=dtype)
    if flushes and dtype == torch.bfloat16:  # its subnormal numbers are some of float32, which the processor flushes
        value = value.masked_fill(value.abs() < torch.finfo(dtype).smallest_normal, 0.0)
    torch.set_flush_denormal(flushes)
    try:
        with at_level(level):
            found = rg.Attention()(nothing, nothing, value, engine="kernel").output
    finally:
        torch.set_flush_denormal(False)
    assert same_numbers(found, value)


@every_level
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@torch.no_grad()
def test_the_mean_of_two_values_is_rounded_as_torch_rounds_it(level, dtype):
    one = values_of(dtype)
    other = one.flatten()[torch.randperm(one.numel())].view(one.shape)
    near = (one.float() * (1 + torch.rand(one.shape) / 128)).to(dtype)  # so that many means are ties
    nothing = torch.zeros(1, 256, 2, 1, dtype=dtype)
    for value in (other, near):
        pair = torch.cat((one, value), 2)
        with at_level(level):
            found = rg.Attention()(nothing[:, :, :1], nothing, pair, engine="kernel").output
        assert same_numbers(found, ((one.float() + value.float()) * 0.5).to(dtype))


# What else torch may do to a tensor


@every_level
def test_a_tensor_whose_sign_torch_stores_apart(level):
    """`imag` of a conjugate has the numbers of the imaginary part, and a bit that says that they are negative."""
    one, other, along = (torch.randn(1, 2, 20, 8, dtype=torch.complex64).conj().imag for _ in range(3))
    assert one.is_neg()
    leaves = [one.clone().requires_grad_(), other.clone().requires_grad_()]

    def gradients(engine, *tensors):
        output = rg.Attention()(tensors[0], tensors[1], tensors[1], engine=engine).output
        return [output, *torch.autograd.grad(output, leaves, along, allow_unused=True)]

    negated = [torch._neg_view(-x) for x in leaves]
    with at_level(level):
        found = gradients("kernel", *negated)
    for mine, theirs in zip(found, gradients("dense", *leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_default_dtype_and_device_of_torch_change_nothing(dtype):
    pieces = {"mask": rg.mask_mod(lambda b, h, i, j: (i + j) % 3 > 0), "bias": rg.ALiBi(2)}
    tensors = [torch.randn(1, 2, 130, 8, requires_grad=True) for _ in range(3)]

    def gradients(**pieces):
        output = rg.Attention(**pieces)(*tensors, engine="kernel").output
        return [output, *torch.autograd.grad(output.square().sum(), tensors)]

    expected = gradients(**pieces)
    torch.set_default_dtype(dtype)
    try:
        found = gradients(**pieces)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    expected = gradients(mask=rg.causal())
    with torch.device("meta"):
        found = gradients(mask=rg.causal())
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, as those of distributed arrays are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        plain = [x.inner if isinstance(x, Wrapped) else x for x in args]
        return operation(*plain, **(kwargs or {}))


def test_tensors_without_numbers_in_memory_are_refused():
    mode = FakeTensorMode()
    with mode:
        fake = torch.randn(1, 2, 400, 8)
    shape = fake.shape
    for tensor in (fake, Wrapped(torch.randn(shape)), torch.randn(shape).to_mkldnn()):
        problem = Problem(
            rg.Attention(), *[tensor] * 3, rg.types.Positions.aligned_to_end(400, 400), Sizes.of(*[tensor] * 3)
        )
        assert Kernel().refusal(problem) == "the numbers of a tensor cannot be read from memory"
    with mode:
        assert rg.Attention(mask=rg.causal())(fake, fake, fake).output.shape == shape  # another engine


@every_level
@pytest.mark.parametrize("cap", [1.0, 50.0, 1e3, 1e6])
@torch.no_grad()
def test_a_large_cap_changes_no_score(level, cap):
    """cap * tanh(s / cap) of an s far below the cap: an absolute error of the tangent would grow with the cap."""
    q, k, v = (torch.randn(1, 1, 64, 64) for _ in range(3))
    expected = rg.Attention(bias=rg.biases.Softcap(cap))(q.double(), k.double(), v.double(), engine="dense").output
    with at_level(level):
        found = rg.Attention(bias=rg.biases.Softcap(cap))(q, k, v, engine="kernel").output
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)


@every_level
def test_gradients_under_a_cap_are_those_of_the_tangent(level):
    tensors = [torch.randn(1, 1, 64, 64, requires_grad=True) for _ in range(3)]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    attention, along = rg.Attention(bias=rg.biases.Softcap(1.0)), torch.randn(1, 1, 64, 64)
    with at_level(level):
        found = torch.autograd.grad(attention(*tensors, engine="kernel").output, tensors, along)
    expected = torch.autograd.grad(attention(*exact, engine="dense").output, exact, along.double())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("width", [16, 24])
@pytest.mark.parametrize("learns", [False, True])
def test_heads_are_neighbors_in_the_output_as_they_are_in_the_query(width, learns):
    by_token = [torch.randn(2, 40, 4, size) for size in (16, 16, width)]
    by_head = [t.transpose(1, 2).contiguous().requires_grad_(learns) for t in by_token]
    attention = rg.Attention(mask=rg.causal())
    for _ in range(3):  # the first call, the plan that is kept, its repetition
        query, key, value = (t.transpose(1, 2).requires_grad_(learns) for t in by_token)
        output = attention(query, key, value, engine="kernel").output
        usual = attention(*by_head, engine="kernel").output
        assert output.transpose(1, 2).is_contiguous() and usual.is_contiguous()
        assert torch.equal(output, usual)


@pytest.mark.parametrize("learns", [False, True])
def test_a_harness_can_stand_in_for_every_call(monkeypatch, learns):
    """The emulated and the sanitized kernels (test_kernel_harness.py) miss no call that runs in another way."""
    names = []

    def counted(library, name, call, multiply_adds, *more):
        names.append(name)
        run(library, name, call, multiply_adds, *more)

    stand_in(monkeypatch, counted)
    tensors = [torch.randn(1, 2, 200, 8, requires_grad=learns) for _ in range(3)]
    attention = rg.Attention(mask=rg.causal())
    for _ in range(3):
        output = attention(*tensors, engine="kernel").output
        if learns:
            output.sum().backward()
    attention(*(t.detach()[:, :, -1:] if n == 0 else t.detach() for n, t in enumerate(tensors)), engine="kernel")
    assert names == [*["forward", "backward"][: 1 + learns] * 3, "decode"]
