"""Oracles of mechanisms of today's models: transformers' own attention modules, and the formulas of the papers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, Olmo2Config, Qwen2VLTextConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention, Olmo2RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3Config, Phi3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as apply_phi3
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

import regard as rg
from oracles import FLOAT32, ORACLES, Says, by_torch, close, flat, heads, oracle, scatter
from regard.catalog import mechanism
from regard.encodings import AxialRoPE

SMALL = {"hidden_size": 16, "num_attention_heads": 2, "head_dim": 8, "attn_implementation": "eager"}


def future(length):
    return torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)[None, None]


def attends_as(layer, q, k, v, *inputs):
    """A layer of transformers, given our queries, keys and values in place of its projections."""
    layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj = Says(q), Says(k), Says(v), nn.Identity()
    output, weights = layer.double().eval()(flat(q), *inputs)
    return heads(output, q.shape[1]), weights


@oracle("qk_norm", FLOAT32)
def test_qk_norm_is_that_of_qwen_3(attention, q, k, v):
    config = Qwen3Config(**SMALL, num_key_value_heads=1)
    layer, norm = Qwen3Attention(config, 0), attention.position.parts[0]
    layer.q_norm.weight.data, layer.k_norm.weight.data = norm.query_scale[0, 0], norm.key_scale[0, 0]
    return attends_as(layer, q, k, v, Qwen3RotaryEmbedding(config)(q, torch.arange(16)[None]), future(16))


@oracle("qk_norm", FLOAT32, {"head_dim": 8, "num_heads": 2, "num_key_value_heads": 1, "joint": True})
def test_joint_qk_norm_is_that_of_olmo_2(attention, q, k, v):
    config = Olmo2Config(**SMALL, num_key_value_heads=1, rms_norm_eps=1e-6)
    layer, norm = Olmo2Attention(config, 0), attention.position.parts[0]
    layer.q_norm.weight.data, layer.k_norm.weight.data = norm.query_scale.flatten(), norm.key_scale.flatten()
    return attends_as(layer, q, k, v, Olmo2RotaryEmbedding(config)(q, torch.arange(16)[None]), future(16))


@oracle("position_temperature", FLOAT32)
def test_position_temperature_is_a_layer_of_llama_4_without_positions(attention, q, k, v):
    config = Llama4TextConfig(
        **SMALL, num_key_value_heads=2, num_hidden_layers=1, floor_scale=4, attn_scale=0.5, no_rope_layers=[0]
    )
    layer = Llama4TextAttention(config, 0)
    assert layer.attn_temperature_tuning and not layer.use_rope
    return attends_as(layer, q, k, v, None, future(16))


def rotates_as(embedding, apply, q, k, v):
    cos, sin = embedding(q, torch.arange(16)[None])
    q, k = apply(q, k, cos, sin)
    return by_torch(q, k, v, is_causal=True)


def scaled(kind, **rope):
    return LlamaConfig(
        **SMALL, max_position_embeddings=256, rope_parameters={"rope_type": kind, "rope_theta": 1e4, **rope}
    )


@oracle("yarn", FLOAT32)
def test_yarn_is_that_of_transformers(attention, q, k, v):
    config = scaled("yarn", factor=4.0, original_max_position_embeddings=64)
    return rotates_as(LlamaRotaryEmbedding(config), apply_rotary_pos_emb, q, k, v)


@oracle("longrope", FLOAT32)
def test_longrope_is_that_of_phi_3(attention, q, k, v):
    factors = [1.0, 1.5, 2.0, 4.0]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": [1.0] * 4}
    config = Phi3Config(
        hidden_size=16, num_attention_heads=2, max_position_embeddings=256, original_max_position_embeddings=64,
        rope_parameters=rope, pad_token_id=0,
    )  # fmt: skip
    return rotates_as(Phi3RotaryEmbedding(config), apply_phi3, q, k, v)


@pytest.mark.parametrize(
    ("scaling", "kind", "options"),
    [
        (rg.encodings.YaRNScaling(8.0, 4096), "yarn", {"factor": 8.0}),
        (rg.encodings.YaRNScaling(1.5, 4096), "yarn", {"factor": 1.5}),
        (rg.encodings.YaRNScaling(1.0, 4096), "yarn", {"factor": 1.0}),
        (rg.encodings.YaRNScaling(32.0, 4096, is_rounded=False), "yarn", {"factor": 32.0, "truncate": False}),
        (rg.encodings.YaRNScaling(8.0, 128, 16.0, 2.0), "yarn", {"factor": 8.0, "beta_fast": 16, "beta_slow": 2}),
        (rg.encodings.YaRNScaling(4.0, 64, attention_factor=1.5), "yarn", {"factor": 4.0, "attention_factor": 1.5}),
        (rg.encodings.ProportionalScaling(0.25, 2.0), "proportional", {"partial_rotary_factor": 0.25, "factor": 2.0}),
        (rg.encodings.NTKScaling.for_length(700, 256, 2.0), "dynamic", {"factor": 2.0}),
        (rg.encodings.NTKScaling.for_length(100, 256, 2.0), "dynamic", {"factor": 2.0}),
    ],
)
def test_frequencies_and_magnitudes_are_those_of_transformers(scaling, kind, options):
    length = getattr(scaling, "trained_length", 256)
    config = scaled(kind, original_max_position_embeddings=length, **options)
    config.head_dim = 32
    longest = 700 if kind == "dynamic" and scaling.factor > 1 else 100
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), longest)
    close(rg.RoPE(32, scaling=scaling).frequencies(), frequencies, FLOAT32)
    assert scaling.magnitude == pytest.approx(magnitude)


def test_the_ramp_of_yarn_ends_within_the_width_as_in_transformers():
    """However few turns a slow pair may make: the ramp ends at the width at the latest."""
    for slow in (1.0, 1e-3, 1e-6, 1e-8, 1e-12):
        config = scaled("yarn", original_max_position_embeddings=128, factor=8.0, beta_fast=16, beta_slow=slow)
        config.head_dim = 32
        frequencies, _ = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"), 100)
        scaling = rg.encodings.YaRNScaling(8.0, 128, 16.0, slow)
        close(rg.RoPE(32, scaling=scaling).frequencies(), frequencies, FLOAT32)


def multimodal(q, k, v, coordinates):
    """Qwen2-VL's rotation, on coordinates (3, B, n)."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    config = Qwen2VLTextConfig(hidden_size=16, num_attention_heads=2, rope_parameters=rope)
    cos, sin = qwen2_vl.Qwen2VLRotaryEmbedding(config)(q, coordinates)
    return by_torch(*apply_rotary_pos_emb(q, k, cos, sin), v, is_causal=True)


