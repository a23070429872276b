"""Families whose map is not one plain softmax: the difference of two, and keys that an indexer selects."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import regard as rg
from extras import needs_transformers
from miniatures import LLAMA, MOE, T, sharpened, tokens
from watching import assert_identical, assert_verified, oracle, watched

SPARSE = LLAMA | MOE | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
SPARSE |= {"v_head_dim": 8, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "n_routed_experts": 2}
SPARSE |= {"index_topk": 3, "index_n_heads": 2, "index_head_dim": 16, "first_k_dense_replace": 2}


def built(name, **settings):
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**settings)
    return sharpened(getattr(transformers, f"{name}Model")(config).eval())


def difference(model, number, inputs):
    """The map of a layer of DiffLlama from the input of its normalization, with unit values."""
    layer = model.layers[number].self_attn
    heads, width = layer.config.num_attention_heads, layer.head_dim
    kept = {}
    hooks = [
        layer.v_proj.register_forward_hook(lambda _, __, output: kept.get("v", output)),
        layer.groupnorm.register_forward_pre_hook(lambda _, given: kept.update(sums=given[0])),
    ]
    n, kv = inputs["input_ids"].shape[1], layer.config.num_key_value_heads
    rows = torch.zeros(2, heads // 2, n, n)
    for j in range(n):  # value 1 at token j, in every head and channel
        kept["v"] = torch.zeros(2, n, kv * width)
        kept["v"][:, j] = 1.0
        with torch.no_grad():
            model(**inputs, use_cache=False)
        rows[..., j] = kept["sums"][..., 0].transpose(1, 2)
    for hook in hooks:
        hook.remove()
    return rows


#: Since then DiffLlama computes its two maps by two calls of the interface.
TWO_CALLS = needs_transformers("5.15", "DiffLlama calls the attention interface")


@TWO_CALLS
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_diffllama_has_the_difference_of_its_two_maps(backend):
    model, inputs = built("DiffLlama", **LLAMA), {"input_ids": tokens(T)}
    with torch.no_grad():
        for layer in model.layers:  # lambda far from its start
            layer.self_attn.lambda_q1.normal_(0, 0.5)
    model.set_attn_implementation(backend)
    with torch.no_grad():
        plain = model(**inputs)
    outputs, seen = watched(model, inputs)
    assert_identical(outputs[0], plain[0])
    assert_verified(seen)
    assert [len(seen.calls(name)) for name in seen.names] == [1, 1]
    weights = seen[0]
    torch.testing.assert_close(weights.dense(), difference(model, 0, inputs), atol=1e-5, rtol=0)
    assert isinstance(weights, rg.maps.SumMap) and weights.is_signed and weights.shape == (2, 2, T, T)
    returned = oracle(model, inputs)["all"][0]  # the two softmaxes, which transformers returns
    torch.testing.assert_close(torch.cat([part.dense() for part in weights.parts], 1), returned, atol=1e-5, rtol=0)


@TWO_CALLS
def test_diffllama_has_the_same_rows_when_it_generates():
    model, ids = built("DiffLlama", **LLAMA), tokens(T)
    _, whole = watched(model, {"input_ids": ids})
    with rg.watch(model) as seen, torch.no_grad():
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        model(ids[:, -1:], past_key_values=cache, use_cache=True)
    step = seen.calls(seen.names[0])[-1]
    assert step.shape == (2, 2, 1, T)
    torch.testing.assert_close(step.dense()[:, :, 0], whole[0].dense()[:, :, -1], atol=1e-5, rtol=0)


@TWO_CALLS
def test_a_module_that_subtracts_otherwise_is_missing_with_the_reason():
    model, inputs = built("DiffLlama", **LLAMA), {"input_ids": tokens(T)}
    norm = model.layers[0].self_attn.groupnorm
    own, calls = norm.forward, []

    def once(x):
        calls.append(x)
        return own(x.flip(1) if len(calls) == 1 else x)

    norm.forward = once
    _, seen = watched(model, inputs)
    assert "does not subtract" in seen.missing["layers.0.self_attn"] and len(seen) == 1


class InOneCall(nn.Module):
    """Differential attention with all heads in one call of torch, as transformers 4 has it, or with its own softmax."""

    def __init__(self, is_fused):
        super().__init__()
        self.is_fused, self.lambda_init = is_fused, 0.2
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16) for _ in range(4))
        self.groupnorm = nn.RMSNorm(8)
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            setattr(self, name, nn.Parameter(torch.randn(4)))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (4, 4)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        v = torch.cat(v.chunk(2, 1), -1).repeat(1, 2, 1, 1)
        if self.is_fused:
            heads = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            heads = (q @ k.mT / 2).softmax(-1) @ v
        plus, minus = heads.chunk(2, 1)
        return self.o_proj(self.groupnorm(plus - 0.3 * minus).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("is_fused", [True, False])
def test_two_maps_of_one_call_are_missing_with_the_reason(is_fused):
    """Each would be a plain softmax, which is not the map of the module."""
    model, x = nn.Sequential(InOneCall(is_fused)).eval(), torch.randn(2, 5, 16)
    with pytest.raises(rg.RegardError, match="InOneCall subtracts two maps"), rg.watch(model):
        model(x)


@pytest.mark.parametrize("name", ["DeepseekV32", "GlmMoeDsa"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_keys_that_an_indexer_selects(name, backend):
    model, inputs = built(name, **SPARSE), {"input_ids": tokens(T)}
    expected = oracle(model, inputs)
    model.set_attn_implementation(backend)
    outputs, seen = watched(model, inputs)
    assert_verified(seen)
    for weights, wanted in zip(seen.maps.values(), expected["all"], strict=True):
        torch.testing.assert_close(weights.dense(), wanted, atol=1e-5, rtol=0)
        counts = (weights.dense() > 0).sum(-1)
        assert counts.max() == 3 and (counts[:, :, 2:] == 3).all()  # index_topk keys, as soon as there are as many
    assert outputs[0].shape == (2, T, 16)


def test_queries_on_a_smaller_grid_than_the_keys():
    torch.manual_seed(1)
    settings = {"image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 3, 4], "depths": [1, 1, 1]}
    config = transformers.LevitConfig(**settings, patch_size=16, key_dim=[4, 4, 4], drop_path_rate=0)
    model = transformers.LevitModel(config).eval()
    module = next(m for m in model.modules() if type(m).__name__ == "LevitAttentionSubsample")
    kept = {}
    module.keys_values.register_forward_hook(lambda _, __, output: kept.update(values=output))
    module.activation.register_forward_pre_hook(lambda _, given: kept.update(sums=given[0]))
    _, seen = watched(model, {"pixel_values": torch.randn(2, 3, 64, 64)})
    assert not seen.missing
    weights = seen[next(name for name, m in model.named_modules() if m is module)].dense()
    B, H, I, J = weights.shape
    assert I < J and (2, module.num_attention_heads) == (B, H)
    values = kept["values"].unflatten(-1, (H, -1))[..., module.key_dim :].transpose(1, 2)
    torch.testing.assert_close((weights @ values).transpose(1, 2).flatten(2), kept["sums"], atol=1e-5, rtol=0)


def test_attention_over_a_grid_of_pixels():
    kind = transformers.models.got_ocr2.modeling_got_ocr2.GotOcr2VisionAttention
    config = transformers.models.got_ocr2.configuration_got_ocr2.GotOcr2VisionConfig(
        hidden_size=16, num_attention_heads=2, image_size=16, patch_size=4, window_size=0
    )
    torch.manual_seed(1)
    holder = torch.nn.Module()
    holder.attention = sharpened(kind(config, 0).eval())
    holder.forward = lambda x: holder.attention(x)
    (_, returned), seen = watched(holder, {"x": torch.randn(2, 4, 4, 16)})
    torch.testing.assert_close(seen[0].dense().flatten(0, 1), returned, atol=1e-5, rtol=0)
    assert seen[0].shape == (2, 2, 16, 16)


class Tilted(torch.nn.Module):
    """An attention of transformers whose backend gets an option that nobody knows."""

    def __init__(self, backend):
        super().__init__()
        self.config = transformers.LlamaConfig(attn_implementation=backend)
        self.is_causal = False

    def forward(self, q, k, v):
        interface = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
        function = interface.get_interface(self.config._attn_implementation, eager)
        return function(self, q, k, v, None, tilt=torch.tensor(2.0))


def eager(module, query, key, value, attention_mask, tilt=1.0, returns=1.0, **_):
    weights = (query @ key.mT * tilt).softmax(-1) * module.factor
    return (weights @ value).transpose(1, 2), weights * module.returned


@pytest.mark.parametrize("returned", [1.0, 0.5])
def test_weights_that_an_eager_backend_returns_are_kept_if_they_are_those_it_computes_with(returned):
    holder = torch.nn.Module()
    holder.attention = Tilted("eager")
    holder.attention.factor, holder.attention.returned = 0.8, returned
    holder.forward = lambda q, k, v: holder.attention(q, k, v)
    q, k, v = (torch.randn(2, 3, 5, 4) for _ in range(3))
    if returned != 1.0:
        with pytest.raises(rg.RegardError, match=r"'tilt'.*are not those that it computes with"):
            watched(holder, {"q": q, "k": k, "v": v})
        return
    (_, weights), seen = watched(holder, {"q": q, "k": k, "v": v})
    torch.testing.assert_close(seen[0].dense(), weights)
    assert "returned" in seen.verify()["attention"].note and seen.verify()["attention"].ok
