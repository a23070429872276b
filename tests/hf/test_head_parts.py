"""Outputs of heads, their parts of the residual stream and of a logit, and maps weighted by values.

The oracles are the model's own modules, read by hooks of the tests, and dense arithmetic.
"""

from __future__ import annotations

import contextvars
import re
import threading
from contextlib import ExitStack

import pytest
import torch
import transformers
from torch import nn

import recurrent_models
import regard as rg
from extras import needs_transformers
from miniatures import DECODERS, ENCODERS, GPT2, LLAMA, OTHERS, SEQ2SEQ, V, sharpened, tokens
from regard.maps.stored import load_map, save_map

MODELS = {model.name: model for model in (*ENCODERS, *DECODERS, *SEQ2SEQ, *OTHERS)}
NAMES = ["GPT2Model", "LlamaModel", "BertModel", "T5Model", "ViTModel", "WhisperModel", "GPTNeoXModel", "OlmoModel"]
#: Attention module of each model -> the module whose output is that of the attention.
RESULTS = {
    "BertModel": lambda model, name: model.get_submodule(name.removesuffix("self") + "output.dense"),
    "ViTModel": lambda model, name: model.get_submodule(name.replace("attention.attention", "attention")),
}


def built(name):
    if name in recurrent_models.CONFIGS:
        return recurrent_models.build(name), {"input_ids": recurrent_models.tokens(7)}
    return MODELS[name].make("sdpa"), MODELS[name].inputs()


def outputs_of(modules, run):
    """The outputs of modules in one run, by name."""
    outputs = {}

    def keep(name):
        return lambda _, __, output: outputs.update({name: output[0] if isinstance(output, tuple) else output})

    with ExitStack() as stack, torch.no_grad():
        for name, module in modules.items():
            stack.callback(module.register_forward_hook(keep(name)).remove)
        run()
    return outputs


def seen_with_values(model, inputs, **options):
    with rg.watch(model, keep="qkv", **options) as seen, torch.no_grad():
        outputs = model(**inputs)
    return outputs, seen


@pytest.mark.parametrize("name", [*NAMES, "Qwen3Next", "KimiLinear", "Mamba2", "Rwkv"])
def test_the_parts_of_the_heads_and_the_bias_sum_to_the_output_of_the_attention(name):
    model, inputs = built(name)
    _, seen = seen_with_values(model, inputs)
    result = RESULTS.get(name, lambda model, path: model.get_submodule(path))
    expected = outputs_of({path: result(model, path) for path in seen.names}, lambda: model(**inputs))
    for path, weights in seen.maps.items():
        parts, bias = seen.head_part(path), seen.bias_part(path)
        assert parts.shape[:3] == weights.shape[:3] and bias.shape == parts.shape[3:]
        torch.testing.assert_close(parts.sum(1) + bias, expected[path], atol=3e-5, rtol=1e-5)
        H = weights.shape[1]
        torch.testing.assert_close(seen.head_part(path, [H - 1, 0]), parts[:, [H - 1, 0]], atol=1e-5, rtol=0)
        torch.testing.assert_close(seen.head_part(path, -1), parts[:, -1], atol=1e-5, rtol=0)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", ["LlamaModel", "Qwen3Next"])