@oracle("multimodal_rope", FLOAT32)
def test_multimodal_rope_is_that_of_qwen2_vl(attention, q, k, v):
    return multimodal(q, k, v, attention.position.coordinates[:, None])


def test_entries_of_a_batch_have_coordinates_of_their_own():
    attention, q, k, v = mechanism("multimodal_rope").example()
    where = torch.randint(-9, 99, (2, 3, 16))
    attention = mechanism("multimodal_rope").build(where, (2, 1, 1))
    output, weights = multimodal(q, k, v, where.transpose(0, 1))
    seen = attention(q, k, v)
    close(seen.output, output, FLOAT32)
    close(seen.weights[1, 0], weights[1, 0], FLOAT32)
    plain = rg.encodings.AxialRoPE.sections(where[:, :1], (4,))  # one axis: any integers as positions
    for entry in (0, 1):
        close(plain.encode(q, torch.arange(16))[entry], rg.RoPE(8).encode(q, where[entry, 0])[entry], FLOAT32)
    with pytest.raises(rg.RegardError, match="2 batch entries, got vectors of shape \\(1, 2, 16, 8\\)"):
        attention(q[:1], k[:1], v[:1])


@pytest.mark.parametrize("engine", ["auto", "reference", "blocked"])
def test_coordinates_may_come_with_each_call(engine):
    """The same as a table; a cache keeps those of its keys, whatever the chunks."""
    _, q, k, v = mechanism("multimodal_rope").example()
    where = torch.randint(-9, 99, (2, 3, 16))
    fixed, given = (mechanism("multimodal_rope").build(x, (2, 1, 1)) for x in (where, None))
    expected = fixed(q, k, v)
    seen = given(q, k, v, coordinates=where, engine=engine)
    close(seen.output, expected.output)
    close(seen.weights[...], expected.weights[...])
    cache, outputs = rg.GrowingCache(), []
    for at in (slice(0, 7), slice(7, 8), slice(8, 16)):
        chunk = [x[:, :, at] for x in (q, k, v)]
        seen = given(*chunk, cache=cache, coordinates=where[..., at], engine=engine)
        cache = seen.cache
        outputs.append(seen.output)
    close(torch.cat(outputs, 2), expected.output)


