"""`watch(keep="qkv")`: the values of every call. Weights times values are what the output projection receives."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import ExitStack

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import recurrent_models
import regard as rg
from extras import needs_transformers
from miniatures import BERT, DECODERS, ENCODERS, LLAMA, OTHERS, SEQ2SEQ, sharpened, tokens
from regard.hf.capture import module_rerun

MODELS = {model.name: model for model in (*ENCODERS, *DECODERS, *SEQ2SEQ, *OTHERS)}
#: Model -> the name of its output projection, which has the heads one after the other as its input.
OUTPUTS = {"GPT2Model": "c_proj", "LlamaModel": "o_proj", "BertModel": "dense", "T5Model": "o", "ViTModel": "o_proj"}
OUTPUTS |= {"WhisperModel": "out_proj", "DeepseekV3Model": "o_proj", "GPTBigCodeModel": "c_proj"}


def joined_heads(model, seen, name, run):
    """The input of the output projection of each watched module, by hooks of our own."""
    received = {}

    def hook(module_name):
        return lambda _, given: received.update({module_name: given[0]})

    with ExitStack() as stack, torch.no_grad():
        for watched in seen.names:
            module = model.get_submodule(watched)
            if not hasattr(module, name):  # beside the attention: BERT
                module = model.get_submodule(watched.rpartition(".")[0]).output
            stack.callback(getattr(module, name).register_forward_pre_hook(hook(watched)).remove)
        run()
    return received


def summed(weights, values):
    """W . values, the heads one after the other, (B, I, H E)."""
    values = values.repeat_interleave(weights.shape[1] // values.shape[1], 1)
    return (weights.dense() @ values).transpose(1, 2).flatten(2)


def seen_with_values(model, inputs, **options):
    with rg.watch(model, keep="qkv", **options) as seen, torch.no_grad():
        outputs = model(**inputs)
    return outputs, seen


@needs_transformers("5.23", "the projections have these names")
@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_weights_times_values_are_what_the_output_projection_receives(name, backend):
    model = MODELS[name].make(backend)
    inputs = MODELS[name].inputs("left" if name == "LlamaModel" else "")
    with torch.no_grad():
        plain = model(**inputs)[0]
    outputs, seen = seen_with_values(model, inputs)
    assert torch.equal(plain, outputs[0])  # the model computes as before
    expected = joined_heads(model, seen, OUTPUTS[name], lambda: model(**inputs))
    real = inputs.get("attention_mask", torch.ones(2, 1)).bool()
    for layer, weights in seen.maps.items():
        mine = summed(weights, seen[layer].value)
        rows = real.expand(-1, mine.shape[1]) if real.shape[1] == 1 else real
        torch.testing.assert_close(mine[rows], expected[layer][rows], atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["Qwen3Next", "Mamba2", "Lfm2"])
def test_values_of_recurrent_layers_give_the_output_of_the_recurrence(name):
    model, ids = recurrent_models.build(name), recurrent_models.tokens(7)
    _, seen = seen_with_values(model, {"input_ids": ids})
    cache = "cache_params" if name == "Mamba2" else "past_key_values"
    with rg.watch(model, keep="qkv") as stepped, torch.no_grad():
        past = model(ids[:, :4], use_cache=True)
        for step in range(4, 7):
            past = model(ids[:, step : step + 1], **{cache: past[cache]}, use_cache=True)
    for layer, weights in seen.maps.items():
        values = seen[layer].value
        assert values.shape[2] == 7 and weights.shape[1] % values.shape[1] == 0
        # a call with a cache has the values of all tokens so far, and its rows are those of the whole text
        torch.testing.assert_close(stepped[layer].value, values, atol=1e-5, rtol=0)
        last = summed(stepped[layer], stepped[layer].value)
        torch.testing.assert_close(last[:, -1], summed(weights, values)[:, -1], atol=1e-5, rtol=0)
        assert stepped.calls(layer)[0].value.shape[2] == 4


@needs_transformers("5.15", "DiffLlama calls the attention interface")
def test_differential_attention_has_values_of_both_halves():
    config = transformers.DiffLlamaConfig(**LLAMA | {"head_dim": 4})
    torch.manual_seed(0)
    model = sharpened(transformers.DiffLlamaModel._from_config(config, attn_implementation="eager").eval())
    inputs = {"input_ids": tokens(6)}
    _, seen = seen_with_values(model, inputs)
    expected = joined_heads(model, seen, "o_proj", lambda: model(**inputs))
    for layer, weights in seen.maps.items():
        module = model.get_submodule(layer)
        heads = summed(weights, seen[layer].value).unflatten(-1, (weights.shape[1], -1))
        normed = (1 - module.lambda_init) * module.groupnorm(heads)
        torch.testing.assert_close(normed.flatten(2), expected[layer], atol=2e-5, rtol=0)


def llama(**changes):
    torch.manual_seed(0)
    return sharpened(transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA | changes)).eval())


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static", "disable_compile": True}, {"num_beams": 3}])
def test_a_generation_has_the_values_of_each_call(options):
    model, ids = llama(), tokens(4, batch=1)
    generated, expected = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, **options}, []
    projection = model.model.layers[1].self_attn.o_proj
    hook = projection.register_forward_pre_hook(lambda _, given: expected.append(given[0].clone()))
    with rg.watch(model, keep="qkv") as seen, torch.no_grad():
        model.generate(ids, **generated)
    hook.remove()
    for call, (weights, wanted) in enumerate(zip(seen.calls(1), expected, strict=True)):
        mine = summed(weights, seen.calls(1)[call].value)
        torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=0)
    held = {seen.calls(1)[call].value.untyped_storage().data_ptr() for call in range(5)}
    assert options or len(held) == 1  # a growing cache is held once


@pytest.mark.parametrize("batch_first", [True, False])
def test_layers_of_torch_project_their_values_again(batch_first):
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(16, 4, 16, batch_first=batch_first).eval()
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    inputs = [t if batch_first else t.transpose(0, 1) for t in (x, memory)]
    with rg.watch(layer, keep="qkv") as seen, torch.no_grad():
        layer(*inputs)
    assert {name: weights.value.shape[1:] for name, weights in seen.maps.items()} == {
        "self_attn": (4, 5, 4),
        "multihead_attn": (4, 7, 4),
    }
    with torch.no_grad():
        own = layer.self_attn(*[inputs[0]] * 3)[0]
        mine = layer.self_attn.out_proj(summed(seen["self_attn"], seen["self_attn"].value))
    torch.testing.assert_close(mine if batch_first else mine.transpose(0, 1), own, atol=1e-5, rtol=0)
    with torch.no_grad():
        inputs[1].add_(1.0)
    with pytest.raises(rg.RegardError, match="changed in place"):
        _ = seen["multihead_attn"].value
    plain, y = nn.MultiheadAttention(16, 4, batch_first=True, add_bias_kv=True).eval(), torch.randn(1, 3, 16)
    with rg.watch(plain, keep="qkv") as alone, torch.no_grad():
        output = plain(y, y, y)[0]
    with torch.no_grad():
        mine = plain.out_proj(summed(alone[0], alone[0].value))
    torch.testing.assert_close(mine, output, atol=1e-5, rtol=0)


class Attending(nn.Module):
    """Calls `attend` with this attention; the values are the inputs, in two heads."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        split = x.unflatten(-1, (2, -1)).transpose(1, 2)
        self.output = self.attention(split, split, split).output
        return self.output


