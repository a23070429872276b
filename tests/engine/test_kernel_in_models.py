"""Decoding on the compiled kernel: models of transformers with all of their caches, and modules of `rg.nn`."""

from __future__ import annotations

import pytest
import torch
import transformers

import regard as rg
from kernels import needs_kernel
from miniatures import LLAMA, MOE, sharpened, tokens
from regard.engine import decoding
from regard.engine.kernel import engine
from regard.hf import backend
from regard.nn import projected_kv
from registered import needs_register

needs_register()
pytestmark = needs_kernel
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
CONFIGS = {
    "llama": transformers.LlamaConfig(**LLAMA),
    "mistral": transformers.MistralConfig(**LLAMA, sliding_window=4),
    "gemma2": transformers.Gemma2Config(**LLAMA, sliding_window=4, attn_logit_softcapping=1.5),
    "gpt_oss": transformers.GptOssConfig(**LLAMA, **MOE, sliding_window=4),
}
CACHES = {
    "dynamic": lambda config: transformers.DynamicCache(config=config),
    "static": lambda config: transformers.StaticCache(config=config, max_cache_len=16),
}


@pytest.fixture
def decoded(monkeypatch):
    """The number of queries of each call that ran without a plan: of backends, and of modules."""
    counts = []

    def count(module, name):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: counts.append(args[0].shape[2]) or original(*args))

    count(backend, "attention")
    count(backend, "decode")
    count(projected_kv, "decode")
    return counts


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", CONFIGS)
def test_models_decode_on_the_kernel(decoded, name, cache, padded):
    """Tokens after a prompt, one at a time and two at once, give the logits of the model's own backend."""
    config = CONFIGS[name]
    net = sharpened(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval())
    ids, mask, logits = tokens(11), torch.ones(2, 11, dtype=torch.long), {}
    mask[1, :3] = 1 - int(padded)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for implementation in ("eager", "regard"):
        net.set_attn_implementation(implementation)
        past, found = CACHES[cache](config), []
        for start, stop in ((0, 7), (7, 8), (8, 9), (9, 11)):
            options = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
            found.append(net(ids[:, start:stop], past_key_values=past, **options).logits)
        logits[implementation] = torch.cat(found, 1)[mask.bool()]
    torch.testing.assert_close(logits["regard"], logits["eager"], **CLOSE)
    assert [I for I in decoded if I < 7] == [1, 1, 1, 1, 2, 2]  # two layers, three steps


def model_inputs(net, **options):
    past = transformers.DynamicCache(config=net.config)
    net(tokens(5), past_key_values=past)
    return {"input_ids": tokens(1), "past_key_values": past, **options}


@pytest.mark.parametrize("why", ["gradients", "a mask tensor"])
def test_what_is_not_decoded_without_a_plan_is_planned(decoded, why):
    net = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"], attn_implementation="regard").eval()
    options = {"attention_mask": torch.ones(2, 1, 1, 6, dtype=torch.bool)} if why == "a mask tensor" else {}
    with torch.set_grad_enabled(why == "gradients"):
        net(**model_inputs(net, **options))
    assert decoded == []


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(engine, "FEWEST_NUMBERS", {torch.float32: 1})


def module():
    torch.manual_seed(0)
    return rg.nn.MultiHeadAttention(32, 4, 2, is_causal=True)


@torch.no_grad()
def test_modules_continue_their_past_on_the_kernel(decoded, always):
    attention, x = module(), torch.randn(2, 9, 32)
    output, past = attention.advance(x[:, :5])
    outputs = [output]
    for step in range(5, 9):
        output, past = attention.advance(x[:, step : step + 1], past)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 1), attention(x).output, **CLOSE)
    assert decoded == [1] * 4


@torch.no_grad()
def test_padding_and_shared_keys_of_a_beam_are_decoded_on_the_kernel(decoded, always):
    attention, source = rg.nn.MultiHeadAttention(32, 4, 2), torch.randn(2, 9, 32)
    real = torch.arange(9) < torch.tensor([[9], [6]])
    keys, x = attention.keys(source, mask=rg.padding(real)), torch.randn(5, 1, 32)
    index = torch.tensor([0, 0, 1, 1, 1])
    expected = attention(x, keys.select(index)).output
    shared = attention(x, keys.shared(rg.nn.Rows.of(index))).output
    alone = [attention(x[n : n + 1], source[e : e + 1, : 9 - 3 * e]).output for n, e in enumerate(index.tolist())]
    torch.testing.assert_close(expected, torch.cat(alone), **CLOSE)
    torch.testing.assert_close(shared, expected, **CLOSE)
    assert decoded[:2] == [1, 3]


def test_modules_with_gradients_do_not_decode_on_the_kernel(monkeypatch, always):
    by_kernel = []
    monkeypatch.setattr(decoding, "decode_by_kernel", lambda *given: by_kernel.append(given))
    attention, source = module(), torch.randn(1, 9, 32)
    attention(torch.randn(1, 1, 32), attention.keys(source)).output.sum().backward()
    assert by_kernel == [] and attention.query.weight.grad.any()