def test_a_chain_passes_the_coordinates_on():
    norm, where = rg.encodings.QKNorm(8).double(), torch.randint(0, 9, (1, 2, 16))
    q, k, v = torch.randn(3, 1, 2, 16, 8, dtype=torch.float64)
    chains = [rg.Attention(position=rg.encodings.Chain(norm, rg.encodings.AxialRoPE.grid(x, 8))) for x in (where, None)]
    seen = chains[1](q, k, v, coordinates=where)
    close(seen.output, chains[0](q, k, v).output)
    with torch.no_grad():
        close(chains[1](q, k, v, coordinates=where, engine="reference").output, seen.output)
    with pytest.raises(rg.RegardError, match="Chain needs a tensor for each call"):
        chains[1](q, k, v)
    with pytest.raises(rg.RegardError, match="Each query must be one of the keys"):
        chains[1](q, k[:, :, :4], v[:, :, :4], coordinates=where[..., :4])
    with pytest.raises(rg.RegardError, match="coordinates are integers"):
        chains[1](q, k, v, coordinates=where.double())


@oracle(
    "multimodal_rope",
    FLOAT32,
    {"coordinates": torch.arange(48).view(3, 16) % 11, "sections": (2, 1, 1), "alternate": True},
)
def test_alternating_axes_are_those_of_qwen3_vl(attention, q, k, v):
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    config = Qwen3VLTextConfig(hidden_size=16, num_attention_heads=2, head_dim=8, rope_parameters=rope)
    cos, sin = Qwen3VLTextRotaryEmbedding(config)(q, attention.position.coordinates[:, None])
    return by_torch(*apply_rotary_pos_emb(q, k, cos, sin), v, is_causal=True)


def of_vision(q, k, v, cos, sin):
    """Qwen2-VL's and Pixtral's vision towers: tensors (n, heads, D) and angles (n, D)."""
    q, k = (
        torch.stack(
            [qwen2_vl.apply_rotary_pos_emb_vision(x.transpose(0, 1), x.transpose(0, 1), cos, sin)[0] for x in t]
        )
        for t in (q, k)
    )
    return by_torch(q.transpose(1, 2), k.transpose(1, 2), v)


@oracle("axial_rope", FLOAT32)
def test_axial_rope_is_that_of_the_images_of_qwen2_vl(attention, q, k, v):
    rows, columns = attention.position.coordinates
    frequencies = 1e4 ** -(torch.arange(0, 4, 2).double() / 4)
    angle = torch.cat((rows[:, None] * frequencies, columns[:, None] * frequencies), -1).repeat(1, 2)
    return of_vision(q, k, v, angle.cos(), angle.sin())


@oracle("axial_rope", FLOAT32, {**mechanism("axial_rope").tiny, "alternate": True})
def test_alternating_axial_rope_is_that_of_pixtral(attention, q, k, v):
    from transformers.models.pixtral.configuration_pixtral import PixtralVisionConfig
    from transformers.models.pixtral.modeling_pixtral import PixtralVisionRotaryEmbedding

    config = PixtralVisionConfig(hidden_size=16, num_attention_heads=2, image_size=64, patch_size=16)
    cos, sin = PixtralVisionRotaryEmbedding(config)(q, attention.position.coordinates.T)
    return of_vision(q, k, v, cos, sin)


