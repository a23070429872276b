"""A plan that takes all pairs where it looks as if it need not says so, and names the piece."""

from __future__ import annotations

import warnings

import pytest
import torch

import regard as rg

N = 1024
LINEAR = {"score": rg.scores.FeatureScore(), "normalizer": rg.normalizers.SumNormalizer()}
FALLS = {
    "a bias on linear attention": (rg.Attention(**LINEAR, bias=rg.ALiBi(1)), "because of .*ALiBi.*linear time"),
    "a window on linear attention": (
        rg.Attention(**LINEAR, mask=rg.causal() & rg.window(700)),
        r"because of \(causal\(\) & window\(size=700\)\)",
    ),
    "dropout on linear attention": (rg.Attention(**LINEAR, dropout=0.5), r"because of 'dropout=0\.5'"),
    "a predicate": (rg.Attention(mask=rg.mask_mod(lambda b, h, i, j: j == i)), "mask_mod has no spans"),
    "a predicate under causal": (
        rg.Attention(mask=rg.causal() & ~rg.mask_mod(lambda b, h, i, j: j % 2 == i)),
        "mask_mod has no spans",
    ),
}


@pytest.mark.parametrize("what", FALLS)
def test_it_is_warned_of_with_the_piece_by_name(what):
    attention, message = FALLS[what]
    x = torch.randn(1, 1, N, 8)
    with pytest.warns(UserWarning, match=f"attend: .*{message}.*regard.plan"):
        attention(x, x, x)
    small = x[:, :, :100]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(small, small, small)


FAR = rg.Attention(mask=rg.mask_mod(lambda b, h, i, j: j == i))
CALLS = {
    "a mechanism": lambda x: FAR(x, x, x),
    "attend": lambda x: rg.attend(x, x, x, attention=FAR),
    "a mask of attend": lambda x: rg.attend(x, x, x, mask=FAR.mask),
    "a module": lambda x: rg.nn.MultiHeadAttention(8, 1, attention=FAR)(x[0]),
    "a function of torch": lambda x: torch.no_grad()(rg.attend)(x, x, x, attention=FAR),
}


@pytest.mark.parametrize("what", CALLS)
def test_the_warning_names_the_line_of_the_user(what):
    with pytest.warns(UserWarning, match="mask_mod has no spans") as warned:
        CALLS[what](torch.randn(1, 1, N, 8))
    assert (warned[0].filename, warned[0].lineno) == (__file__, CALLS[what].__code__.co_firstlineno)


@pytest.mark.parametrize("what", [name for name in FALLS if "dropout" not in name])
def test_the_plan_says_it(what):
    attention, _ = FALLS[what]
    x = torch.randn(1, 1, N, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = rg.plan(x, x, x, attention=attention)
    assert "Quadratic: " in str(plan)
    assert plan.quadratic


def test_flex_on_cpu_says_that_it_is_dense():
    x = torch.randn(1, 1, N, 8)
    with pytest.warns(UserWarning, match="on CPU FlexAttention holds all scores at once"):
        rg.Attention(mask=rg.causal() & rg.window(9))(x, x, x, engine="flex")


@pytest.mark.parametrize(
    "attention",
    [
        rg.Attention(),
        rg.Attention(mask=rg.causal()),
        rg.Attention(mask=rg.causal() & rg.window(64) & rg.mask_mod(lambda b, h, i, j: j % 2 == 0)),
        rg.Attention(**LINEAR, mask=rg.causal()),
        rg.Attention(mask=rg.window(64), normalizer=rg.normalizers.Sparsemax()),
    ],
    ids=["plain", "causal", "predicate in a window", "linear", "sparsemax"],
)
def test_what_is_quadratic_by_its_own_definition_or_not_at_all_is_not_warned_of(attention):
    x = torch.randn(1, 1, 4 * N, 8)
    assert not rg.plan(x, x, x, attention=attention).quadratic


def test_the_reference_costs_every_pair_of_every_entry_and_head():
    """2 entries of 3 heads of 5 x 7 pairs: 4 float64 of each; 2 * 4 + 2 * 6 for the products, 4 for the softmax."""
    q, k, v = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 6)
    cost = rg.plan(q, k, v, attention=rg.Attention(), engine="reference").cost
    assert (cost.pairs, cost.flops, cost.bytes) == (210, 210 * (8 + 12 + 4), 210 * 4 * 8)


@pytest.mark.parametrize(("mask", "pairs", "states"), [(None, 0, 1), (rg.causal(), 200 * 64, 4)], ids=repr)
def test_linear_attention_costs_a_state_for_each_chunk_and_pairs_within_chunks(mask, pairs, states):
    """200 tokens in chunks of 64: three whole ones and a rest. Each of 2 x 3 heads has states of 4 x (6 + 1) floats."""
    q, v = torch.randn(2, 3, 200, 4), torch.randn(2, 3, 200, 6)
    cost = rg.plan(q, q, v, attention=rg.Attention(**LINEAR, mask=mask), engine="linear").cost
    assert cost.pairs == 6 * pairs
    assert cost.bytes == 4 * 6 * (states * 4 * 7 + pairs)
    assert cost.flops == 2 * 6 * (2 * 200 * 4 * 7 + pairs * (4 + 6 + 1))
