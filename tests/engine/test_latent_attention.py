"""Multi-head latent attention against transformers' DeepSeek-V3, its two forms, its cache, and its map."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck
from transformers import DeepseekV3Config, DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

import regard as rg
from regard.nn import MultiHeadLatentAttention

H, D, E, R, C, WIDTH = 4, 6, 5, 4, 8, 16


def layer(query_latent_dim=None, interleaved=True):
    torch.manual_seed(0)
    position = rg.RoPE(R, interleaved=interleaved)
    sizes = {"head_dim": D, "rotary_dim": R, "value_dim": E, "query_latent_dim": query_latent_dim}
    return MultiHeadLatentAttention(WIDTH, H, C, **sizes, position=position).double()


def deepseek(ours, query_latent_dim):
    """transformers' module with the weights of ours, and a function that runs it from a position."""
    config = DeepseekV3Config(
        hidden_size=WIDTH,
        num_attention_heads=H,
        num_key_value_heads=H,
        q_lora_rank=query_latent_dim,
        kv_lora_rank=C,
        qk_rope_head_dim=R,
        qk_nope_head_dim=D,
        v_head_dim=E,
        rope_interleave=ours.position.interleaved,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        attn_implementation="eager",
    )
    theirs, rotary = DeepseekV3Attention(config, 0).double().eval(), DeepseekV3RotaryEmbedding(config)
    keys, values = ours.attention.score.weight, ours.value.mT
    copies = {
        "kv_a_proj_with_mqa.weight": ours.latent.weight,
        "kv_a_layernorm.weight": ours.latent_norm.weight,
        "kv_b_proj.weight": torch.cat((keys, values), 1).flatten(0, 1),
        "o_proj.weight": ours.output.weight,
    }
    if query_latent_dim is None:
        copies["q_proj.weight"] = ours.query.weight
    else:
        names = ("q_a_proj", "q_a_layernorm", "q_b_proj")
        copies |= {f"{name}.weight": part.weight for name, part in zip(names, ours.query, strict=True)}
    theirs.load_state_dict({name: tensor.detach() for name, tensor in copies.items()})

    def run(x, cache=None):
        start = 0 if cache is None else cache.get_seq_length()
        places = torch.arange(start, start + x.shape[1])
        added = torch.zeros(x.shape[1], start + x.shape[1], dtype=x.dtype)
        added.masked_fill_(torch.arange(start + x.shape[1]) > places[:, None], -torch.inf)
        cos, sin = rotary(x, places[None])
        return theirs(x, (cos, sin), added[None, None], past_key_values=cache)

    return run


@pytest.mark.parametrize("query_latent_dim", [None, 7])
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@torch.no_grad()
def test_output_and_weights_are_those_of_deepseek(form, query_latent_dim):
    ours, x = layer(query_latent_dim), torch.randn(2, 9, WIDTH).double()
    output, weights = deepseek(ours, query_latent_dim)(x)
    with rg.watch(ours) as seen:
        mine = ours(x, form=form).output
    torch.testing.assert_close(mine, output, rtol=1e-6, atol=1e-6)  # its angles are float32
    torch.testing.assert_close(seen[0].dense(), weights, rtol=1e-6, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize(
    "pieces",
    [
        {"normalizer": rg.normalizers.TopK(2)},
        {"normalizer": rg.normalizers.Softmax(temperature=0.25, sink=1.0)},
        {"bias": rg.ALiBi(H)},
        {"bias": (rg.biases.Softcap(0.5), rg.ALiBi(H)), "mask": rg.window(3)},
    ],
)
def test_both_forms_have_every_piece_of_the_attention(pieces):
    ours, x = layer(), torch.randn(2, 9, WIDTH, dtype=torch.float64)
    plain = ours(x).output
    for slot, piece in pieces.items():
        setattr(ours.attention, slot, piece)
    absorbed, expanded = (ours(x, form=form) for form in ("absorbed", "expanded"))
    torch.testing.assert_close(absorbed.weights.dense(), expanded.weights.dense())
    torch.testing.assert_close(absorbed.output, expanded.output)
    assert not torch.allclose(absorbed.output, plain)


def test_dropout_acts_in_both_forms():
    ours, x = layer(), torch.randn(1, 9, WIDTH, dtype=torch.float64)
    ours.attention.dropout = 0.5
    for form in ("absorbed", "expanded"):
        assert not torch.equal(ours.train()(x, form=form).output, ours.eval()(x, form=form).output)


@pytest.mark.parametrize(
    ("slot", "piece"),
    [
        ("position", rg.RoPE(R + D)),
        ("selection", rg.selections.BlockMeans(size=2, k=1)),
        ("transition", rg.transitions.Decay(-0.1)),
    ],
)
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_pieces_that_read_the_keys_of_a_head_are_refused(slot, piece, form):
    ours = layer()
    setattr(ours.attention, slot, piece)
    with pytest.raises(rg.RegardError, match=rf"{slot}=.* in one of its two forms only\. Set it to None"):
        ours(torch.randn(1, 9, WIDTH, dtype=torch.float64), form=form)


def test_decoding_is_that_of_deepseek_and_keeps_latents_only():
    ours, x = layer(interleaved=False), torch.randn(2, 9, WIDTH).double()
    run, theirs, cache = deepseek(ours, None), DynamicCache(), None
    for first, last in ((0, 5), (5, 6), (6, 9)):
        output, cache = ours.advance(x[:, first:last], cache)
        torch.testing.assert_close(output, run(x[:, first:last], theirs)[0], rtol=1e-6, atol=1e-6)
    assert cache.length == 9 and cache.store.key.shape == (2, 1, 9, R + C)
    assert cache.store.buffer.value.numel() == 0  # the values are a part of the keys


def test_both_forms_have_equal_outputs_weights_and_gradients():
    ours, x = layer(7), torch.randn(2, 7, WIDTH).double()
    outputs, maps, slopes = [], [], []
    for form in ("absorbed", "expanded"):
        with rg.watch(ours) as seen:
            outputs.append(ours(x, form=form, mask=rg.padding([7, 4])).output)
        maps.append(seen[0].dense())
        slopes.append(torch.autograd.grad(outputs[-1].square().sum(), list(ours.parameters())))
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*maps)
    assert maps[0].shape == (2, H, 7, 7) and not maps[0][1, ..., 4:].any()
    for absorbed, expanded in zip(*slopes, strict=True):
        torch.testing.assert_close(absorbed, expanded)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_gradients_agree_with_finite_differences(form):
    ours, x = layer(), torch.randn(1, 3, WIDTH).double().requires_grad_()
    assert gradcheck(lambda x: ours(x, form=form).output, x)


