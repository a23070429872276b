"""Composition scores beside dense matrices in float64 and TransformerLens; planted pairs; the null of random models."""

from __future__ import annotations

import math

import pytest
import torch

import regard as rg
from regard.hf import head_weights
from regard.stats import head_composition
from regard.types import HeadMatrices, Role

KINDS = ("Q", "K", "V")


def drawn(layers=2, heads=3, width=16, D=4):
    parts = lambda *shape: torch.randn(heads, *shape, dtype=torch.float64)  # noqa: E731
    return [
        HeadMatrices(n, parts(width, D), parts(width, D), parts(width, D), parts(D, width))
        for n in range(0, 2 * layers, 2)
    ]


def dense(layers, kind):
    """The scores by C x C matrices, one pair at a time."""
    heads = [(layer, h) for layer in layers for h in range(layer.num_heads)]
    scores = torch.full((len(heads), len(heads)), torch.nan, dtype=torch.float64)
    for a, (first, g) in enumerate(heads):
        for b, (second, h) in enumerate(heads):
            if first.layer < second.layer:
                wrote = (first.value[g] @ first.output[g]).double()
                qk = (second.query[h] @ second.key[h].mT).double()
                read = {"Q": qk, "K": qk.mT, "V": (second.value[h] @ second.output[h]).double()}[kind]
                scores[a, b] = (wrote @ read).norm() / (wrote.norm() * read.norm())
    return scores


def gpt2(norms=True):
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_head=2, n_embd=12, vocab_size=20, n_positions=16, **ends)).eval()
    return _with_norms(model) if norms else model


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 20}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)).eval()
    return _with_norms(model)


def _with_norms(model):
    for name, parameter in model.named_parameters():
        if "ln_1" in name or "input_layernorm" in name:
            parameter.data = torch.rand_like(parameter) + 0.5
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_dense_matrices(kind):
    layers = drawn(layers=3)
    found = head_composition(layers, kind, rotations=2)
    torch.testing.assert_close(found.scores, dense(layers, kind), equal_nan=True)
    assert found.heads[3] == (2, 0) and found.pairs[0].score == pytest.approx(float(found.scores.nan_to_num(0).max()))
    assert found.expected == 0.25 and len(found.nulls) == 2


def test_the_matrices_of_gpt2_and_llama_are_read_and_norms_folded():
    width = 12
    model = gpt2()
    for layer, block in zip(head_weights(model, fold_norms=False), model.transformer.h, strict=True):
        q, k, v = block.attn.c_attn.weight.detach().split(width, 1)
        for side, matrix in (("query", q), ("key", k), ("value", v)):
            assert torch.equal(getattr(layer, side)[1], matrix[:, 6:])
        assert torch.equal(layer.output[1], block.attn.c_proj.weight.detach()[6:])
    folded, block = head_weights(model)[1], model.transformer.h[1]
    x = torch.randn(5, width)  # the read stream before the norm, but for its length
    expected = (block.ln_1(x) - block.ln_1.bias) @ block.attn.c_attn.weight[:, :6]
    ours = x @ folded.query[0] / x.var(-1, correction=0, keepdim=True).sqrt()
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)

    model = llama()
    layer, block = head_weights(model)[1], model.model.layers[1]
    x = torch.randn(5, 16)
    ours = x @ layer.key[3] / x.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(ours, block.self_attn.k_proj(block.input_layernorm(x))[:, 4:], atol=1e-4, rtol=1e-4)
    assert torch.equal(layer.key[2], layer.key[3]) and not torch.equal(layer.query[2], layer.query[3])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("build", [gpt2, llama])
