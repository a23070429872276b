"""Edge attribution patching: links against dense arithmetic, edges between heads against central differences."""

from __future__ import annotations

import pytest
import torch
from test_attribution import built, eager, target_of, text
from torch.nn import functional as F

import regard as rg
from extras import needs_transformers


def corrupted(inputs):
    other = {name: ids.clone() for name, ids in inputs.items()}
    other["input_ids"][:, 2] = 40
    return other


def head_values(model, inputs, name):
    """Values of each query head, from the projection of each layer of a Llama."""
    kept = []
    for layer in model.model.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda m, a, out: kept.append(out))
    model(**inputs)
    return [v.view(1, 7, 2, 8).transpose(1, 2).repeat_interleave(2, 1).detach() for v in kept]


def test_links_are_the_difference_of_both_texts_times_the_gradient():
    name = "LlamaForCausalLM"
    inputs, other = text(name), corrupted(text(name))
    found = rg.attribute(built(name), inputs, 9, "edge-patching", corrupted=other)
    gradient = rg.attribute(built(name), inputs, 9, test=False)
    (here, _), (there, _) = eager(name, inputs), eager(name, other)
    values, changed = head_values(built(name), inputs, name), head_values(built(name), other, name)
    for layer in range(2):
        g = gradient[layer].gradient.double()
        clean = here[layer] * (g @ values[layer].mT)
        expected = clean - there[layer] * (g @ changed[layer].mT)
        torch.testing.assert_close(found[layer].dense().double(), expected, atol=1e-5, rtol=1e-4)
        # the links of a head sum to the change of its output times the gradient
        outputs = here[layer] @ values[layer] - there[layer] @ changed[layer]
        total = found[layer].dense().double().sum((-1, -2))
        torch.testing.assert_close(total, (g * outputs).sum((-1, -2)), atol=1e-4, rtol=1e-4)
    same = rg.attribute(built(name), inputs, 9, "edge-patching", corrupted=inputs, test=False)
    assert not same[0].dense().any() and not same.edges.scores.any()


def projections(model, layer):
    attention = model.model.layers[layer].self_attn
    return {"query": attention.q_proj, "key": attention.k_proj, "value": attention.v_proj}


def test_edges_between_heads_are_derivatives_along_what_a_head_adds():
    name = "LlamaForCausalLM"
    inputs, other = text(name), corrupted(text(name))
    edges = rg.attribute(built(name), inputs, 9, "edge-patching", corrupted=other, test=False).edges
    assert edges.senders == [f"L{layer}.H{head}" for layer in (0, 1) for head in range(4)]
    kinds = [f"H{n}.query" for n in range(4)] + [f"G{n}.{part}" for part in ("key", "value") for n in range(2)]
    assert edges.receivers == [f"L{layer}.{kind}" for layer in (0, 1) for kind in kinds] + ["logits"]
    model = built(name, "eager")
    outputs = []
    hook = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda m, a: outputs.append(a[0]))
    model(**inputs), model(**other)
    hook.remove()
    change = (outputs[0] - outputs[1]).detach()  # (1, 7, 32)
    for sender in (0, 3):
        only = torch.zeros_like(change)
        only[..., 8 * sender : 8 * sender + 8] = change[..., 8 * sender : 8 * sender + 8]
        added = model.model.layers[0].self_attn.o_proj(only).detach()
        for receiver, part, head in (("L1.H2.query", "query", 2), ("L1.G1.key", "key", 1), ("L1.G0.value", "value", 0)):
            slope = central_difference(model, inputs, added, projections(model, 1)[part], head)
            assert edges.scores[sender, edges.receivers.index(receiver)] == pytest.approx(slope, abs=2e-4, rel=2e-3)
        slope = central_difference(model, inputs, added)
        assert edges.scores[sender, -1] == pytest.approx(slope, abs=2e-4, rel=2e-3)
    assert not edges.scores[4:, :-1].any() and not edges.scores[:4, :8].any()  # a head reads earlier layers only


def central_difference(model, inputs, added, projection=None, head=None, step=1e-3):
    """dL/de, where e times `added` enters the input of one head of layer 1, or the last residual stream."""
    layer = model.model.layers[1]

    def run(moved):
        stream = []

        def keep(module, args, kwargs):
            stream.append((args or [kwargs["hidden_states"]])[0])

        def one_head(module, args, out):
            other = F.linear(layer.input_layernorm(stream[-1] + moved), module.weight)
            columns = slice(8 * head, 8 * head + 8)
            return torch.cat([out[..., : columns.start], other[..., columns], out[..., columns.stop :]], -1)

        hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True)]
        if projection is None:
            hooks.append(model.model.norm.register_forward_pre_hook(lambda module, args: (args[0] + moved,)))
        else:
            hooks.append(projection.register_forward_hook(one_head))
        with torch.no_grad():
            number = float(model(**inputs).logits[0, -1, 9])
        for hook in hooks:
            hook.remove()
        return number

    return (run(step * added) - run(-step * added)) / (2 * step)


@needs_transformers("5.1", "BERT calls the attention interface")
def test_models_without_one_residual_stream_have_links_and_say_why_there_are_no_edges():
    for name, reason in (("BertForMaskedLM", "norm after the sum"), ("T5ForConditionalGeneration", "has two")):
        inputs = text(name)
        found = rg.attribute(
            built(name), inputs, target_of(name), "edge-patching", corrupted=corrupted(inputs), test=False
        )
        assert found.edges is None and reason in repr(found) and found[0].dense().any()
    model = built("GPT2LMHeadModel")
    found = rg.attribute(
        model, text("GPT2"), 9, "edge-patching", corrupted=corrupted(text("GPT2")), layers=[1], test=False
    )
    assert found.edges.senders == [f"L1.H{n}" for n in range(4)] and found.edges.scores[:, -1].any()
    assert "L1.H" in repr(found) and not any(part._forward_hooks for part in model.modules())


def test_frozen_parameters_change_no_edge():
    model, inputs = built("LlamaForCausalLM"), text("LlamaForCausalLM")
    free = rg.attribute(model, inputs, 9, "edge-patching", corrupted=corrupted(inputs), test=False).edges.scores
    model.requires_grad_(False)
    with torch.inference_mode():
        frozen = rg.attribute(model, inputs, 9, "edge-patching", corrupted=corrupted(inputs), test=False).edges.scores
    torch.testing.assert_close(frozen, free)


def test_patching_refuses_what_cannot_be_exchanged():
    model, ids = built("GPT2LMHeadModel"), text("GPT2")["input_ids"]
    with pytest.raises(rg.RegardError, match="give corrupted="):
        rg.attribute(model, ids, 9, "edge-patching")
    with pytest.raises(rg.RegardError, match=r"\(1, 7\) and in corrupted \(1, 6\)"):
        rg.attribute(model, ids, 9, "edge-patching", corrupted=ids[:, 1:])