def test_attend_its_composites_and_the_modules_of_nn():
    torch.manual_seed(0)
    x = torch.randn(2, 6, 8)
    composite = rg.composites.Grouped(rg.Attention(), rg.composites.MeanGroups(2))
    for attention in (rg.Attention(mask=rg.causal()), composite):
        module = Attending(attention)
        with rg.watch(module, keep="qkv") as seen, torch.no_grad():
            module(x)
        torch.testing.assert_close(seen[0].dense() @ seen[0].value, module.output, atol=1e-5, rtol=0)
    shared = rg.nn.MultiHeadAttention(8, 4, 2, rg.Attention(mask=rg.causal()), output_projection=False).eval()
    with rg.watch(shared, keep="qkv") as seen, torch.no_grad():
        expected, keys = shared(x).output, None
    torch.testing.assert_close(summed(seen[0], seen[0].value), expected, atol=1e-5, rtol=0)
    with rg.watch(shared, keep="qkv") as seen, torch.no_grad():
        for step in range(6):
            _, keys = shared.advance(x[:, step : step + 1], keys)
    torch.testing.assert_close(summed(seen[0], seen[0].value), expected, atol=1e-5, rtol=0)
    latent = rg.nn.MultiHeadLatentAttention(8, 2, 4, head_dim=4, rotary_dim=2).eval()
    with rg.watch(latent, keep="qkv") as seen, torch.no_grad():
        expected = latent(x).output
        torch.testing.assert_close(latent.output(summed(seen[0], seen[0].value)), expected, atol=1e-5, rtol=0)