@oracle("scalable_softmax")
def test_scalable_softmax_is_a_power_of_the_number_of_keys(attention, q, k, v):
    """Equation 1: n^(s z_j) / sum_j n^(s z_j) over the n keys of the row."""
    s, z = attention.position.factor[:, 0, 0], q @ k.mT / math.sqrt(8)
    weights = torch.zeros_like(z)
    for h, i in np.ndindex(2, 16):
        powers = (i + 1) ** (s[h] * z[:, h, i, : i + 1])
        weights[:, h, i, : i + 1] = powers / powers.sum(-1, keepdim=True)
    return weights @ v, weights


@oracle("sigmoid")
def test_sigmoid_row_by_row(attention, q, k, v):
    weights = torch.zeros(2, 2, 16, 16, dtype=torch.float64)
    for i in range(16):
        s = torch.einsum("bhd,bhjd->bhj", q[:, :, i], k[:, :, : i + 1]) / math.sqrt(8)
        weights[:, :, i, : i + 1] = 1 / (1 + (i + 1) * (-s).exp())
    return weights @ v, weights


@oracle("sigmoid", arguments={"offset": math.log(16), "is_causal": False})
def test_sigmoid_of_the_paper(attention, q, k, v):
    weights = (q @ k.mT / math.sqrt(8) - math.log(16)).sigmoid()
    return weights @ v, weights


def with_bias(q, k, v, term):
    """Causal softmax with a bias asked pair by pair: `term(h, i, j)`."""
    bias = torch.full((2, 16, 16), -torch.inf, dtype=torch.float64)
    for h, i, j in np.ndindex(2, 16, 16):
        if j <= i:
            bias[h, i, j] = term(h, i, j)
    return by_torch(q, k, v, mask=bias)


@pytest.mark.parametrize("power", [False, True])
def test_kerple_pair_by_pair(power):
    attention, q, k, v = mechanism("kerple").example()
    attention = mechanism("kerple").build(2, power=power).double()
    a, b = attention.bias[0].amplitude.tolist(), attention.bias[0].rate.tolist()

    def term(h, i, j):
        return -a[h] * ((i - j) ** b[h] if power else math.log(1 + b[h] * (i - j)))

    output, weights = with_bias(q, k, v, term)
    close(attention(q, k, v).output, output)
    close(attention(q, k, v).weights[...], weights)


@oracle("kerple")
def test_kerple_has_a_least_parameter(attention, q, k, v):
    """The authors' code clamps both parameters from below at 0.01."""
    a, b = (np.maximum(x.numpy(), 0.01) for x in (attention.bias[0].amplitude, attention.bias[0].rate))
    return with_bias(q, k, v, lambda h, i, j: -a[h] * math.log(1 + b[h] * (i - j)))


def fire_term(bias, length):
    """The authors' FIRE, for one pair: a network of log(|c (i - j)| + 1) / log(|c max(i, L)| + 1)."""
    network = nn.Sequential(bias.inner, nn.ReLU(), bias.outer)
    c = float(bias.rate)

    def term(h, i, j):
        ratio = math.log(abs(c * (i - j)) + 1) / (math.log(abs(c * length(i)) + 1) + 1e-6)
        return float(network(torch.tensor([ratio], dtype=torch.float64))[h])

    return term


@oracle("fire", 1e-9)
def test_fire_pair_by_pair(attention, q, k, v):
    bias = attention.bias[0]
    return with_bias(q, k, v, fire_term(bias, lambda i: max(i, abs(5 * float(bias.share)))))


@oracle("fire", 1e-9, {"num_heads": 2, "hidden": 4, "fixed_length": 30})
def test_fire_of_a_fixed_length_pair_by_pair(attention, q, k, v):
    return with_bias(q, k, v, fire_term(attention.bias[0], lambda i: 30))


