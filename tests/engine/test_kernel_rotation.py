"""RoPE by the compiled kernels: the rotation of float64, forward and backward, in every layout and dtype."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import regard as rg
from kernels import DTYPES, every_level, needs_kernel
from regard.base.shapes import Sizes
from regard.engine.kernel import rotation
from regard.engine.problem import Problem
from regard.reference import reference
from rounding import unit_roundoff

pytestmark = needs_kernel
#: Absolute error of a cosine or a sine in float32.
TABLE_ERROR = 2e-7
SCALINGS = (None, rg.encodings.LinearScaling(3.0), rg.encodings.NTKScaling(4.0), rg.encodings.Llama3Scaling())
LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "tokens before heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "channels first": lambda x: x.mT.contiguous().mT,
    "every second channel": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "shared by all heads": lambda x: x[:, :1].expand_as(x),
    "negated": lambda x: torch._neg_view(-x),
}


def turned(x, positions, rope):
    """The definition, pair by pair, in float64: a complex number times e^(i angle)."""
    x, half = x.double(), rope.head_dim // 2
    first = torch.arange(half) * (2 if rope.interleaved else 1)
    second = first + (1 if rope.interleaved else half)
    angle = positions.double()[:, None] * rope.frequencies()
    product = torch.complex(x[..., first], x[..., second]) * torch.polar(torch.ones_like(angle), angle)
    output = x.clone()
    output[..., first], output[..., second] = product.real, product.imag
    return output


def check_close(found, exact, x, dtype):
    """Each number is the sum of two products with a rounded cosine and sine, and is rounded once."""
    size = x.double().abs().amax(-1, keepdim=True)
    bound = 1.01 * unit_roundoff(dtype) * exact.abs() + 2 * TABLE_ERROR * size + torch.finfo(dtype).tiny
    assert bool(((found.double() - exact).abs() <= bound).all())


@pytest.fixture
def calls(monkeypatch):
    """The calls of the compiled rotation."""
    made, run = [], rotation.run

    def counted(library, name, call, multiply_adds):
        made.append(library.level_name)
        run(library, name, call, multiply_adds)

    monkeypatch.setattr(rotation, "run", counted)
    return made


@every_level
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rotation_and_its_gradient_are_those_of_float64(monkeypatch, calls, level, layout, dtype):
    monkeypatch.setenv("REGARD_KERNEL", level)
    for width, D, interleaved in ((2, 2, False), (64, 64, False), (64, 64, True), (6, 11, True), (34, 50, False)):
        rope, positions = rg.RoPE(width, interleaved=interleaved), torch.arange(40, 107)
        x, grad = (LAYOUTS[layout](torch.randn(2, 3, 67, D).to(dtype)) for _ in range(2))
        leaf = x.detach().requires_grad_()
        found = rope.encode(leaf, positions)
        check_close(found, turned(x, positions, rope), x, dtype)
        (back,) = torch.autograd.grad(found, leaf, grad)
        check_close(back, turned(grad, -positions, rope), grad, dtype)
        assert found.dtype == back.dtype == dtype
    assert calls == [level] * 10


@settings(deadline=None)
@given(st.data())
def test_rotations_of_any_sizes_and_positions_are_those_of_float64(data):
    B, H, n = (data.draw(st.integers(0, most)) for most in (2, 3, 140))
    width = 2 * data.draw(st.integers(1, 40))
    scaling = data.draw(st.sampled_from(SCALINGS))
    rope = rg.RoPE(width, data.draw(st.sampled_from([100.0, 1e4, 5e5])), data.draw(st.booleans()), scaling)
    positions = torch.tensor(data.draw(st.lists(st.integers(0, 5000), min_size=n, max_size=n)), dtype=torch.int64)
    x = torch.randn(B, H, n, width + data.draw(st.integers(0, 9)))
    check_close(rope.encode(x, positions), turned(x, positions, rope), x, torch.float32)


def test_large_positions_are_as_precise_as_small_ones():
    x, far = torch.randn(1, 1, 1, 64), 10**12
    exact = turned(x, torch.tensor([far]), rg.RoPE(64))  # float64 knows an angle of 1e12 to 1e-4
    torch.testing.assert_close(rg.RoPE(64).encode(x, torch.tensor([far])).double(), exact, atol=1e-3, rtol=0)
    torch.testing.assert_close(  # in steps of 2^-64 of a turn, 1e12 steps are 1e-7 of one
        rg.RoPE(64).encode(x, torch.tensor([far])),
        rg.RoPE(64)._encoded(x, torch.tensor([far])),
        atol=2e-6,
        rtol=0,
    )


def test_position_0_changes_nothing_and_quarter_turns_are_exact():
    class Quarter(rg.encodings.Scaling):
        def __call__(self, frequencies):
            return torch.full_like(frequencies, math.pi / 2)

    x = torch.randn(1, 1, 5, 2)
    a, b = x[0, 0].T
    found = rg.RoPE(2, scaling=Quarter()).encode(x, torch.arange(5))
    signs = torch.tensor([1, 0, -1, 0, 1]), torch.tensor([0, 1, 0, -1, 0])
    expected = torch.stack((a * signs[0] - b * signs[1], a * signs[1] + b * signs[0]), -1)
    torch.testing.assert_close(found[0, 0], expected, atol=1e-7, rtol=1e-7)
    assert torch.equal(found[0, 0, 0], x[0, 0, 0])


def test_nan_and_infinity_stay_in_their_pair():
    x = torch.ones(1, 1, 3, 10)
    x[0, 0, 0, 1], x[0, 0, 1, 9], x[0, 0, 2, 3] = torch.nan, torch.inf, -torch.inf
    found = rg.RoPE(8).encode(x, torch.arange(5, 8))
    assert found.isnan().nonzero().tolist() == [[0, 0, 0, 1], [0, 0, 0, 5]]
    assert found.isinf().nonzero().tolist() == [[0, 0, 1, 9], [0, 0, 2, 3], [0, 0, 2, 7]]


def test_the_result_does_not_depend_on_the_number_of_threads():
    x, threads = torch.randn(2, 8, 1000, 64), torch.get_num_threads()
    try:
        results = []
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(rg.RoPE(64).encode(x, torch.arange(1000)))
        assert torch.equal(*results)
    finally:
        torch.set_num_threads(threads)


def test_a_second_derivative():
    x, positions = torch.randn(1, 2, 9, 6, requires_grad=True), torch.arange(9)
    (first,) = torch.autograd.grad(rg.RoPE(6).encode(x, positions).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    double = x.detach().double().requires_grad_()
    (first,) = torch.autograd.grad(rg.RoPE(6).encode(double, positions).pow(3).sum(), double, create_graph=True)
    torch.testing.assert_close(second.double(), torch.autograd.grad(first.sum(), double)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("positions", [torch.arange(7, dtype=torch.int32), torch.arange(14)[::2]], ids=str)
def test_positions_of_any_integers_and_strides(calls, positions):
    x = torch.randn(1, 1, 7, 4)
    check_close(rg.RoPE(4).encode(x, positions), turned(x, positions, rg.RoPE(4)), x, torch.float32)
    assert len(calls) == 1


def test_a_scaling_of_the_user_is_asked_at_every_call(calls):
    class Changing(rg.encodings.Scaling):
        factor = 1.0

        def __call__(self, frequencies):
            return frequencies * self.factor

    rope, x, positions = rg.RoPE(4, scaling=Changing()), torch.randn(1, 1, 3, 4), torch.arange(3)
    for factor in (1.0, 0.5):
        rope.scaling.factor = factor
        check_close(rope.encode(x, positions), turned(x, positions, rope), x, torch.float32)
    assert len(calls) == 2


def test_other_tensors_are_rotated_by_torch(monkeypatch, calls):
    x, positions, rope = torch.randn(1, 2, 5, 4), torch.arange(5), rg.RoPE(4)
    exact = turned(x, positions, rope)
    close = lambda found: torch.testing.assert_close(found.double(), exact, atol=1e-6, rtol=1e-6)  # noqa: E731
    close(rope.encode(x.double(), positions))
    close(torch.vmap(lambda t: rope.encode(t[None], positions)[0])(x))
    close(-torch.func.grad(lambda t: rope.encode(-t, -positions).mul(x).sum())(x))
    close(rope.encode(x[0], positions)[None])
    assert rope.encode(x.to("meta"), positions.to("meta")).is_meta
    monkeypatch.setenv("REGARD_KERNEL", "off")
    close(rope.encode(x, positions))
    assert not calls


def test_an_export_before_the_first_rotation_leaves_no_false_numbers():
    class Alone(torch.nn.Module):
        def forward(self, x):
            return rg.RoPE(4, base=123.0).encode(x, torch.arange(5))

    x = torch.randn(1, 2, 5, 4)
    exported = torch.export.export(Alone(), (x,)).module()(x)
    torch.testing.assert_close(exported, rg.RoPE(4, base=123.0).encode(x, torch.arange(5)), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_the_default_device_changes_nothing(scaling):
    rope, x, positions = rg.RoPE(4, base=321.0, scaling=scaling), torch.randn(1, 2, 5, 4), torch.arange(5)
    with torch.device("meta"):
        found = rope.encode(x, positions)
    check_close(found, turned(x, positions, rope), x, torch.float32)


@pytest.mark.parametrize("change", [lambda f: f.repeat(9), lambda f: f[:1], torch.mean], ids=["more", "one", "none"])
def test_a_scaling_that_returns_another_number_of_frequencies_is_refused(change):
    class Wrong(rg.encodings.Scaling):
        def __call__(self, frequencies):
            return change(frequencies)

    with pytest.raises(rg.RegardError, match=r"Wrong changed frequencies of shape \(2,\)"):
        rg.RoPE(4, scaling=Wrong()).encode(torch.randn(1, 2, 5, 4), torch.arange(5))


def test_recorded_rotations_are_those_of_torch(calls):
    x, positions, rope = torch.randn(1, 2, 5, 4), torch.arange(5), rg.RoPE(4)
    recorded = make_fx(lambda x, positions: rope.encode(x, positions))(-x, positions)
    check_close(recorded(x, positions), turned(x, positions, rope), x, torch.float32)
    assert not calls


def test_one_graph_of_a_compiler_holds_a_rotation(calls):
    rope, positions = rg.RoPE(4), torch.arange(9)
    compiled = torch.compile(lambda x: rope.encode(x, positions[: x.shape[2]]), backend="aot_eager", fullgraph=True)
    for x in (torch.randn(1, 2, n, 4) for n in (5, 9)):
        check_close(compiled(x), turned(x, positions[: x.shape[2]], rope), x, torch.float32)
    assert not calls


def test_attention_with_gaps_between_its_keys_is_the_reference(calls):
    q, k, v = torch.randn(1, 2, 4, 8), torch.randn(1, 1, 9, 8), torch.randn(1, 1, 9, 8)
    attention = rg.Attention(position=rg.RoPE(6, interleaved=True), mask=rg.causal())
    positions = rg.types.Positions(10, rg.types.Spans.of((0, 4), (7, 12)))
    output = attention(q, k, v, positions=positions).output
    assert len(calls) == 2
    exact, _ = reference(Problem(attention, *(t.double() for t in (q, k, v)), positions, Sizes.of(q, k, v)))
    torch.testing.assert_close(output.double(), torch.as_tensor(exact), atol=1e-5, rtol=1e-5)