def test_the_output_of_a_head_is_its_weights_times_its_values(name):
    model, inputs = built(name)
    _, seen = seen_with_values(model, inputs)
    for path, weights in seen.maps.items():
        values = seen[path].value
        group = weights.shape[1] // values.shape[1]
        expected = weights.dense() @ values.repeat_interleave(group, 1)
        torch.testing.assert_close(seen.head_output(path), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(seen.head_output(path, 1), expected[:, 1], atol=1e-5, rtol=0)
        torch.testing.assert_close(seen.head_output(path, [1, 0, 1]), expected[:, [1, 0, 1]], atol=1e-5, rtol=0)


def test_the_attention_of_torch_has_parts_without_calling_its_projection():
    torch.manual_seed(0)
    layer, x = nn.TransformerEncoderLayer(16, 4, 16, batch_first=True).eval(), torch.randn(2, 5, 16)
    with rg.watch(layer, keep="qkv") as seen, torch.no_grad():
        layer(x)
        expected = layer.self_attn(x, x, x)[0]
    parts = seen.head_part(0, call=0)
    torch.testing.assert_close(parts.sum(1) + seen.bias_part(0), expected, atol=1e-5, rtol=0)


def test_parts_of_a_generation_and_of_joined_steps():
    torch.manual_seed(0)
    model = sharpened(transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).eval())
    with rg.watch(model, keep="qkv") as seen, torch.no_grad():
        ids = model.generate(tokens(4, batch=1), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    _, whole = seen_with_values(model, {"input_ids": ids[:, :-1]})
    for call, row in ((0, slice(4)), (2, slice(5, 6)), (-1, slice(6, 7))):
        part, effect = seen.head_part(1, 2, call=call), seen.logit_effect(0, 7, call=call)
        torch.testing.assert_close(part, whole.head_part(1, 2)[:, row], atol=1e-5, rtol=0)
        torch.testing.assert_close(effect, whole.logit_effect(0, 7)[:, :, row], atol=1e-4, rtol=0)
    module, x, keys = (
        rg.nn.MultiHeadAttention(8, 4, 2, rg.Attention(mask=rg.causal())).eval(),
        torch.randn(2, 6, 8),
        None,
    )
    with rg.watch(module, keep="qkv") as steps, torch.no_grad():
        for step in range(6):
            _, keys = module.advance(x[:, step : step + 1], keys)
        expected = module(x).output
    torch.testing.assert_close(steps.head_part(0, call=0).sum(1) + steps.bias_part(0), expected, atol=1e-5, rtol=0)


def held(value, visited):
    """The bytes of all tensors that an object of this package holds, each memory once."""
    is_tensor = isinstance(value, torch.Tensor)
    key = value.untyped_storage().data_ptr() if is_tensor else id(value)
    if key in visited:
        return 0
    visited.add(key)
    if is_tensor:
        return value.untyped_storage().nbytes()
    if isinstance(value, dict | list | tuple):
        return sum(held(part, visited) for part in (value.values() if isinstance(value, dict) else value))
    is_own = type(value).__module__.startswith("regard.") and not isinstance(value, nn.Module)
    return sum(held(part, visited) for part in getattr(value, "__dict__", {}).values()) if is_own else 0


def test_what_is_kept_grows_with_the_length_not_with_its_square():
    model = sharpened(transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2 | {"n_positions": 600})).eval())
    sizes = []
    for length in (150, 300, 600):
        _, seen = seen_with_values(model, {"input_ids": tokens(length, batch=1)})
        seen.head_part(0), seen.value_weighted(1), seen.logit_effect(0, 5)
        sizes.append(held([seen.kept, seen._parts], set()))
    assert sizes[2] - sizes[1] <= 2.1 * (sizes[1] - sizes[0]) and sizes[0] > 0