class ByHand(nn.Module):
    """Multi-head attention of a tutorial, with each of the usual ways to write the product with the values."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        weights = F.softmax(q @ k.mT / 2, dim=-1)
        if self.way == "matmul":
            heads = weights @ v
        elif self.way == "bmm":
            heads = torch.bmm(weights.flatten(0, 1), v.flatten(0, 1)).unflatten(0, (len(x), -1))
        else:
            heads = torch.einsum("bhqk,bkhd->bhqd", weights, v.transpose(1, 2))
        self.joined = heads.transpose(1, 2).flatten(2)
        return self.out(self.joined)


@pytest.mark.parametrize("way", ["matmul", "bmm", "einsum"])
@pytest.mark.parametrize("small", [0, module_rerun.SMALL])
def test_modules_with_a_softmax_of_their_own(way, small, monkeypatch):
    monkeypatch.setattr(module_rerun, "SMALL", small)
    torch.manual_seed(0)
    module, x = ByHand(way).eval(), torch.randn(3, 5, 8)
    _, seen = seen_with_values(module, {"x": x})
    torch.testing.assert_close(summed(seen[0], seen[0].value), module.joined, atol=1e-6, rtol=0)


def test_measured_weights_have_values_unless_a_key_has_two():
    big_bird = BERT | {"attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1}
    torch.manual_seed(1)
    model, ids = sharpened(transformers.BigBirdModel(transformers.BigBirdConfig(**big_bird)).eval()), tokens(24)
    _, seen = seen_with_values(model, {"input_ids": ids})
    expected = joined_heads(model, seen, "dense", lambda: model(ids))
    for layer, weights in seen.maps.items():
        torch.testing.assert_close(summed(weights, seen[layer].value), expected[layer], atol=2e-5, rtol=0)
    long = BERT | {"attention_window": [4, 4], "max_position_embeddings": 64}
    model = sharpened(transformers.LongformerModel(transformers.LongformerConfig(**long)).eval())
    everywhere = torch.zeros(2, 16, dtype=torch.long)
    everywhere[:, 3] = 1
    _, seen = seen_with_values(model, {"input_ids": tokens(16), "global_attention_mask": everywhere})
    with pytest.raises(rg.RegardError, match="projects its values twice"):
        _ = seen[0].value


def test_what_has_no_values_says_why():
    model, inputs = llama(), {"input_ids": tokens(5)}
    with rg.watch(model) as plain, torch.no_grad():
        model(**inputs)
    with pytest.raises(rg.RegardError, match=r"weights\.value: this map has no values.*keep='qkv'"):
        _ = plain[0].value
    assert plain._parts[plain.names[0]].calls[0].values is None
    with rg.watch(model, keep="statistics") as folded, torch.no_grad():
        model(**inputs)
    with pytest.raises(rg.RegardError, match="only statistics were kept"):
        _ = folded[0].value
    _, seen = seen_with_values(model, inputs, layers=[1])
    assert seen[1].value.shape == (2, 2, 5, 8) and len(seen) == 1
    with pytest.raises(rg.RegardError, match="call 3 is out of range: the module was called 1 times"):
        seen.head_output(1, call=3)
    with pytest.raises(rg.RegardError, match="Known names: qk, qkv, statistics"), rg.watch(model, keep="kv"):
        pass


def test_parts_of_a_model_have_their_values():
    model = MODELS["T5Model"].make("sdpa")
    _, seen = seen_with_values(model, {"input_ids": tokens(9), "decoder_input_ids": tokens(6)})
    assert seen.cross[0].value.shape[2] == 9
    assert seen.decoder[0].value.shape[2] == 6


def test_a_map_of_a_watch_without_values_names_the_remedy():
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    output = rg.attend(q, k, v)
    for weights in (output.weights, output.weights.select([0], [1]), copy.deepcopy(output.weights)):
        with pytest.raises(rg.RegardError, match=r"keep='qkv'.*rg\.attend\(query, key, value\).*your own"):
            _ = weights.value
    with rg.watch(keep="qkv") as seen:
        kept = rg.attend(q, k, v)
    assert torch.equal(seen[0].value, v) and seen[0].value.data_ptr() == v.data_ptr()
    torch.testing.assert_close(kept.output, seen[0] @ seen[0].value)


def test_maps_of_every_kind_of_call_have_their_values_and_are_freed_with_the_run():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 16, batch_first=True).eval()
    model, ids = llama(), tokens(5)
    runs = [(model, ids), (ByHand("bmm").eval(), torch.randn(3, 5, 8)), (layer, torch.randn(2, 5, 16))]
    runs += [(Attending(rg.Attention()), torch.randn(2, 6, 8))]
    for module, x in runs:
        with rg.watch(module, keep="qkv") as seen, torch.no_grad():
            module(x)
        weights = seen[0]
        assert weights in seen and seen[0] is weights
        output = weights @ weights.value
        torch.testing.assert_close(output, seen.head_output(0), atol=1e-5, rtol=0)
        held = weakref.ref(weights)
        gc.collect()
        gc.disable()
        try:
            del seen, weights
            assert held() is None, type(module).__name__
        finally:
            gc.enable()


def test_values_are_held_once():
    model, ids = llama(), tokens(5)
    with rg.watch(model, keep="qkv") as seen, torch.no_grad():
        model(ids)
    places = {seen[0].value.untyped_storage().data_ptr() for _ in range(3)}
    places.add(seen._parts[seen.names[0]].calls[0].values.tensor.untyped_storage().data_ptr())
    assert len(places) == 1 and seen[0].value.data_ptr() == seen.calls(0)[-1].value.data_ptr()


def test_an_edited_and_a_generated_map_have_the_values_of_their_run():
    model, ids = llama(), tokens(5, batch=1)
    half = rg.edits.ScaleWeights(rg.Where(layers=1, keys=0), 0.5)
    with torch.no_grad(), rg.edit(model, half), rg.watch(model, keep="qkv") as seen:
        model(ids)
    plain = seen[1].source
    assert torch.equal(seen[1].query, plain.query) and torch.equal(seen[1].key, plain.key)
    assert seen[1].value.shape == seen[1].shares().value.shape == (1, 2, 5, 8)
    with rg.watch(model, keep="qkv") as seen, torch.no_grad():
        out = model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    with rg.watch(model, keep="qkv") as once, torch.no_grad():
        model(out[:, :-1])
    for whole, again in zip(seen.generation, once, strict=True):
        for name in ("query", "key", "value"):
            torch.testing.assert_close(getattr(whole, name), getattr(again, name), atol=1e-5, rtol=0)
