"""Causal linear attention by the compiled kernels: the sums of float64, forward and backward, in every layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import regard as rg
from kernels import every_level, needs_kernel
from regard.engine.kernel import sums
from regard.engine.kernel.sums import MOST_THREADS_PER_HEAD, CompiledAverages, compiled_sums
from regard.engine.linear import causal_averages

pytestmark = needs_kernel


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def by_definition(query, key, value, past):
    """Pair by pair, for as many queries as keys: averages, denominators, and the state."""
    key, value, start = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value, past))
    values = F.pad(value, (0, 1), value=1.0)
    totals = (query @ key.mT).tril() @ values + query @ start
    state = start + key.mT @ values
    return totals[..., :-1] / totals[..., -1:], totals[..., -1], state[:, :: query.shape[1] // past.shape[1]]


def problem(B, H, G, n, W, E, layout=lambda x: x):
    """Features above 0, so that no denominator is small, and a state of earlier tokens."""
    shapes = (B, H, n, W), (B, G, n, W), (B, G, n, E), (B, G, W, E + 1)
    query, key, value, past = (torch.rand(shape) + 0.5 for shape in shapes)
    return [layout(x).requires_grad_() for x in (query, key, value - 1, past)]


def results(function, tensors, grads):
    output, denominators, state = function(*tensors)
    return output, denominators, state, *torch.autograd.grad((output, state), tensors, grads)


def check(tensors, tolerance=2e-5):
    """Output, denominators, state and all gradients, relative to the largest number of each."""
    (B, H, n, W), (_, G, _, E) = tensors[0].shape, tensors[2].shape
    grads = torch.randn(B, H, n, E), torch.randn(B, G, W, E + 1) / (n * W)
    library = compiled_sums(*tensors)
    assert library is not None
    found = results(lambda *x: CompiledAverages.apply(library, *x), tensors, grads)
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    exact = results(by_definition, doubles, [g.double() for g in grads])
    for one, other in zip(found, exact, strict=True):
        assert one.shape == other.shape
        largest = float(other.detach().abs().max())  # 0 for the query of one feature: a sum over E channels cancels
        torch.testing.assert_close(one.double(), other, rtol=0, atol=tolerance * largest + 5e-6 + 2e-7 * E)


@every_level
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1, 1, 1), (2, 4, 2, 97, 20, 13), (1, 3, 1, 48, 64, 64), (1, 2, 2, 240, 12, 31)], ids=str
)
def test_averages_and_gradients_are_those_of_the_definition(monkeypatch, level, sizes):
    monkeypatch.setenv("REGARD_KERNEL", level)
    check(problem(*sizes))


LAYOUTS = {
    "tokens before heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "channels first": lambda x: x.mT.contiguous().mT,
    "every second channel": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "shared by all heads": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout):
    check([x.detach().requires_grad_() for x in problem(2, 4, 2, 70, 17, 9, LAYOUTS[layout])])


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_sums_of_any_sizes_are_those_of_the_definition(data):
    G, shared, n = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 200))
    W, E = data.draw(st.integers(1, 80)), data.draw(st.integers(1, 80))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    check(problem(data.draw(st.integers(1, 2)), G * shared, G, n, W, E))


def test_a_long_sequence_is_as_precise_as_a_short_one():
    check(problem(1, 1, 1, 9000, 24, 8), tolerance=1e-5)


def test_the_linear_engine_uses_the_kernel_and_continues_from_a_state(monkeypatch):
    made, run = [], sums.run
    monkeypatch.setattr(sums, "run", lambda *arguments: (made.append(arguments[1]), run(*arguments)))
    attention = rg.Attention(rg.scores.FeatureScore(), mask=rg.causal(), normalizer=rg.normalizers.SumNormalizer())
    q, k, v = torch.randn(3, 1, 4, 130, 16)
    whole = attention(q, k, v, engine="linear").output
    cache, parts = rg.caches.RecurrentCache(), []
    for part in (slice(0, 57), slice(57, 130)):
        seen = attention(q[:, :, part], k[:, :, part], v[:, :, part], cache=cache)
        cache = seen.cache
        parts.append(seen.output)
    torch.testing.assert_close(torch.cat(parts, 2), whole)
    torch.testing.assert_close(whole, attention(q, k, v, engine="dense").output)
    assert made == ["sums"] * 3


def test_more_threads_than_key_heads_can_use_are_left_to_torch():
    tensors = problem(1, 8, 1, 20, 4, 4)
    torch.set_num_threads(MOST_THREADS_PER_HEAD + 1)
    assert compiled_sums(*tensors) is None
    torch.set_num_threads(MOST_THREADS_PER_HEAD)
    assert compiled_sums(*tensors) is not None


def test_the_result_does_not_depend_on_the_number_of_threads():
    tensors, found = problem(1, 4, 4, 900, 64, 64), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(results(causal_averages, tensors, (tensors[2], tensors[3])))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_other_tensors_are_left_to_torch(monkeypatch):
    tensors = problem(1, 1, 1, 9, 3, 4)
    assert compiled_sums(*(x.double() for x in tensors)) is None
    assert compiled_sums(*(x.to("meta") for x in tensors)) is None
    monkeypatch.setenv("REGARD_KERNEL", "off")
    assert compiled_sums(*tensors) is None


def test_an_empty_sum_gives_zeros_and_gradients_of_zero():
    tensors = [x.detach().requires_grad_() for x in problem(1, 1, 1, 60, 4, 4)]
    with torch.no_grad():
        tensors[1][:, :, :10] = 0
        tensors[3].zero_()
    output, denominators, _ = CompiledAverages.apply(compiled_sums(*tensors), *tensors)
    assert not output[:, :, :10].any() and not denominators[:, :, :10].any()
    (grad,) = torch.autograd.grad(output.sum(), tensors[0])
    assert grad.isfinite().all() and not grad[:, :, :10].any()
