"""What the mask hides has no effect, whatever it holds: every engine, forward and backward."""

from functools import lru_cache

import pytest
import torch

import regard as rg
from cataloged import SINGLE
from regard.catalog import mechanisms

ENGINES = ("auto", "fused", "kernel", "blocked", "dense", "reference")
MASKS = {
    "padding": lambda n: rg.padding([n - 3]),
    "causal": lambda n: rg.causal(),
    "window": lambda n: rg.window(2),
    "causal window": lambda n: rg.causal() & rg.window(3),
    "padding of some": lambda n: rg.padding(torch.arange(n)[None] % 3 != 1) & rg.causal(),
    "documents": lambda n: rg.documents([n // 2, n - n // 2]),
    "tensor": lambda n: rg.mask_tensor((torch.arange(n) % 2 == 0)[None, None, None].expand(1, 1, n, n)),
}


def drawn(n, generator):
    """Queries, keys and values of finite numbers."""
    return [torch.randn(1, heads, n, 8, generator=generator) for heads in (4, 2, 2)]


def spoiled(mask, finite, bad, part, place):
    """The same with a bad number in one key or value, and the rows that may attend to it."""
    q, k, v = finite
    n, changed = q.shape[2], {"key": k.clone(), "value": v.clone()}
    changed[part][0, 1, place, 3] = bad
    sees = mask.dense(n).reshape(-1, n, n)[0, :, place].expand(4, n).clone()
    sees[:2] = False  # the first two query heads read the other key head
    return (q, changed["key"], changed["value"]), sees


@lru_cache
def finite_cases(name):
    """For lengths and places of the bad number: the inputs without it, and the output and weights of the formula."""
    generator, cases = torch.Generator().manual_seed(1), []
    for n in (4, 70):
        for place in (0, n // 2, n - 1):
            finite = drawn(n, generator)
            seen = rg.Attention(mask=MASKS[name](n))(*finite, engine="dense")
            cases.append((n, place, finite, seen.output[0], seen.weights.dense()[0]))
    return cases


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MASKS)
def test_a_hidden_key_or_value_that_is_no_number_has_no_effect(name, engine, part, bad):
    for n, place, finite, output, weights in finite_cases(name):
        mask = MASKS[name](n)
        inputs, sees = spoiled(mask, finite, bad, part, place)
        try:
            seen = rg.Attention(mask=mask)(*inputs, engine=engine)
        except rg.RegardError as error:
            pytest.skip(f"{engine} does not run here: {error}")
        found = seen.weights.dense()[0]
        torch.testing.assert_close(seen.output[0][~sees], output[~sees])
        torch.testing.assert_close(found[~sees], weights[~sees])
        if bad != bad:  # scores with an infinite key may be finite
            is_nan = seen.output[0][sees].isnan()
            assert is_nan[:, 3].all() and bool(is_nan.all()) == (part == "key" or not sees.any())
            assert bool(found[sees].isnan().any(-1).all()) == (part == "key" or not sees.any())


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "reference"])
@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("name", MASKS)
def test_gradients_of_the_rows_that_do_not_see_it_are_those_without_it(name, engine, part):
    generator, n = torch.Generator().manual_seed(2), 9
    mask = MASKS[name](n)
    finite = drawn(n, generator)
    with_nan, sees = spoiled(mask, finite, float("nan"), part, n // 2)
    attention, grads = rg.Attention(mask=mask), []
    for inputs in (finite, with_nan):
        leaves = [x.clone().requires_grad_() for x in inputs]
        try:
            output = attention(*leaves, engine=engine).output
        except rg.RegardError as error:
            pytest.skip(f"{engine} does not run here: {error}")
        grads.append(torch.autograd.grad(output.masked_fill(sees[None, ..., None], 0.0).sum(), leaves))
    for without, with_it in zip(*grads, strict=True):
        torch.testing.assert_close(with_it, without)


@pytest.mark.parametrize("name", SINGLE)
def test_a_hidden_key_that_is_no_number_has_no_effect_on_any_mechanism(name):
    attention, q, k, v = (mechanisms()[name].example())[:4]
    hidden = k.shape[2] // 2
    shown = rg.padding((torch.arange(k.shape[2]) != hidden).expand(k.shape[0], -1))
    attention = attention.with_mask(shown if attention.mask is None else attention.mask & shown)
    with torch.no_grad():
        expected = attention(q, k, v)
        k, v = k.clone(), v.clone()
        k[:, :, hidden], v[:, :, hidden] = torch.nan, torch.nan
        seen = attention(q, k, v)
        torch.testing.assert_close(seen.output, expected.output)
        torch.testing.assert_close(seen.weights.dense(), expected.weights.dense())


def test_the_default_device_of_torch_does_not_matter():
    q, k, v = torch.randn(3, 1, 2, 6, 4)
    k[:, :, 5] = torch.nan
    attention = rg.Attention(mask=rg.causal())
    expected = attention(q, k, v).output
    with torch.device("meta"):
        found = attention(q, k, v).output
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert expected[:, :, :5].isfinite().all()
    assert expected[:, :, 5].isnan().all()
