"""The kernel engine with NaN and infinities, rows without keys and huge scores; and what it refuses."""

from __future__ import annotations

import re

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import regard as rg
from kernels import at_level, every_level, needs_kernel

pytestmark = needs_kernel
MASKS = {
    "none": lambda: None,
    "causal": rg.causal,
    "window": lambda: rg.causal() & rg.window(40),
    "padding": lambda: rg.padding([130, 60]),
    "predicate": lambda: rg.mask_mod(lambda b, h, i, j: (i + j) % 3 > 0),
}
I = 130
LEAST = torch.finfo(torch.float32).min
every_mask = pytest.mark.parametrize("mask", MASKS)


def inputs(width=8, length=I, batch=2):
    return [torch.randn(batch, 2, length, width) for _ in range(3)]


def attend(mask, q, k, v, engine="kernel", **pieces):
    return rg.Attention(mask=mask, **pieces)(q, k, v, engine=engine)


def allowed(mask, q):
    if mask is None:
        return torch.ones(2, 2, I, I, dtype=torch.bool)
    return mask.dense(I).expand(2, 2, I, I)


def close(found, expected):
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-5, equal_nan=True)


@every_level
@every_mask
@pytest.mark.parametrize("wrong", ["query", "key", "value"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@torch.no_grad()
def test_what_is_no_number_stays_in_the_rows_that_may_attend_to_it(wrong, number, mask, level):
    """Beside them a value of weight 0 may give NaN, as in any matrix product; a wrong number it may not."""
    mask, (q, k, v) = MASKS[mask](), inputs()
    clean = attend(mask, q.double(), k.double(), v.double(), "dense").output
    {"query": q, "key": k, "value": v}[wrong][:, :, 50, 2] = number
    with at_level(level):
        found = attend(mask, q, k, v).output
    pairs = allowed(mask, q)
    if wrong == "query":
        touched = torch.zeros(2, 2, I, dtype=torch.bool)
        touched[:, :, 50] = pairs[:, :, 50].any(-1)
    else:
        touched = pairs[..., 50]
    if wrong == "value":
        assert (found[touched][:, 2].isnan() | found[touched][:, 2].isinf()).all()
        untouched = torch.ones_like(found, dtype=torch.bool)
        untouched[..., 2] = ~touched
        spread = untouched & found.isnan()
        assert not spread[..., [0, 1, *range(3, 8)]].any()
        close(found[untouched & ~spread], clean[untouched & ~spread])
    else:
        if number != number:
            assert found[touched].isnan().all()
        close(found[~touched], clean[~touched])


@every_level
@torch.no_grad()
def test_infinite_keys_are_a_softmax_of_infinite_scores(level):
    """+inf takes the whole row, and inf - inf is NaN; -inf takes nothing."""
    q, k, v = inputs(1)
    k[:, :, 50] = torch.inf
    with at_level(level):
        seen = attend(None, q, k, v)
    exact = attend(None, q.double(), k.double(), v.double(), "dense")
    assert torch.equal(seen.output.isnan(), exact.output.isnan()) and seen.output.isnan().any()
    close(seen.output, exact.output)


@every_level
def test_a_query_that_is_no_number_gives_later_values_no_gradient(level):
    tensors = [t.requires_grad_() for t in inputs()]
    with torch.no_grad():
        tensors[0][:, :, 50] = torch.nan
    along = torch.randn(2, 2, I, 8)
    with at_level(level):
        found = torch.autograd.grad(attend(rg.causal(), *tensors).output, tensors[2], along)[0]
    assert found[:, :, :51].isnan().all() and not found[:, :, 51:].isnan().any()


class ByDistance(rg.biases.AdditiveBias):
    """A number for keys that are some steps away, 0 for the others."""

    relative = True

    def __init__(self, number, nearest):
        self.number, self.nearest = number, nearest

    def term(self, grid, rows, cols):
        return torch.where((grid.j - grid.i).abs() > self.nearest, self.number, 0.0)


@every_level
@every_mask
@pytest.mark.parametrize(("number", "nearest"), [(-torch.inf, 3), (-torch.inf, -1), (LEAST, 3)])
def test_a_bias_of_minus_infinity_is_a_mask(number, nearest, mask, level):
    """So is the least number of float32, which Hugging Face's models add, as long as a row has another key."""
    mask = MASKS[mask]()
    near = rg.mask_mod(lambda b, h, i, j: (i - j).abs() <= nearest)
    expected_mask = near if mask is None else mask & near
    tensors = [t.requires_grad_() for t in inputs()]
    along = torch.randn(2, 2, I, 8)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    with at_level(level):
        mine = attend(mask, *tensors, bias=ByDistance(number, nearest)).output
        found = torch.autograd.grad(mine, tensors, along)
    theirs = attend(expected_mask, *exact, "dense").output
    rows = (allowed(mask, None) & near.dense(I)).any(-1) | torch.tensor(number == -torch.inf)
    close(mine[rows], theirs[rows])
    if rows.all():
        for one, other in zip(found, torch.autograd.grad(theirs, exact, along.double()), strict=True):
            close(one, other)


@every_level
def test_empty_rows_have_output_0_and_no_gradient(level):
    tensors = [t.requires_grad_() for t in inputs()]
    with at_level(level):
        seen = attend(rg.padding([130, 0]), *tensors)
        gradients = torch.autograd.grad(seen.output.sum(), tensors)
    assert not seen.output[1].any() and seen.weights.row_statistic[0][1].isneginf().all()
    assert seen.output[0].all() and all(not g[1].any() and g.isfinite().all() for g in gradients)


@every_level
@every_mask
@pytest.mark.parametrize("size", [1e15, 1e18])
def test_huge_scores_choose_one_key(size, mask, level):
    """Scores of 1e30 and more: the greatest takes the whole row, forward and backward."""
    mask, tensors = MASKS[mask](), inputs()
    tensors = [t.requires_grad_() for t in (tensors[0] * size, tensors[1] * size, tensors[2])]
    with at_level(level):
        found = attend(mask, *tensors).output
        gradients = torch.autograd.grad(found.sum(), tensors)
    pairs = allowed(mask, None)
    scores = (tensors[0].double() @ tensors[1].double().mT).masked_fill(~pairs, -torch.inf)
    chosen = torch.nn.functional.one_hot(scores.argmax(-1), I).double() * pairs.any(-1, keepdim=True)
    close(found, chosen @ tensors[2].double())
    close(gradients[2], chosen.sum(2)[..., None].expand(-1, -1, -1, 8))
    assert all(g.isfinite().all() for g in gradients)


# Refusals

WIDE = torch.randn(1, 2, 6, 257)
OUTSIDE = {"slope": torch.ones((), requires_grad=True)}


class Hiding(rg.biases.AdditiveBias):
    relative = True

    def term(self, grid, rows, cols):
        return OUTSIDE["slope"] * (grid.j - grid.i)


def case(tensor=None, positions=None, **pieces):
    tensor = torch.randn(1, 2, 6, 8) if tensor is None else tensor
    return rg.Attention(**pieces).train(), tensor, positions


REFUSED = {
    "its weights are no softmax of scaled dot products or additive scores": lambda: case(
        normalizer=rg.normalizers.Sparsemax()
    ),
    "it sums in float32, and a tensor is torch.float64": lambda: case(torch.randn(1, 2, 6, 8).double()),
    "vectors of width 257 are wider than 256": lambda: case(WIDE),
    "it runs on CPU, and the tensors are on meta": lambda: case(torch.empty(1, 2, 6, 8, device="meta")),
    "the keys have gaps between their positions, and dropout counts positions from the first key": lambda: case(
        dropout=0.5, positions=rg.types.Positions(8, rg.types.Spans.of((0, 3), (6, 9)))
    ),
    "it computes one soft cap, and there are several": lambda: case(
        bias=(rg.biases.Softcap(2.0), rg.biases.Softcap(3.0))
    ),
    "its soft cap is a number without a gradient, and here it is a tensor": lambda: case(
        bias=rg.biases.Softcap(torch.tensor(2.0, requires_grad=True))
    ),
    "TransformerXLBias is no number for each head and each distance j - i": lambda: case(
        bias=rg.biases.TransformerXLBias(2, 8)
    ),
    "it computes one ShawBias, and there are several": lambda: case(
        bias=[rg.biases.ShawBias(8, reach=n) for n in (2, 3)]
    ),
    "it adds a ShawBias before the soft cap, and here the cap comes first": lambda: case(
        bias=(rg.biases.Softcap(2.0), rg.biases.ShawBias(8, reach=3))
    ),
    "the keys have gaps between their positions, so a bias is no vector of distances": lambda: case(
        bias=rg.ALiBi(2), positions=rg.types.Positions(8, rg.types.Spans.of((0, 3), (6, 9)))
    ),
    "the sink is so large that float32 is too coarse for its share of the row": lambda: case(
        normalizer=rg.normalizers.Softmax(sink=1e6)
    ),
    "its mask has no spans and would take 65.7 MiB": lambda: case(
        torch.zeros(1, 2, 8300, 1), mask=rg.mask_mod(lambda b, h, i, j: (i + j) % 2 == 0)
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_refusal_says_why_and_names_engines_that_can(reason):
    attention, tensor, positions = REFUSED[reason]()
    with pytest.raises(rg.RegardError, match=re.escape(f": {reason}. Engines that can: ") + ".*dense"):
        attention(tensor, tensor, tensor, positions=positions, engine="kernel")


def test_a_gradient_that_cannot_be_found_is_refused():
    tensor = torch.randn(1, 2, 6, 8)
    with pytest.raises(rg.RegardError, match="requires gradients and is none of its attributes"):
        rg.Attention(bias=Hiding())(tensor, tensor, tensor, engine="kernel")


def test_without_the_library_the_refusal_says_what_is_missing(monkeypatch):
    tensor = torch.randn(1, 2, 6, 8)
    monkeypatch.setenv("REGARD_KERNEL", "off")
    with pytest.raises(rg.RegardError, match=r": REGARD_KERNEL=off turns the compiled kernels off\. Engines that can"):
        rg.Attention()(tensor, tensor, tensor, engine="kernel")


def test_keys_with_gaps_may_stand_under_a_cap():
    """Only a number for each distance needs keys without gaps."""
    q, k, v = (torch.randn(1, 2, n, 8) for n in (4, 6, 6))
    positions = rg.types.Positions(8, rg.types.Spans.of((0, 3), (6, 9)))
    attention = rg.Attention(bias=rg.biases.Softcap(2.0), mask=rg.causal())
    found, expected = (attention(q, k, v, positions=positions, engine=engine).output for engine in ("kernel", "dense"))
    close(found, expected)


def test_a_recorded_call_does_not_run_on_kernels():
    """make_fx writes down torch's operations only: repeated, a kernel would return memory that nothing has filled."""
    q, k, v = inputs(length=400)
    with pytest.raises(rg.RegardError, match="cannot be read from memory"):
        make_fx(lambda q: attend(None, q, k, v))(q)
