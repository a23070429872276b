"""The step table: each of its steps is that of the NumPy definition, for every mechanism with scores."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import regard as rg
from cataloged import SELECTED, SINGLE, WITH_TENSORS
from map_kinds import NAMES, map_of, plain
from regard.catalog import mechanisms
from regard.diagnosis.laws import called, problem_of
from regard.maps.scored_map import ScoredMap
from regard.reference import reference

CLOSE = {"rtol": 1e-9, "atol": 1e-10}


def scores_by_definition(attention, num_biases, inputs):
    """The scores after some of the biases, in NumPy: the weights without a mask and a normalizer."""
    scored = attention.with_pieces(
        bias=attention.bias[:num_biases], mask=None, selection=None, normalizer=rg.normalizers.Unnormalized()
    )
    return reference(problem_of(scored, *inputs))[1]


@pytest.mark.parametrize("name", [*SINGLE, *WITH_TENSORS])
def test_every_step_is_that_of_the_definition(name):
    attention, *inputs = mechanisms()[name].example()
    weights = called(attention, *inputs).weights
    mask = weights.attention.mask  # with the choice of a selection
    allowed = torch.ones(weights.shape) if mask is None else mask.allowed(weights.grid).expand(weights.shape)
    output, expected_weights = reference(problem_of(attention, *inputs))
    expected = [scores_by_definition(attention, n, inputs) for n in range(len(attention.bias) + 1)]
    B, H, I, _ = weights.shape
    for place in {(0, 0, 0), (B - 1, H - 1, I - 1), (0, H - 1, I // 2)}:
        batch, head, query = place
        table = weights.step_table(query, head, batch, value=inputs[2])
        steps, seen = dict(table.steps), allowed[place].bool()  # a bias may be undefined for hidden keys
        product, masked = steps.pop("product", None), steps.pop("masked", None)
        np.testing.assert_allclose(steps.pop("weight"), expected_weights[place], **CLOSE)
        np.testing.assert_allclose(table.output, output[place], **CLOSE)
        assert [re.sub(r" \d+$", "", step) for step in list(steps)[1:]] == [type(x).__name__ for x in attention.bias]
        if isinstance(attention.normalizer, rg.normalizers.SumNormalizer):  # features have any factor, which cancels
            expected = [scores * (steps["scaled"][0] / scores[place][0]).item() for scores in expected]
        for step, scores in zip(steps.values(), expected, strict=True):
            np.testing.assert_allclose(step[seen], scores[place][seen], **CLOSE)
        if product is not None:
            np.testing.assert_allclose(product * steps["scaled"][0], product[0] * steps["scaled"], **CLOSE)
        assert (masked is None) == (mask is None)
        if masked is not None:
            assert bool((masked[~seen] == attention.normalizer.masked_score).all())
            np.testing.assert_allclose(masked[seen], expected[-1][place][seen], **CLOSE)


def test_products_are_not_scaled_and_scores_that_are_no_products_have_none():
    q, k = torch.randn(2, 1, 1, 4, 9, dtype=torch.float64)
    steps = rg.Attention()(q, k, k).weights.step_table(2).steps
    torch.testing.assert_close(steps["product"], k[0, 0] @ q[0, 0, 2])
    torch.testing.assert_close(steps["scaled"], k[0, 0] @ q[0, 0, 2] / 3)
    additive = rg.Attention(rg.scores.Additive(9, 9, 5)).double()(q, k, k).weights
    assert list(additive.step_table(2).steps) == ["score", "weight"]


@pytest.mark.parametrize("name", sorted({*NAMES, *SELECTED}))
def test_a_map_has_a_table_with_its_weights_or_says_what_it_is_made_of(name):
    weights = map_of(name)
    if 0 in weights.shape[:3]:
        with pytest.raises(rg.RegardError, match="the size of this axis is 0"):
            weights.step_table(0)
    elif isinstance(weights, ScoredMap):
        table = weights.step_table(-1, -1, -1)
        torch.testing.assert_close(table.weights, weights[-1, -1, -1].detach())
    else:
        with pytest.raises(rg.RegardError, match=r"weights\.step_table: this map has no queries and keys. It is "):
            weights.step_table(0)


def test_two_biases_of_a_class_are_two_steps():
    x = torch.randn(1, 2, 3, 4)
    attention = rg.Attention(bias=[rg.ALiBi(2), rg.biases.Softcap(2.0), rg.ALiBi(2)])
    assert list(attention(x, x, x).weights.step_table(0).steps)[2:] == ["ALiBi", "Softcap", "ALiBi 2", "weight"]


def test_shared_heads_and_watched_models_have_their_values():
    q, k, v = torch.randn(1, 4, 3, 4), torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 6)
    seen = rg.attend(q, k, v)
    for head in range(4):
        torch.testing.assert_close(seen.weights.step_table(1, head, value=v).output, seen.output[0, head, 1])
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, batch_first=True), 1).eval()
    with rg.watch(encoder, keep="qkv") as seen:
        encoder(torch.randn(2, 5, 8))
    table = seen[0].step_table(2, 1, 1)
    torch.testing.assert_close(table.output, (seen[0].dense() @ seen[0].value)[1, 1, 2])


def test_tokens_are_those_of_the_keys_and_of_as_many_queries():
    q, k = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 3, 8)
    for query, title in ((q, "Query 1, batch"), (k, "Query 1 (b), batch")):
        table = rg.attend(query, k, k).weights.step_table(1, tokens=["a", "b", "c"])
        assert str(table).startswith(title) and list(table.tokens) == ["a", "b", "c"]


def test_values_with_the_axes_of_attend():
    x = torch.randn(2, 5, 4)
    weights = rg.attend(x, x, x).weights
    torch.testing.assert_close(weights.step_table(3, batch=1, value=x).output, rg.attend(x, x, x).output[1, 3])
    alone = rg.attend(x[0], x[0], x[0])
    torch.testing.assert_close(alone.weights.step_table(3, value=x[0]).output, alone.output[3])


def test_the_printed_table_has_the_numbers_and_the_sums():
    x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    table = rg.attend(x, x, x, is_causal=True).weights.step_table(1, value=x, tokens=["the", "cat", "sat"])
    head, names, *rows = str(table).splitlines()
    assert head.startswith("Query 1 (cat), ") and names.split("  ")[0] == "key"
    shares = (0.0, 2.0 * 2.0 / 2**0.5)
    last = np.exp(shares[1]) / np.exp(shares).sum()
    assert rows[1].split() == [
        "cat",
        "4.00",
        "2.83",
        "2.83",
        f"{last:.2f}",
        "(0.00,",
        "2.00)",
        "(0.00,",
        f"{2 * last:.2f})",
    ]
    assert rows[2].split()[3:5] == ["-inf", "0.00"] and rows[3].split()[:3] == ["sum", "1.00", "output"]
    html = table._repr_html_()
    assert "<th>weight x value</th>" in html and '<td style="text-align:left">-inf</td>' in html


def test_of_many_keys_those_with_the_largest_weights_are_printed():
    q, k = torch.randn(2, 1, 1, 100, 4)
    table = rg.attend(q, k, k).weights.step_table(0)
    printed = [line.split()[0] for line in str(table).splitlines()[3:-1]]
    largest = table.weights.topk(20).indices.sort().values.tolist()
    assert printed == list(map(str, largest)) and "20 of 100 keys" in str(table)
    assert str(table).splitlines()[-1].split() == ["sum", "1.00"]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda weights: weights.step_table(9), "query 9 is out of range; the size of this axis is 9"),
        (lambda weights: weights.step_table(0, 3), "head 3 is out of range"),
        (lambda weights: weights.step_table(0, tokens=["a"]), "has 11 keys, got 1 tokens"),
        (lambda weights: weights.step_table(0, queries=["a"]), "has 9 queries, got 1 tokens"),
        (lambda weights: weights.step_table(0, value=torch.randn(2, 2, 11, 4)), r"\(2, 2, 11, 4\) do not fit"),
        (lambda weights: weights.step_table(0, value=torch.randn(2, 3, 10, 4)), r"here \(2, 3, 11, width\)"),
        (lambda weights: weights.step_table(0).output, r"step_table\(query, value=value\)"),
    ],
)
def test_mistakes_are_explained(ask, message):
    with pytest.raises(rg.RegardError, match=message):
        ask(plain())