@oracle("pope")
def test_pope_channel_by_channel(attention, q, k, v):
    """Section 3 of the paper: lengths by softplus, angles by position, and a phase for each channel of a key."""
    phase = attention.position.phase[:, 0].clamp(-2 * math.pi, 0)
    lengths = F.softplus(q)[:, :, :, None] * F.softplus(k)[:, :, None]
    apart = (torch.arange(16)[:, None] - torch.arange(16)).double()[..., None]
    turned = apart * 1e4 ** -(torch.arange(8).double() / 8) - phase[:, None, None]
    return by_torch_scores((lengths * turned.cos()).sum(-1) / math.sqrt(8), v)


def by_torch_scores(scores, v):
    weights = (scores + future(scores.shape[-1])).softmax(-1)
    return weights @ v, weights


@pytest.mark.parametrize(
    "scaling",
    [
        *(rg.encodings.LinearScaling(3.0), rg.encodings.NTKScaling(5.0), rg.encodings.ProportionalScaling(0.5, 2.0)),
        *(rg.encodings.Llama3Scaling(8.0, 1.0, 4.0, 64), rg.encodings.YaRNScaling(8.0, 128, 16.0, 2.0)),
        rg.encodings.LongRoPEScaling(tuple(1 + n / 7 for n in range(16))),
    ],
    ids=lambda scaling: type(scaling).__name__,
)
def test_frequencies_are_scaled_in_their_own_dtype(scaling, request):
    """Whatever the default dtype is: numbers of the scaling itself have the precision of the frequencies."""
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    frequencies, found = 10_000.0 ** -(torch.arange(16, dtype=torch.float64) / 16), []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        found.append(scaling(frequencies))
    assert found[0].dtype == torch.float64 and found[0].equal(found[1])


@pytest.mark.parametrize(
    "scaling",
    [
        lambda length: rg.encodings.Llama3Scaling(8.0, 1.0, 4.0, length),
        lambda length: rg.encodings.YaRNScaling(8.0, length, 16.0, 2.0),
        lambda length: rg.encodings.YaRNScaling(8.0, length, 16.0, 2.0, is_rounded=False),
    ],
    ids=["llama 3", "yarn", "yarn, not rounded"],
)
def test_a_scaling_depends_on_the_turns_in_the_trained_length(scaling):
    """Frequencies four times as high turn as often in a quarter of the length."""
    frequencies = 10_000.0 ** -(torch.arange(16, dtype=torch.float64) / 16)
    close(scaling(128)(4 * frequencies), 4 * scaling(512)(frequencies))


def test_longrope_divides_in_the_dtype_of_the_frequencies_and_lengthens_by_its_extension():
    """Phi-3: sqrt(1 + log(extension) / log(trained length)); other texts are not lengthened."""
    factors = (1.1, 3.7, 1e3)
    frequencies = torch.tensor([1.0, 0.3, 0.007], dtype=torch.float64)
    exact = [f / factor for f, factor in zip(frequencies.tolist(), factors, strict=True)]
    assert rg.encodings.LongRoPEScaling(factors)(frequencies).tolist() == exact
    for extension in (0.25, 1.0, 1.5, 32.0):
        scaling = rg.encodings.LongRoPEScaling(factors, extension=extension, trained_length=4096)
        lengthened = math.sqrt(1 + math.log(extension) / math.log(4096)) if extension > 1 else 1.0
        assert scaling.magnitude == pytest.approx(lengthened, rel=1e-12)


def test_pope_is_that_of_x_transformers():
    peer = pytest.importorskip("x_transformers.x_transformers")
    pope, theirs = rg.encodings.PoPE(2, 8).double(), peer.PolarEmbedding(8, 2).double()
    scatter(pope)
    theirs.learned_bias.data = pope.phase.data
    q = torch.randn(1, 2, 5, 8, dtype=torch.float64)
    frequencies, bias = theirs(torch.arange(5))
    close(pope.encode_query(q, torch.arange(5)), peer.apply_polar_pos_emb(q, frequencies), FLOAT32)
    close(pope.encode_key(q, torch.arange(5)), peer.apply_polar_pos_emb(q, frequencies + bias), FLOAT32)


