"""Edits equal the pattern hooks of TransformerLens 4 on the same model."""

from __future__ import annotations

import random

import pytest
import torch

import regard as rg
from transformer_lens_models import bridge_of, small_gpt2

transformers = pytest.importorskip("transformers")
N = 8


def drawn(rng, num_layers, num_heads, length, source):
    """An edit, and the hook of TransformerLens that does the same: (name, function)."""
    layer, head = rng.randrange(num_layers), rng.randrange(num_heads)
    query = rng.randrange(1, length)
    key, amount = rng.randrange(query), rng.uniform(-2, 2)
    pair = rg.Where(heads=f"L{layer}.H{head}", queries=query, keys=key)
    row = rg.Where(heads=f"L{layer}.H{head}", queries=query)
    at = (slice(None), head, query, key)
    uniform = torch.tensor([1 / (query + 1)] * (query + 1) + [0.0] * (length - query - 1))
    scores, pattern, z = (f"blocks.{layer}.attn.{name}" for name in ("hook_attn_scores", "hook_pattern", "o.hook_in"))
    return rng.choice([
        (rg.edits.AddToScores(pair, amount), scores, lambda s: s.index_put(tensors(at, s), s[at] + amount)),
        (rg.KnockOut(pair), scores, lambda s: s.index_put(tensors(at, s), torch.tensor(-torch.inf))),
        (rg.KnockOut(pair, renormalize=False), pattern, lambda w: w.index_put(tensors(at, w), torch.tensor(0.0))),
        (rg.edits.ScaleWeights(pair, amount), pattern, lambda w: w.index_put(tensors(at, w), w[at] * amount)),
        (rg.edits.ReplaceWeights(row, "uniform"), pattern, lambda w: w.index_put(tensors(at[:3], w), uniform)),
        (rg.edits.ActivationPatch(row, source={layer: source}), z, lambda x: patched(x, source, head, query)),
    ])  # fmt: skip


def tensors(index, like):
    return (torch.arange(len(like)), *(torch.tensor(part) for part in index[1:]))


def patched(x, source, head, query):
    """The joined or separate heads that the output projection reads, with one head of one token replaced."""
    heads = x.unflatten(-1, (source.shape[1], -1)).clone() if x.ndim == 3 else x.clone()
    heads[:, query, head] = source[:, head, query]
    return heads.flatten(-2) if x.ndim == 3 else heads


@torch.no_grad()
def test_a_wrapper_that_does_not_call_what_it_wraps_has_the_map_alone(tmp_path):
    model, tokenizer = small_gpt2(tmp_path)
    bridge, ids = bridge_of(model, tokenizer), torch.randint(0, 20, (1, N))
    with rg.watch(bridge) as seen, rg.watch(model) as plain:
        bridge(ids), model(ids)
    assert len(seen) == 2 and not seen.missing
    for mine, theirs in zip(seen.maps.values(), plain.maps.values(), strict=True):
        torch.testing.assert_close(mine.dense(), theirs.dense(), atol=1e-5, rtol=0)


@torch.no_grad()
def assert_equal(model, tokenizer, ids, width, num_draws):
    bridge, rng = bridge_of(model, tokenizer), random.Random(0)
    layers, heads, length = model.config.num_hidden_layers, model.config.num_attention_heads, ids.shape[1]
    plain, kinds = model(ids).logits, set()
    for _ in range(num_draws):
        source = torch.randn(1, heads, length, width)
        drawn_edits = [drawn(rng, layers, heads, length, source) for _ in range(2)]
        edit = drawn_edits[0][0] & drawn_edits[1][0]
        hooks = [(name, lambda x, hook, change=change: change(x)) for _, name, change in drawn_edits]
        expected = bridge.run_with_hooks(ids, return_type="logits", fwd_hooks=hooks)
        with rg.edit(model, edit):
            logits = model(ids).logits
        assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max().clamp_min(1), repr(edit)
        assert not torch.equal(plain, logits)
        kinds |= {type(part) for part in edit.parts}
    assert len(kinds) == 5


def test_a_small_gpt2_with_random_weights(tmp_path):
    model, tokenizer = small_gpt2(tmp_path)
    assert_equal(model, tokenizer, torch.randint(0, 20, (1, N)), 4, num_draws=25)


@pytest.mark.example
def test_smollm2(tmp_path):
    pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")
    model, tokenizer = rg.load_model("smollm2")
    model.config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("When Mary and John went to the store, John gave a drink to", return_tensors="pt").input_ids
    assert_equal(model.float(), tokenizer, ids, model.config.head_dim, num_draws=12)