# Maps weighted by values


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", ["LlamaModel", "BertModel"])
def test_a_value_weighted_map_is_that_of_dense_arithmetic(name, tmp_path):
    model, inputs = built(name)
    _, seen = seen_with_values(model, inputs)
    path = seen.names[1]
    weights, values = seen[path].dense(), seen[path].value
    B, H, I, J = weights.shape
    values = values.repeat_interleave(H // values.shape[1], 1)
    output = model.get_submodule(
        path.removesuffix("self") + "output.dense" if name == "BertModel" else path + ".o_proj"
    )
    by_head = output.weight.detach().T.unflatten(0, (H, -1))
    # Kobayashi et al. 2020: the norm of the vector that key j sends to query i through head h
    sent = weights[..., None] * torch.einsum("bhje,hec->bhjc", values, by_head)[:, :, None]
    mine = seen.value_weighted(path)
    torch.testing.assert_close(mine.dense(), sent.norm(dim=-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mine[1, 2, [3, 0], 1:7], sent.norm(dim=-1)[1, 2, [3, 0], 1:7], atol=1e-5, rtol=1e-5)
    plain = weights * values.norm(dim=-1)[:, :, None]
    of_values = seen.value_weighted(path, projected=False)
    torch.testing.assert_close(of_values.dense(), plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(of_values.select([1], [3, 0]).dense(), plain[1:, [3, 0]], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(of_values.received(), plain.sum(2), atol=1e-4, rtol=1e-5)
    shares = plain / plain.sum(-1, keepdim=True)
    torch.testing.assert_close(of_values.shares().entropy(), torch.special.entr(shares).sum(-1), atol=1e-5, rtol=1e-5)
    with pytest.raises(rg.RegardError, match="needs shares"):
        of_values.entropy()
    save_map(tmp_path / "map.safetensors", of_values)
    torch.testing.assert_close(load_map(tmp_path / "map.safetensors").dense(), of_values.dense())
    assert mine.shape == (B, H, I, J) and rg.heatmap(mine, head=0)


def test_a_value_weighted_map_has_a_profile_and_roles():
    model = built("GPT2Model")[0]
    ids, drawn = torch.arange(3, 33)[None], torch.randperm(30, generator=torch.Generator().manual_seed(0))
    _, seen = seen_with_values(model, {"input_ids": ids})
    _, shuffled = seen_with_values(model, {"input_ids": ids[:, drawn]})
    words, other = ([f"t{number}" for number in order] for order in (range(30), drawn.tolist()))
    lazy, null = ({name: of.value_weighted(name) for name in of.names} for of in (seen, shuffled))
    dense, dense_null = (
        {name: rg.maps.DenseMap(sent.dense() / sent.dense().sum(-1, keepdim=True)) for name, sent in maps.items()}
        for maps in (lazy, null)
    )
    pairs = zip(rg.stats.profile(lazy, words).layers, rg.stats.profile(dense, words).layers, strict=True)
    for mine, expected in pairs:
        torch.testing.assert_close(mine.received, expected.received, atol=1e-4, rtol=1e-4)
        for statistic in ("entropy", "previous", "itself", "first"):
            torch.testing.assert_close(mine.values[statistic], expected.values[statistic], atol=1e-4, rtol=1e-4)
    tables = [
        rg.stats.roles(maps, words, null=of_null, null_tokens=other)
        for maps, of_null in ((lazy, null), (dense, dense_null))
    ]
    # "broad" counts the keys that the mask allows, and dense weights have no mask
    scores = [torch.tensor([r.score for r in table.roles if r.kind != "broad"]).nan_to_num() for table in tables]
    torch.testing.assert_close(*scores, atol=1e-4, rtol=1e-4)


@needs_transformers("5.23", "the recurrent layers are read")
@pytest.mark.usefixtures("small_blocks")
def test_signed_weights_have_norms_that_are_not_negative():
    model, inputs = built("Qwen3Next")
    _, seen = seen_with_values(model, inputs)
    weights, values = seen[0].dense(), seen[0].value
    assert (weights < 0).any()
    sent = weights[..., None] * values.repeat_interleave(weights.shape[1] // values.shape[1], 1)[:, :, None]
    mine = seen.value_weighted(0)
    torch.testing.assert_close(mine.dense(), sent.norm(dim=-1), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(mine.carried(), sent.norm(dim=-1).sum(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mine.received(), sent.norm(dim=-1).sum(2), atol=1e-5, rtol=1e-5)


def test_norms_of_another_shape_are_refused():
    x = torch.zeros(1, 2, 3, 4)
    weights = rg.Attention()(x, x, x).weights
    with pytest.raises(rg.RegardError, match=r"\(B, H, J\) = \(1, 2, 3\).*shape \(1, 3\)"):
        rg.maps.ValueWeightedMap(weights, torch.ones(1, 3))


# Direct effects on a logit


def language_model(name):
    torch.manual_seed(0)
    config = {"gpt2": transformers.GPT2Config(**GPT2), "llama": transformers.LlamaConfig(**LLAMA)}[name]
    model = sharpened(transformers.AutoModelForCausalLM.from_config(config).eval()).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))  # gains and biases that matter
    return model


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_heads_mlps_biases_and_the_embedding_sum_to_the_logit(name, monkeypatch):
    if name == "llama":  # its norm computes in float32, whatever the model is in
        kind = transformers.models.llama.modeling_llama.LlamaRMSNorm
        monkeypatch.setattr(
            kind, "forward", lambda self, x: self.weight * x * (x * x).mean(-1, True).add(self.variance_epsilon).rsqrt()
        )
    model, inputs, token = language_model(name), {"input_ids": tokens(9)}, 11
    outputs, seen = seen_with_values(model, inputs)
    blocks = model.transformer.h if name == "gpt2" else model.model.layers
    norm = model.transformer.ln_f if name == "gpt2" else model.model.norm
    first = {"embedding": model.transformer.drop if name == "gpt2" else model.model.embed_tokens}
    parts = outputs_of(first | {f"mlp {n}": block.mlp for n, block in enumerate(blocks)}, lambda: model(**inputs))
    stream = {}
    hook = norm.register_forward_pre_hook(lambda _, given: stream.update(x=given[0]))
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    x, row = stream["x"], model.lm_head.weight[token].detach()
    mean = (lambda p: p.mean(-1, keepdim=True)) if name == "gpt2" else (lambda p: 0.0)
    eps = norm.eps if name == "gpt2" else norm.variance_epsilon
    scale = ((x - mean(x)).square().mean(-1, keepdim=True) + eps).rsqrt()

    def direct(part):
        return ((part - mean(part)) * scale * norm.weight.detach()) @ row

    total = sum(direct(part) for part in parts.values())
    total = total + sum(direct(seen.bias_part(path).expand_as(x)) for path in seen.names)
    total = total + (norm.bias.detach() @ row if name == "gpt2" else 0.0)
    for path in seen.names:
        effect = seen.logit_effect(path, token)
        of_parts = torch.stack([direct(part) for part in seen.head_part(path).unbind(1)], 1)
        torch.testing.assert_close(effect, of_parts, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(seen.logit_effect(path, token, [2]), effect[:, [2]])
        torch.testing.assert_close(seen.logit_effect(path, token, 2), effect[:, 2])
        total = total + effect.sum(1)
    torch.testing.assert_close(total, outputs.logits[..., token].detach(), atol=1e-9, rtol=1e-9)


#: Models that do not add what their heads write to one stream: a norm after attention, or a factor.
NO_SUM = {
    "Gemma2": LLAMA | {"sliding_window": 4},
    "Granite": LLAMA | {"residual_multiplier": 0.5},
    "Bert": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_that_do_not_add_to_one_stream_have_no_direct_effect(dtype):
    torch.manual_seed(0)
    inputs = {"input_ids": tokens(6)}
    for name, settings in NO_SUM.items():
        config = getattr(transformers, f"{name}Config")(**settings | {"vocab_size": V})
        kind = transformers.AutoModelForMaskedLM if name == "Bert" else transformers.AutoModelForCausalLM
        model = sharpened(kind.from_config(config, attn_implementation="eager").eval()).to(dtype)
        _, seen = seen_with_values(model, inputs)
        with pytest.raises(rg.RegardError, match="so a head has no direct effect on the logit"):
            seen.logit_effect(1, 5)
    plain = sharpened(transformers.GraniteForCausalLM(transformers.GraniteConfig(**LLAMA)).eval()).to(dtype)
    _, seen = seen_with_values(plain, inputs)
    assert seen.logit_effect(1, 5).shape == (2, 4, 6)  # without the factor it is a sum


def test_a_watch_that_follows_several_threads_has_no_parts():
    model, inputs = language_model("gpt2"), {"input_ids": tokens(5)}
    with rg.watch(model, keep="qkv") as seen, torch.no_grad():
        model(**inputs)
        other = threading.Thread(target=contextvars.copy_context().run, args=(lambda: model(**inputs),))
        other.start(), other.join()
    assert seen[0].value.shape == (2, 4, 5, 4)
    for ask in (lambda: seen.head_part(0), lambda: seen.logit_effect(0, 3), lambda: seen.value_weighted(0)):
        with pytest.raises(rg.RegardError, match="ran in several threads under one watch"):
            ask()


# Bad input


class Letters:
    """A tokenizer of letters."""

    def get_vocab(self):
        return {"a": 7, "Ġb": 8}

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [8] if text == " b" else [3] * len(text)}

    def convert_ids_to_tokens(self, ids):
        return ["?"] * len(ids)


def test_tokens_are_ids_or_texts_of_one_token():
    model = language_model("gpt2")
    ids = tokens(5)
    _, seen = seen_with_values(model, {"input_ids": ids})
    expected = seen.logit_effect(0, 7), seen.logit_effect(0, 8)
    assert torch.equal(seen.logit_effect(0, "a", tokenizer=Letters()), expected[0])
    assert torch.equal(seen.logit_effect(0, " b", tokenizer=Letters()), expected[1])
    with rg.watch(model, Letters(), keep="qkv") as named, torch.no_grad():
        model(ids)
    torch.testing.assert_close(named.logit_effect(0, token="a"), expected[0])
    for token, message in (
        ("a", r"a text needs its tokenizer"),
        (V, rf"token {V} is not in the vocabulary: the head has {V} logits"),
        (-1, "a token is an id of the vocabulary"),
        (True, "a token is an id of the vocabulary"),
        (1.5, "a token is an id of the vocabulary"),
    ):
        with pytest.raises(rg.RegardError, match=message):
            seen.logit_effect(0, token)
    with pytest.raises(rg.RegardError, match=r"this text is 3 tokens: '\?' '\?' '\?'"):
        seen.logit_effect(0, "xyz", tokenizer=Letters())


@pytest.mark.parametrize("text, reason", [("xyz", "this text is 3 tokens"), ("", "makes no token of this text")])
@pytest.mark.parametrize("method", ["logit_effect", "logit_map"])
def test_the_error_of_a_text_names_the_method_and_the_argument(method, text, reason):
    _, seen = seen_with_values(language_model("gpt2"), {"input_ids": tokens(5)})
    for given in ({"token": text}, {"token": 7, "against": text}):
        call = re.escape(f"seen.{method}({list(given)[-1]}={text!r}): ")
        with pytest.raises(rg.RegardError, match=f"^{call}.*{reason}"):
            getattr(seen, method)(0, **given, tokenizer=Letters())


class NoOutput(nn.Module):
    """Attention whose heads are never projected."""

    def __init__(self):
        super().__init__()
        self.attention = rg.nn.MultiHeadAttention(8, 2, output_projection=False)

    def forward(self, x):
        return self.attention(x).output


class Interleaved(nn.Module):
    """An output projection that reads channel by channel, not head by head."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        heads = ((q @ k.mT).softmax(-1) @ v).permute(0, 2, 3, 1)
        return self.out(heads.flatten(2))


@needs_transformers("5.23", "the recurrent layers are read")
def test_what_has_no_parts_says_why():
    torch.manual_seed(0)
    model, inputs = language_model("gpt2"), {"input_ids": tokens(5)}
    with rg.watch(model) as plain, torch.no_grad():
        model(**inputs)
    for ask in (plain.value_weighted, plain.head_output, plain.head_part, plain.bias_part):
        with pytest.raises(rg.RegardError, match=r"values are not kept. Watch again with watch\(model, keep='qkv'\)"):
            ask(0)
    with pytest.raises(rg.RegardError, match="keep='qkv'"):
        plain.logit_effect(0, 3)
    _, seen = seen_with_values(model, inputs)
    with pytest.raises(rg.RegardError, match="head 4 is out of range"):
        seen.head_part(0, 4)
    with pytest.raises(rg.RegardError, match="call 2 is out of range: the module was called 1 times"):
        seen.head_output(0, call=2)
    with pytest.raises(rg.RegardError, match="the head index must be an integer"):
        seen.head_output(0, "first")
    with torch.no_grad():
        model.transformer.h[0].attn.c_proj.weight.mul_(2.0)
    for ask in (seen.head_part, seen.value_weighted):
        with pytest.raises(rg.RegardError, match="was changed in place after it was watched"):
            ask(0)
    seen.value_weighted(0, projected=False)
    base, x = built("LlamaModel")[0], torch.randn(2, 5, 8)
    _, seen = seen_with_values(base, inputs)
    with pytest.raises(rg.RegardError, match="no language-model head"):
        seen.logit_effect(0, 3)
    _, seen = seen_with_values(NoOutput().eval(), {"x": x})
    assert seen.head_output(0).shape == (2, 2, 5, 4)
    assert seen.value_weighted(0).shape == (2, 2, 5, 5)
    with pytest.raises(rg.RegardError, match="has no output projection"):
        seen.head_part(0)
    with pytest.raises(rg.RegardError, match="has no output projection"):
        seen.value_weighted(0, projected=True)
    _, seen = seen_with_values(Interleaved().eval(), {"x": x})
    with pytest.raises(rg.RegardError, match="it is not known which part of it is which head"):
        seen.head_part(0)
    gated, given = built("Qwen3Next")
    _, seen = seen_with_values(gated, given)
    with pytest.raises(rg.RegardError, match=r"a gate or a norm stands between.*projected=False"):
        seen.value_weighted(1, projected=True)
    assert seen.value_weighted(1).shape == (2, 2, 7, 7)


@pytest.mark.parametrize("against", [None, 3])
@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_the_logit_map_is_what_each_value_alone_adds_to_the_logit(name, against):
    """The formula in float64: w_ij (v_j W_h) . (gain (u - u') less its mean) / the norm's root mean square."""
    torch.manual_seed(0)
    model = small_language_models()[name]
    ids = torch.randint(0, 20, (2, 6))
    with rg.watch(model, keep="qkv") as seen, torch.no_grad():
        states = model(ids, output_hidden_states=True)
    stack = model.transformer if name == "GPT2" else model.model
    kept = []
    norm = stack.ln_f if name == "GPT2" else stack.norm
    with norm.register_forward_pre_hook(lambda _, args: kept.append(args[0])), torch.no_grad():
        model(ids)
    x, direction = kept[0], model.lm_head.weight[7] - (0 if against is None else model.lm_head.weight[against])
    direction = norm.weight * direction
    if name == "GPT2":
        x, direction = x - x.mean(-1, keepdim=True), direction - direction.mean()
    scale = (x.square().mean(-1) + (norm.eps if name == "GPT2" else norm.variance_epsilon)).rsqrt()
    assert states.logits.shape[0] == 2
    for layer in range(2):
        weights, values = seen[layer].dense(), seen[layer].value
        H = weights.shape[1]
        block = stack.h[layer].attn.c_proj.weight if name == "GPT2" else stack.layers[layer].self_attn.o_proj.weight.mT
        matrix = block.unflatten(0, (H, -1))
        values = values.repeat_interleave(H // values.shape[1], 1)
        alone = torch.einsum("bhje,hec,c->bhj", values, matrix, direction)
        expected = weights * alone[:, :, None] * scale[:, None, :, None]
        found = seen.logit_map(layer, 7, against=against)
        torch.testing.assert_close(found.dense(), expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.sum(-1), seen.logit_effect(layer, 7, against=against), rtol=1e-9, atol=1e-12)
        one = seen.logit_map(layer, 7, head=1, against=against)
        assert one.shape == (2, 1, 6, 6) and torch.equal(one.dense()[:, 0], found.dense()[:, 1])


def small_language_models():
    quiet = {"vocab_size": 20, "bos_token_id": 0, "eos_token_id": None}
    gpt2 = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=16, **quiet)
    llama = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
        intermediate_size=8, **quiet,
    )  # fmt: skip
    models = {"GPT2": transformers.GPT2LMHeadModel(gpt2), "Llama": transformers.LlamaForCausalLM(llama)}
    for model in models.values():
        for parameter in model.double().eval().parameters():
            nn.init.normal_(parameter, std=0.5)
    return models


def test_a_patched_output_has_no_logit_map():
    model = small_language_models()["Llama"]
    patch = rg.edits.ActivationPatch(rg.Where(layers=1, heads=0), source=torch.zeros(1, 4, 3, 4))
    with torch.no_grad(), rg.edit(model, patch), rg.watch(model, keep="qkv") as seen:
        model(torch.tensor([[1, 2, 3]]))
    assert seen.logit_map(0, 7).shape == (1, 4, 3, 3)
    with pytest.raises(rg.RegardError, match="an edit patched its output"):
        seen.logit_map(1, 7)


@torch.no_grad()
@pytest.mark.parametrize("fold_norms", [False, True])
@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_copying_scores_are_those_of_the_eigenvalues_of_the_whole_circuit(name, fold_norms):
    torch.manual_seed(0)
    model = small_language_models()[name]
    stack, E, U = model.base_model, model.get_input_embeddings().weight, model.lm_head.weight.mT
    found = {circuit: rg.hf.copying_scores(model, circuit, fold_norms=fold_norms) for circuit in ("OV", "QK")}
    for n in range(2):
        if name == "GPT2":
            block = stack.h[n]
            before, last, (q, k, v) = block.ln_1.weight, stack.ln_f.weight, block.attn.c_attn.weight.split(16, 1)
            out = block.attn.c_proj.weight
        else:
            block = stack.layers[n]
            before, last, own = block.input_layernorm.weight, stack.norm.weight, block.self_attn
            q, k, v = own.q_proj.weight.mT, own.k_proj.weight.mT, own.v_proj.weight.mT
            k, v = (x.unflatten(1, (2, 4)).repeat_interleave(2, 1).flatten(1) for x in (k, v))
            out = own.o_proj.weight.mT
        unembed = U
        if fold_norms:
            q, k, v, unembed = (before[:, None] * q, before[:, None] * k, before[:, None] * v, last[:, None] * U)
            if name == "GPT2":
                q, k, v, unembed = (x - x.mean(0) for x in (q, k, v, unembed))
        for h in range(4):
            at = slice(4 * h, 4 * h + 4)
            whole = {"OV": E @ v[:, at] @ out[at] @ unembed, "QK": E @ q[:, at] @ k[:, at].mT @ E.mT}
            for circuit, matrix in whole.items():
                values = torch.linalg.eigvals(matrix)
                expected = values.real.sum() / values.abs().sum()
                torch.testing.assert_close(found[circuit][n][h], expected, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_a_head_that_copies_has_the_copying_score_1():
    model = small_language_models()["Llama"]
    model.lm_head.weight.copy_(model.get_input_embeddings().weight)
    own = model.model.layers[0].self_attn
    own.v_proj.weight[:4] = torch.randn(4, 16)
    own.o_proj.weight[:, :4], own.o_proj.weight[:, 4:8] = own.v_proj.weight[:4].mT, -own.v_proj.weight[:4].mT
    scores = rg.hf.copying_scores(model, fold_norms=False)[0]
    torch.testing.assert_close(scores[:2], torch.tensor([1.0, -1.0]).double())
    with pytest.raises(rg.RegardError, match="no circuit 'VO'"):
        rg.hf.copying_scores(model, "VO")
    with pytest.raises(rg.RegardError, match="no language-model head"):
        rg.hf.copying_scores(model.model)