def test_kerple_and_a_fixed_fire_run_in_the_compiled_kernels_and_fire_says_why_not():
    q, k, v = torch.randn(3, 1, 2, 40, 8)
    for name, arguments in (("kerple", {}), ("kerple", {"power": True}), ("fire", {"fixed_length": 64})):
        attention, outputs, gradients = mechanism(name).build(2, **arguments), [], []
        for engine in ("kernel", "dense"):
            outputs.append(attention(q, k, v, engine=engine).output)
            gradients.append(torch.autograd.grad(outputs[-1].square().sum(), list(attention.parameters())))
        torch.testing.assert_close(*outputs)
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    with pytest.raises(rg.RegardError, match="FIREBias"):
        mechanism("fire").build(2)(q, k, v, engine="kernel")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: rg.encodings.Chain(), "got none"),
        (lambda: rg.encodings.Chain(rg.causal()), "got causal"),
        (lambda: rg.encodings.ProportionalScaling(0.0), "in \\(0, 1\\]"),
        (lambda: rg.RoPE(8, scaling=rg.encodings.LongRoPEScaling((1.0,))).frequencies(), "1 factors for 4 pairs"),
        (lambda: rg.encodings.AxialRoPE(torch.zeros(2, 3), (0,), (1.0,)), "coordinates are integers"),
        (lambda: rg.encodings.AxialRoPE(torch.zeros(2, 3).long(), (2,), (1.0,)), "axes from 0 to 2, the coordinates 2"),
        (lambda: AxialRoPE.grid(torch.zeros(2, 3).long(), 6), "multiple of 4"),
        (lambda: mechanism("qk_norm").build(8)(*torch.randn(3, 1, 2, 4, 6)), "QKNorm: made for width 8"),
        (lambda: mechanism("scalable_softmax").build(4)(*torch.randn(3, 1, 2, 4, 6)), "made for 4 heads"),
        (lambda: mechanism("pope").build(2, 8)(*torch.randn(3, 1, 2, 4, 6)), "PoPE: made for width 8"),
        (lambda: mechanism("pope").build(3, 6)(*torch.randn(3, 1, 2, 4, 6)), "PoPE: made for 3 heads"),
        (lambda: mechanism("kerple").build(4)(*torch.randn(3, 1, 2, 4, 6)), "KERPLEBias: made for 4"),
        (lambda: AxialRoPE.grid(torch.zeros(2, 3).long(), 4).check(rg.types.Spans.of((0, 4))), "tokens 0 to 2"),
    ],
)  # fmt: skip
def test_mistakes_name_the_rule(make, said):
    with pytest.raises(rg.RegardError, match=said):
        make()


def drawn_gates():
    """Forgetting attention of drawn gates, and the weights of its definition, gate by gate."""
    q, k, v = torch.randn(3, 2, 2, 40, 8, dtype=torch.float64)
    log_forget = F.logsigmoid(3 * torch.randn(2, 2, 40, dtype=torch.float64))
    scores = torch.full((2, 2, 40, 40), -torch.inf, dtype=torch.float64)
    for i, j in np.ndindex(40, 40):
        if j <= i:
            scores[:, :, i, j] = (q[:, :, i] * k[:, :, j]).sum(-1) / math.sqrt(8) + log_forget[..., j + 1 : i + 1].sum(
                -1
            )
    return (q, k, v), log_forget, scores.softmax(-1)