def test_scores_of_models_are_those_of_transformer_lens(build, kind):
    pytest.importorskip("transformer_lens", reason="an oracle: pip install --no-deps --target FOLDER transformer-lens")
    from transformer_lens.FactoredMatrix import FactoredMatrix
    from transformer_lens.utilities.matrix import composition_scores

    layers = head_weights(build())
    stack = {side: torch.cat([getattr(one, side) for one in layers]) for side in ("query", "key", "value", "output")}
    left = FactoredMatrix(stack["value"], stack["output"])
    right = {
        "Q": FactoredMatrix(stack["query"], stack["key"].mT),
        "K": FactoredMatrix(stack["key"], stack["query"].mT),
        "V": left,
    }[kind]
    theirs = composition_scores(left, right)
    ours = head_composition(layers, kind, rotations=0).scores
    torch.testing.assert_close(ours.float(), theirs.where(~ours.isnan(), torch.nan), equal_nan=True)


def test_a_planted_previous_token_and_induction_pair_is_found():
    layers = drawn(layers=2, heads=4, width=32)
    where = torch.linalg.qr(torch.randn(32, 4, dtype=torch.float64)).Q  # head 1 writes there, head 2 matches it
    layers[0].output[1], layers[1].key[2] = where.mT, where
    found = head_composition(layers, "K")
    assert [(pair.writer, pair.reader) for pair in found.labeled] == [((0, 1), (2, 2))]
    previous = [Role("previous", 0, head, 0.9, 0.9, True) for head in (0, 1)]
    induction = [Role("induction", 2, 2, 0.9, 0.1, True)]
    (best, other) = found.between(previous, induction)
    assert best.label and not other.label and best.sentence in found.table()
    assert best.sentence.startswith("L2.H2: its keys read what L0.H1 writes (K-composition 0.")
    assert not head_composition(layers, "Q").labeled and "No pair" in head_composition(layers, "V").table()


def test_laws_of_order_scale_and_rotation():
    layers = drawn()
    order = [2, 0, 1]
    turn = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64)).Q
    moved = HeadMatrices(2, *(getattr(layers[1], side)[order] for side in ("query", "key", "value", "output")))
    turned = []
    for one in layers:
        inputs = (turn @ getattr(one, side) * 3 for side in ("query", "key", "value"))
        turned.append(HeadMatrices(one.layer, *inputs, one.output @ turn.mT))
    for kind in KINDS:
        scores = head_composition(layers, kind).scores
        permuted = head_composition([layers[0], moved], kind).scores
        torch.testing.assert_close(permuted[:3, 3:], scores[:3, 3:][:, order])
        torch.testing.assert_close(head_composition(turned, kind).scores, scores, equal_nan=True)


def test_random_models_have_no_pairs_and_the_expected_score():
    """A label in 1 of 20 models is the rule; more than 6 of 40 have a probability below 0.01."""
    labeled, squares = 0, []
    for _ in range(40):
        found = head_composition(drawn(heads=2, width=12), "K")
        labeled += bool(found.labeled)
        squares.append(found.scores[:2, 2:].square())
    assert labeled <= 6
    assert float(torch.stack(squares).mean().sqrt()) == pytest.approx(1 / math.sqrt(12), rel=0.1)
    assert not rg.hf.composition(llama(), "V").labeled


def test_mistakes_are_explained():
    layers = drawn()
    from transformers import BloomConfig, BloomModel

    bloom = BloomModel(BloomConfig(hidden_size=8, n_layer=2, n_head=2, vocab_size=20))
    for call, message in [
        (lambda: head_composition(layers, "k"), "no kind 'k'"),
        (lambda: head_composition(layers[:1]), "at least two layers"),
        (lambda: head_composition(layers[::-1]), "in order"),
        (lambda: HeadMatrices(0, *[torch.zeros(1, 4, 2)] * 4), r"output \(1, E, 4\); got"),
        (lambda: rg.hf.composition(gpt2(), layers=[0, 7]), "the model has the layers 0, 1, 2"),
        (lambda: rg.hf.composition(torch.nn.Linear(2, 2)), "no heads were found"),
        (lambda: rg.hf.composition(bloom), "have no known names"),
        (lambda: head_composition(layers).between([(0, 5)], [(2, 0)]), "no head L0.H5; there are L0.H0 to L2.H2"),
    ]:
        with pytest.raises(rg.RegardError, match=message):
            call()
