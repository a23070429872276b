"""Edits of encoders with padding, and of encoder-decoders with caches and beams."""

from __future__ import annotations

import random

import pytest
import torch

import regard as rg
from dense_edits import Dense, drawn
from extras import needs_transformers
from recurrent_models import build
from regard import RegardError
from regard.stats.numbering import layer_number
from registered import OURS

transformers = pytest.importorskip("transformers")
N = 8
BACKENDS = ("sdpa", "eager", *OURS)


def initialized(model):
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


@needs_transformers("5.1", "BERT calls any backend")
@torch.no_grad()
def test_drawn_edits_of_an_encoder_with_padding_equal_dense_attention():
    def bert(backend):
        config = transformers.BertConfig(
            vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=8
        )
        return initialized(transformers.BertModel._from_config(config, attn_implementation=backend))

    names = {}
    dense = Dense(lambda module: names[module])
    transformers.AttentionInterface.register("dense bert", dense)
    transformers.AttentionMaskInterface.register("dense bert", transformers.masking_utils.eager_mask)
    oracle = bert("dense bert")
    names |= {module: layer_number(name) for name, module in oracle.named_modules()}
    models = [bert(backend) for backend in BACKENDS]
    ids, mask = torch.randint(0, 20, (2, N)), torch.arange(N) < torch.tensor([[N], [N - 3]])
    rng = random.Random(0)
    for _ in range(8):
        drawn_edits = [drawn(rng, N - 3) for _ in range(2)]
        dense.edits = [e for _, e in drawn_edits]
        edit = drawn_edits[0][0] & drawn_edits[1][0]
        expected = oracle(ids, attention_mask=mask).last_hidden_state
        dense.edits = []
        for model, backend in zip(models, BACKENDS, strict=True):
            with rg.edit(model, edit), rg.watch(model):
                states = model(ids, attention_mask=mask).last_hidden_state
            error = 1e-4 if backend == "eager" else 1e-9
            assert torch.allclose(states[mask], expected[mask], rtol=error, atol=error), f"{backend} {edit!r}"


SMALL = {"vocab_size": 20, "d_model": 16, "decoder_start_token_id": 2, "eos_token_id": None, "pad_token_id": 1}
MODELS = {
    "bart": lambda: transformers.BartConfig(
        **SMALL, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=8, decoder_ffn_dim=8, max_position_embeddings=32, bos_token_id=0, forced_eos_token_id=None,
    ),
    "t5": lambda: transformers.T5Config(**SMALL, d_kv=4, d_ff=8, num_layers=2, num_heads=4),
}  # fmt: skip
PATHS = {
    "bart": ("model.decoder.layers.1.self_attn", "model.decoder.layers.0.encoder_attn"),
    "t5": ("decoder.block.1.layer.0.SelfAttention", "decoder.block.0.layer.1.EncDecAttention"),
}


@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_translator_with_a_cache_counts_queries_of_the_decoder(name, beams):
    own, cross = PATHS[name]
    edit = rg.KnockOut(rg.Where(layers=own, heads=2, queries=[3, 4], keys=[0, 2])) & rg.edits.ScaleWeights(
        rg.Where(layers=cross, queries=slice(2, 5), keys=slice(3, 6)), 0.1
    )
    ids = torch.randint(3, 20, (1, N))
    for backend in BACKENDS if name == "bart" else ("eager", "sdpa"):
        kind = transformers.BartForConditionalGeneration if name == "bart" else transformers.T5ForConditionalGeneration
        model = initialized(kind._from_config(MODELS[name](), attn_implementation=backend))
        options = {"max_new_tokens": 6, "min_new_tokens": 6, "num_beams": beams, "do_sample": False}
        with rg.edit(model, edit) as run, rg.watch(model) as seen:
            out = model.generate(ids, output_scores=True, return_dict_in_generate=True, **options)
        with rg.edit(model, edit):
            logits = model(ids, decoder_input_ids=out.sequences, use_cache=False).logits[:, :-1]
        plain = model(ids, decoder_input_ids=out.sequences, use_cache=False).logits[:, :-1]
        logs = logits.log_softmax(-1).gather(-1, out.sequences[:, 1:, None])[..., 0]
        if beams > 1:
            lengths = logs.shape[1]
            torch.testing.assert_close(out.sequences_scores.double(), logs.sum(-1) / lengths, rtol=1e-4, atol=1e-4)
        else:
            torch.testing.assert_close(torch.stack(out.scores, 1).double(), logits, rtol=1e-4, atol=1e-4)
        assert set(run.calls) == {own, cross} and not torch.allclose(plain, logits, atol=1e-3)
        assert all(check.ok is not False for check in seen.verify().values())


@torch.no_grad()
def test_a_number_that_two_layers_have_is_refused():
    model = initialized(transformers.BartModel(MODELS["bart"]()))
    ids = torch.randint(3, 20, (1, N))
    message = r"names layer 1, which is encoder.layers.1.self_attn and decoder"
    with pytest.raises(RegardError, match=message), rg.edit(model, rg.KnockOut(rg.Where(layers=1, keys=0))):
        model(ids, decoder_input_ids=ids)


LONG = {"vocab_size": 20, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4, "local_radius": 3}


def long_t5():
    torch.manual_seed(0)
    config = transformers.LongT5Config(**LONG, decoder_start_token_id=0)
    return transformers.LongT5ForConditionalGeneration(config).eval()


@needs_transformers("5.23", "recurrent layers are read, and LongT5 calls the attention interface")
@torch.no_grad()
@pytest.mark.parametrize("name", ["Zamba", "LongT5"])
def test_layers_that_cannot_be_edited_are_refused_or_listed(name):
    model, ids = long_t5() if name == "LongT5" else build(name), torch.randint(3, 20, (1, 9))
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if name == "LongT5" else {})
    with rg.watch(model) as seen:
        plain = model(**inputs).logits
    refusal = pytest.raises(rg.RegardError, match=r"could not be applied to .* Name the layers that it can change: W")
    with refusal, rg.edit(model, rg.KnockOut(rg.Where(keys=1))):
        model(**inputs)
    with rg.edit(model, rg.KnockOut(rg.Where(layers="*", keys=1))) as run:
        edited = model(**inputs).logits
    assert not torch.allclose(plain, edited) and not set(run.calls) & set(run.left_out)
    if name == "LongT5":
        assert [path for path in run.left_out if not path.startswith("encoder")] == []
    else:
        assert set(run.left_out) == {path for path, kind in seen.kinds.items() if kind != "attention"}
    assert run.left_out and f"left out: {next(iter(run.left_out))}" in repr(run)
    with rg.edit(model, rg.KnockOut(rg.Where(layers=list(run.calls), keys=1))) as named:
        assert torch.equal(model(**inputs).logits, edited)
    assert not named.left_out and named.calls == run.calls