@pytest.mark.parametrize("engine", ["reference", "dense", "blocked"])
def test_forgetting_gate_by_gate(engine):
    (q, k, v), log_forget, expected = drawn_gates()
    attention = rg.Attention(bias=rg.biases.ForgettingBias(), mask=rg.causal())
    seen = attention(q, k, v, log_forget=log_forget, engine=engine)
    close(seen.weights[...], expected)
    close(seen.output, expected @ v)
    close(seen.weights[1, 0, 7], expected[1, 0, 7])
    independent = rg.Attention(
        bias=rg.biases.ForgettingBias(), mask=rg.causal(), normalizer=rg.normalizers.Sigmoid(offset=0.0)
    )
    weights = independent(q, k, v, log_forget=log_forget, engine=engine).weights[...]
    own = weights.diagonal(dim1=-2, dim2=-1)  # a softmax would hide a number that a whole row has too much
    close(own, ((q * k).sum(-1) / math.sqrt(8)).sigmoid())  # no gate is between a token and itself


ORACLES["forgetting"] = [test_forgetting_gate_by_gate]


def test_forgetting_token_by_token_and_by_chunks_of_a_cache():
    (q, k, v), log_forget, expected = drawn_gates()
    attention, cache, outputs = rg.Attention(bias=rg.biases.ForgettingBias(), mask=rg.causal()), rg.GrowingCache(), []
    for at in (slice(0, 17), slice(17, 18), slice(18, 19), slice(19, 40)):
        seen = attention(q[:, :, at], k[:, :, at], v[:, :, at], cache=cache, log_forget=log_forget[..., at])
        cache = seen.cache
        outputs.append(seen.output)
    close(torch.cat(outputs, 2), expected @ v)


@pytest.mark.parametrize("engine", ["dense", "blocked"])
def test_gradients_of_forgetting_reach_the_gates(engine):
    def output(q, k, v, log_forget):
        attention = rg.Attention(bias=rg.biases.ForgettingBias(), mask=rg.causal())
        return attention(q, k, v, log_forget=log_forget, engine=engine).output

    tensors, log_forget, _ = drawn_gates()
    inputs = [x[:1, :1, :4].clone().requires_grad_() for x in (*tensors, log_forget)]
    torch.autograd.gradcheck(output, inputs)


