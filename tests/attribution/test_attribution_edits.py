"""Methods that change a run: integrated gradients over the weights of a layer, and value zeroing."""

from __future__ import annotations

import re

import pytest
import torch
from test_attribution import CONFIGS, built, target_of, text
from torch.nn import functional as F

import regard as rg


def head_inputs(model, layer, change, inputs):
    """L when `change` replaces the joined heads of a layer of a GPT-2, (1, n, C)."""
    hook = model.transformer.h[layer].attn.c_proj.register_forward_pre_hook(lambda module, args: (change(args[0]),))
    number = model(**inputs).logits[0, -1, 9]
    hook.remove()
    return number


def joined_heads(model, layer, inputs):
    kept = []
    head_inputs(model, layer, lambda x: kept.append(x.detach()) or x, inputs)
    return kept[0]


@pytest.mark.parametrize("baseline", ["zero", "uniform"])
def test_the_links_of_a_layer_are_its_path_integral_and_sum_to_the_change_of_the_target(baseline):
    model, inputs = built("GPT2LMHeadModel"), text("GPT2")
    found = rg.attribute(model, inputs, 9, "integrated-gradients", baseline=baseline, steps=12)
    plain = rg.attribute(model, inputs, 9, test=False)
    assert "error of at most" in repr(found)
    for layer in range(2):
        joined, value = joined_heads(model, layer, inputs), plain[layer].value
        uniform = torch.ones(7, 7, dtype=torch.float64).tril() / torch.arange(1, 8)[:, None]
        base_weights = uniform if baseline == "uniform" else torch.zeros(7, 7)
        base = (base_weights.double() @ value.double()).transpose(1, 2).flatten(2)
        total = 0
        for point in (torch.arange(60) + 0.5) / 60:
            moved = (base + point * (joined - base)).requires_grad_()
            number = head_inputs(model, layer, lambda _, moved=moved: moved, inputs)
            total = total + torch.autograd.grad(number, moved)[0] / 60
        gradient = total.unflatten(-1, (4, 4)).transpose(1, 2)
        weights = plain[layer].source.dense() - base_weights
        torch.testing.assert_close(found[layer].dense(), weights * (gradient @ value.mT), atol=1e-4, rtol=1e-3)
        change = head_inputs(model, layer, lambda x: x, inputs) - head_inputs(model, layer, lambda x: base, inputs)  # noqa: B023
        torch.testing.assert_close(found[layer].dense().sum(), change.detach(), atol=1e-5, rtol=1e-4)


def test_rows_are_those_of_captum():
    attr = pytest.importorskip("captum.attr", reason="captum is not installed: pip install --no-deps captum")
    model, inputs = built("GPT2LMHeadModel"), text("GPT2")
    found = rg.attribute(model, inputs, 9, "integrated-gradients", steps=10, test=False)
    for layer in range(2):

        def forward(joined, layer=layer):
            return torch.stack([head_inputs(model, layer, lambda x, one=one: one[None], inputs) for one in joined])

        joined = joined_heads(model, layer, inputs)
        integrated = attr.IntegratedGradients(forward).attribute(joined, n_steps=10, method="gausslegendre")
        expected = integrated.unflatten(-1, (4, 4)).sum(-1).transpose(1, 2)
        torch.testing.assert_close(found[layer].dense().sum(-1), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_methods_that_change_a_run_take_every_model_and_leave_it_as_it_was(name):
    model, inputs = built(name), text(name)
    before = model(**inputs).logits
    found = rg.attribute(model, inputs, target_of(name), "integrated-gradients", baseline="uniform", steps=10)
    worst = float(found.notes[0].rpartition(" ")[2].rstrip("."))
    assert worst < 0.1
    zeroed = rg.attribute(model, inputs, target_of(name), "value-zeroing")
    for weights in zeroed.values():
        sums = weights.dense().sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums), atol=1e-5, rtol=0)
    torch.testing.assert_close(model(**inputs).logits, before, atol=0, rtol=0)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


@torch.no_grad()
def test_value_zeroing_is_that_of_a_model_whose_value_projection_returns_zeros():
    model, inputs = built("BertForMaskedLM"), text("Bert")
    found = rg.attribute(model, inputs, rg.Target(9, position=3), "value-zeroing", test=False)
    before = model(**inputs, output_hidden_states=True).hidden_states
    relevance = torch.eye(7, dtype=torch.float64)[3]
    expected = []
    for layer in range(2):
        columns = []
        for token in range(7):

            def zeroed(module, args, output, token=token):
                return output.index_fill(1, torch.tensor([token]), 0.0)

            hook = model.bert.encoder.layer[layer].attention.self.value.register_forward_hook(zeroed)
            after = model(**inputs, output_hidden_states=True).hidden_states[layer + 1]
            hook.remove()
            columns.append(1 - F.cosine_similarity(before[layer + 1], after, dim=-1)[0])
        distances = torch.stack(columns, -1)
        expected.append(distances / distances.sum(-1, keepdim=True))
        torch.testing.assert_close(found[layer][0, 0].double(), expected[-1], atol=1e-4, rtol=1e-3)
    relevance = relevance @ expected[1] @ expected[0]
    torch.testing.assert_close(found.tokens()[0].double(), relevance, atol=1e-4, rtol=1e-3)


def test_options_are_checked():
    model, ids = built("GPT2LMHeadModel"), text("GPT2")["input_ids"]
    for options, message in (
        ({"baseline": "mean"}, "Known names: uniform, zero"),
        ({"steps": 0}, "at least 1"),
        ({"points": 3}, "no option points. It has baseline, steps"),
    ):
        with pytest.raises(rg.RegardError, match=message):
            rg.attribute(model, ids, 9, "integrated-gradients", **options)
    with pytest.raises(rg.RegardError, match="one sequence, got 2"):
        rg.attribute(model, ids.repeat(2, 1), 9, "value-zeroing")
    some = rg.attribute(model, ids, 9, "value-zeroing", layers=[1])
    assert len(some) == 1 and some.test is None and "needs all layers" in repr(some)
    with pytest.raises(rg.RegardError, match=r"tokens\('input'\): there are none.*needs all layers \(leave layers="):
        some.top(2)


@torch.no_grad()
def test_value_zeroing_of_a_causal_model_says_that_its_relevance_ends_at_the_first_token():
    model, ids = built("GPT2LMHeadModel"), text("GPT2")["input_ids"]
    found = rg.attribute(model, ids, 9, "value-zeroing", test=False)
    rows = torch.eye(ids.shape[1], dtype=torch.float64)[-1] @ found[1][0, 0] @ found[0][0, 0]
    (share,) = re.findall(r"Token 0 has (\d+)% of the relevance: in a causal model", repr(found))
    assert int(share) == round(100 * float(rows[0])) and float(found[0][0, 0, 0, 0]) == 1.0
    bert = rg.attribute(built("BertForMaskedLM"), text("Bert"), rg.Target(9, position=3), "value-zeroing", test=False)
    assert not bert.notes


@torch.no_grad()
@pytest.mark.parametrize("method", ["value-zeroing", "integrated-gradients"])
def test_a_watch_around_an_attribution_changes_nothing(method):
    model, ids = built("GPT2LMHeadModel"), text("GPT2")["input_ids"]
    alone = rg.attribute(model, ids, 9, method, test=False)
    with rg.watch(model), rg.edit(model, rg.edits.ScaleWeights(rg.Where(layers=1, keys=1), 1.0)):
        inside = rg.attribute(model, ids, 9, method, test=False)
    torch.testing.assert_close(inside.tokens(), alone.tokens(), atol=1e-5, rtol=1e-4)