@torch.no_grad()
def test_tokens_one_by_one_equal_one_call_in_both_forms():
    ours, x, cache, outputs = layer(), torch.randn(1, 6, WIDTH).double(), None, []
    whole = ours(x).output
    for step, form in enumerate(["absorbed", "expanded", "auto"] * 2):
        output, cache = ours.advance(x[:, step : step + 1], cache, form=form)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 1), whole)


@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize("form", ["absorbed", "expanded", "auto"])
def test_no_tokens_and_one(length, form):
    x = torch.randn(2, length, WIDTH).double().requires_grad_()
    output = layer()(x, form=form).output
    assert output.shape == x.shape and torch.autograd.grad(output.sum(), x)[0].shape == x.shape


def test_a_latent_cache_in_attend_is_a_growing_cache_of_half_the_size():
    attention = rg.Attention(rg.scores.LatentDot(H, D, C, R), position=rg.RoPE(R), mask=rg.causal()).double()
    q, key = torch.randn(1, H, 6, R + D).double(), torch.randn(1, 1, 6, R + C).double()
    whole, cache = attention(q, key, key[..., R:]), rg.caches.LatentCache()
    for step in (slice(0, 4), slice(4, 5), slice(5, 6)):
        part = key[:, :, step]
        seen = attention(q[:, :, step], part, part[..., R:], cache=cache)
        torch.testing.assert_close(seen.output, whole.output[:, :, step])
        cache = seen.cache
    with pytest.raises(rg.RegardError, match="the last channels of the keys"):
        attention(q, key, key[..., R:] + 1, cache=rg.caches.LatentCache())


@pytest.mark.parametrize(
    "values",
    [
        lambda key: key[:1, ..., R:],
        lambda key: key[:, :1, :, R:],
        lambda key: key[:, :, :4, R:],
        lambda key: key[..., R:].float(),
        lambda key: key[..., R:].detach().view(torch.int64),
        lambda key: torch.cat((key, key), -1),
    ],
)
def test_a_latent_cache_refuses_values_of_another_shape_or_dtype(values):
    """Also those that begin where the last channels of the keys do."""
    key = torch.randn(2, 2, 6, R + C).double()
    with pytest.raises(rg.RegardError, match="the last channels of the keys"):
        rg.caches.LatentCache().extend(key, values(key))


def test_mistakes_say_what_to_do():
    with pytest.raises(rg.RegardError, match=r"inputs must be \(batch, length, 16\)"):
        layer()(torch.randn(2, 3, 8))
    with pytest.raises(rg.RegardError, match="give 'auto', 'absorbed' or 'expanded'"):
        layer()(torch.randn(2, 3, WIDTH), form="naive")
    with pytest.raises(rg.RegardError, match="Create it with 2 heads"):
        rg.Attention(rg.scores.LatentDot(4, 3, 4, 1))(torch.randn(1, 2, 3, 4), *torch.randn(2, 1, 1, 3, 5))