def test_forgetting_keeps_the_digits_of_long_texts():
    """After gates of e^-1000 the sums have few digits left in float32; their differences are still exact."""
    q, k, v = torch.randn(3, 1, 1, 300, 8)
    log_forget = torch.full((1, 1, 300), -0.1)
    log_forget[..., 100:200] = -1000.0
    attention = rg.Attention(bias=rg.biases.ForgettingBias(), mask=rg.causal())
    inside = attention(q, k, v, log_forget=log_forget).output[:, :, 250:]
    alone = attention(*(x[:, :, 199:] for x in (q, k, v)), log_forget=log_forget[..., 199:]).output
    torch.testing.assert_close(inside, alone[:, :, 51:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("closed", [-0.0, -1e4, -1e8, -1e16, -1e20, torch.finfo(torch.float32).min, -torch.inf])
@pytest.mark.parametrize("places", [[0], [10], [23], [0, 3, 4, 11, 23]])
def test_forgetting_after_closed_gates(closed, places):
    """A closed gate hides the keys before it and leaves all other gates as they are, however low it is."""
    n, mask = 24, torch.ones(24, 24, dtype=torch.bool).tril()
    log_forget = F.logsigmoid(torch.randn(1, 1, n))
    log_forget[..., places] = closed
    q, k, v = torch.randn(3, 1, 1, n, 8)
    tensors = [x.clone().requires_grad_() for x in (q, k, v, log_forget)]
    exact = [x.double().requires_grad_() for x in (q, k, v, log_forget)]
    between = [[[t for t in range(j + 1, i + 1)] for j in range(n)] for i in range(n)]
    gates = torch.stack([torch.stack([exact[3][..., t].sum(-1) for t in row], -1) for row in between], -2)
    scores = (exact[0] @ exact[1].mT / 8**0.5 + gates).masked_fill(~mask, -torch.inf)
    expected = scores.softmax(-1)
    loss = (expected @ exact[2]).square().sum()
    wanted = torch.autograd.grad(loss, exact)
    attention = rg.Attention(bias=rg.biases.ForgettingBias(), mask=rg.causal())
    for engine in ("reference", "dense", "blocked", "auto"):
        with torch.set_grad_enabled(engine != "reference"):
            seen = attention(*tensors[:3], log_forget=tensors[3], engine=engine)
        torch.testing.assert_close(seen.weights.dense().double(), expected.detach(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(seen.weights[0, 0, 15], seen.weights.dense()[0, 0, 15])
        torch.testing.assert_close(seen.output.double(), (expected @ exact[2]).detach(), rtol=1e-4, atol=1e-5)
        if engine != "reference":
            grads = torch.autograd.grad(seen.output.square().sum(), tensors)
            for mine, theirs in zip(grads, wanted, strict=True):
                torch.testing.assert_close(mine.double(), theirs.nan_to_num(), rtol=1e-3, atol=1e-4)
    cache, outputs = rg.GrowingCache(), []
    for t in range(n):
        step = [x[:, :, t : t + 1] for x in (q, k, v)]
        seen = attention(*step, cache=cache, log_forget=log_forget[..., t : t + 1])
        cache = seen.cache
        outputs.append(seen.output)
    torch.testing.assert_close(torch.cat(outputs, 2).double(), (expected @ exact[2]).detach(), rtol=1e-4, atol=1e-5)


def test_forgetting_is_data_dependent_alibi_of_x_transformers():
    peer = pytest.importorskip("x_transformers.x_transformers")
    theirs = peer.DataDependentAlibi(16, 2).double()
    q, k, v = torch.randn(3, 1, 2, 12, 8, dtype=torch.float64)
    x = torch.randn(1, 12, 16, dtype=torch.float64)
    log_forget = F.logsigmoid(theirs.to_forget_gates[0](x)).mT
    attention = rg.Attention(bias=rg.biases.ForgettingBias(), mask=rg.causal())
    output, weights = by_torch(q, k, v, mask=theirs(x) + future(12))
    seen = attention(q, k, v, log_forget=log_forget)
    close(seen.output, output)
    close(seen.weights[...], weights)


def test_forgetting_refuses_keys_with_gaps():
    q, k, v = torch.randn(3, 1, 1, 4, 8)
    attention = rg.Attention(bias=rg.biases.ForgettingBias(), mask=rg.causal())
    with pytest.raises(rg.RegardError, match="gaps in their positions"):
        positions = rg.types.Positions(6, rg.types.Spans.of((0, 2), (8, 10)))
        attention(q, k, v, log_forget=torch.zeros(1, 1, 4), positions=positions)
    with pytest.raises(rg.RegardError, match="ForgettingBias needs a tensor for each call"):
        attention(q, k, v)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("learned", [False, True])
def test_qk_norm_divides_by_the_root_of_the_mean_square(joint, learned):
    """Over a head or over all of them, times a number for each channel, if these are learned."""
    norm = rg.encodings.QKNorm(8, 4, 2, joint=joint, learned=learned).double()
    x = torch.randn(2, 4, 5, 8, dtype=torch.float64)
    of_query, of_key = (
        scale.copy_(torch.rand_like(scale)) if learned else 1.0
        for scale in (p.detach() if learned else p for p in (norm.query_scale, norm.key_scale))
    )
    mean = x.square().mean((1, 3) if joint else 3, keepdim=True)
    close(norm.encode_query(x, torch.arange(5)), x / (mean + 1e-6).sqrt() * of_query)
    mean = x[:, :2].square().mean((1, 3) if joint else 3, keepdim=True)
    close(norm.encode_key(x[:, :2], torch.arange(5)), x[:, :2] / (mean + 1e-6).sqrt() * of_key)
    with pytest.raises(rg.RegardError, match="made for width 8"):
        norm.encode_query(x[..., :7], torch.arange(5))
    if learned:
        with pytest.raises(rg.RegardError, match="num_heads=4, got 3 heads"):
            norm.encode_query(x[:, :3], torch.arange(5))
