"""Oracles of positions and biases: transformers' modules, and the formulas of the papers pair by pair."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, T5Config, Wav2Vec2BertConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertSelfAttention

import regard as rg
from oracles import FLOAT32, Says, by_torch, close, flat, heads, oracle
from regard.pieces.bias import alibi_slopes
from regard.pieces.position import angles


def attends_as(layer, projections, q, k, v, *inputs, **options):
    """A layer of transformers, given our queries, keys and values in place of its projections."""
    for name, module in zip(projections, (Says(q), Says(k), Says(v), nn.Identity()), strict=True):
        setattr(layer, name, module)
    answer = layer(flat(q), *inputs, **options)
    return heads(answer[0], q.shape[1]), answer[-1]


def future(length):
    return torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)[None, None]


@oracle("rope", FLOAT32)
def test_rope_is_llama(attention, q, k, v):
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, head_dim=8, attn_implementation="eager")
    angles = LlamaRotaryEmbedding(config)(q, torch.arange(24)[None])
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    return attends_as(LlamaAttention(config, 0), projections, q, k, v, angles, future(24))


@oracle("rope", FLOAT32, arguments={"head_dim": 8, "interleaved": True})
def test_rope_interleaved_is_gpt_j(attention, q, k, v):
    sin, cos = gptj.create_sinusoidal_positions(24, 8).double().chunk(2, dim=-1)
    q, k = (gptj.apply_rotary_pos_emb(x.transpose(1, 2), sin[None], cos[None]).transpose(1, 2) for x in (q, k))
    return by_torch(q, k, v, is_causal=True)


@oracle("rope", arguments={"head_dim": 8, "interleaved": True})
def test_rope_interleaved_is_multiplication_by_complex_numbers(attention, q, k, v):
    turns = torch.polar(torch.ones(24, 4).double(), torch.arange(24.0).double().outer(0.1 ** torch.arange(4).double()))
    q, k = (
        torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2)).contiguous()) * turns).flatten(-2)
        for x in (q, k)
    )
    return by_torch(q, k, v, is_causal=True)


@pytest.mark.parametrize(
    ("scaling", "kind", "seq_len"),
    [
        (rg.encodings.LinearScaling(4.0), {"rope_type": "linear", "factor": 4.0}, None),
        (rg.encodings.Llama3Scaling(8.0, 1.0, 4.0, 64), {"rope_type": "llama3", "factor": 8.0}, None),
        # At twice the trained length the "dynamic" rule slows the slowest wave by 2 factor - (factor - 1).
        (rg.encodings.NTKScaling(5.0), {"rope_type": "dynamic", "factor": 4.0}, 128),
    ],
)
def test_scaled_frequencies_are_those_of_transformers(scaling, kind, seq_len):
    kind = {"rope_theta": 10_000.0, **kind}
    if kind["rope_type"] == "llama3":
        kind |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, max_position_embeddings=64, rope_parameters=kind)
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind["rope_type"]](config, torch.device("cpu"), seq_len)
    assert factor == 1.0
    close(rg.RoPE(32, scaling=scaling).frequencies(), frequencies, FLOAT32)


def test_a_frequency_of_half_a_turn_changes_the_sign_at_each_position():
    """Half a turn is 2^63 units of an angle, one more than 64 bits hold; pi, 3 pi and -pi are the same half."""
    positions = torch.tensor([-3, 0, 1, 2, 7, 1000, 2**31 - 1])
    signs = torch.where(positions % 2 == 0, 1.0, -1.0).double()
    for half in (math.pi, 3 * math.pi, -math.pi):
        found = angles(positions, torch.tensor([half] * 9, dtype=torch.float64), torch.float64)
        close(found.cos(), signs[:, None].expand(-1, 9), FLOAT32)
        assert found.sin().abs().max() < 1e-5


@oracle("sinusoidal", FLOAT32)
def test_sinusoidal_is_distilbert(attention, q, k, v):
    table = torch.zeros(24, 8, dtype=torch.float64)
    create_sinusoidal_embeddings(24, 8, table)
    return by_torch(q + table, k + table, v)


@oracle("sinusoidal")
def test_sinusoidal_channel_by_channel(attention, q, k, v):
    table = np.empty((24, 8))
    for position, m in np.ndindex(24, 4):
        angle = position / 10_000 ** (2 * m / 8)
        table[position, 2 * m : 2 * m + 2] = math.sin(angle), math.cos(angle)
    return by_torch(q + torch.from_numpy(table), k + torch.from_numpy(table), v)


@oracle("learned_positions", queries=5, keys=9)
def test_learned_positions_are_an_embedding(attention, q, k, v):
    embed = nn.Embedding.from_pretrained(attention.position.table)
    return by_torch(q + embed(torch.arange(4, 9)), k + embed(torch.arange(9)), v)


@oracle("shaw", queries=7)
def test_shaw_pair_by_pair(attention, q, k, v):
    """e_ij = x_i W_Q (x_j W_K + a_ij)^T / sqrt(d), a_ij = w_clip(j - i, reach): equations 2 and 4."""
    w, e = attention.bias[0].keys, torch.empty(2, 4, 7, 7, dtype=torch.float64)
    for i, j in np.ndindex(7, 7):
        a = w[max(-3, min(j - i, 3)) + 3]
        e[:, :, i, j] = (q[:, :, i] * (k[:, :, j] + a)).sum(-1) / math.sqrt(8)
    return e.softmax(-1) @ v, e.softmax(-1)


@oracle("shaw", FLOAT32)
def test_shaw_is_wav2vec2_bert_relative_key(attention, q, k, v):
    config = Wav2Vec2BertConfig(
        hidden_size=32,
        num_attention_heads=4,
        position_embeddings_type="relative_key",
        left_max_position_embeddings=3,
        right_max_position_embeddings=3,
        attention_dropout=0.0,
        attn_implementation="eager",
    )
    layer = Wav2Vec2BertSelfAttention(config).eval()
    layer.distance_embedding.weight.data = attention.bias[0].keys
    return attends_as(layer, ("linear_q", "linear_k", "linear_v", "linear_out"), q, k, v)


def by_t5(attention, q, k, v, mask, is_decoder):
    config = T5Config(
        d_model=32,
        d_kv=8,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        is_decoder=is_decoder,
        attn_implementation="eager",
    )
    layer = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
    layer.relative_attention_bias.weight.data = attention.bias[0].table
    return attends_as(layer, ("q", "k", "v", "o"), q, k, v, mask)


@oracle("t5", FLOAT32, queries=40)
def test_t5_is_the_t5_encoder(attention, q, k, v):
    return by_t5(attention, q, k, v, None, is_decoder=False)


@oracle("t5", FLOAT32, {"num_heads": 4, "num_buckets": 8, "max_distance": 16, "bidirectional": False}, queries=40)
def test_t5_in_one_direction_is_the_t5_decoder(attention, q, k, v):
    return by_t5(attention, q, k, v, future(40), is_decoder=True)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_buckets_of_any_number_and_reach_are_those_of_t5(bidirectional):
    """Half of the buckets of a direction are exact; the least reach is one position more."""
    distances = torch.arange(-300, 300)
    for buckets in (2, 4, 5, 8, 9, 32, 33):
        exact = buckets // (2 if bidirectional else 1) // 2
        for reach in {max(exact, 1), exact + 1, exact + 2, 20, 128, 250}:
            if exact == 0 or reach <= exact:
                with pytest.raises(rg.RegardError, match="max_distance is above"):
                    rg.biases.T5Bias(1, buckets, reach, bidirectional)
                continue
            bias = rg.biases.T5Bias(1, buckets, reach, bidirectional)
            bias.table.data[:, 0] = torch.arange(float(buckets))
            theirs = T5Attention._relative_position_bucket(distances, bidirectional, buckets, reach)
            grid = rg.types.Grid.whole(rg.types.Positions(300, rg.types.Spans.of((0, 600))), 1, 1, 1)
            assert bias.term(grid, None, None).flatten().tolist() == theirs.tolist()


def test_a_bias_of_t5_is_that_of_its_configuration_unless_told():
    config, bias = T5Config(), rg.biases.T5Bias(1)
    assert bias.num_buckets == config.relative_attention_num_buckets
    assert bias.max_distance == config.relative_attention_max_distance


@oracle("transformer_xl", queries=5, keys=9)
def test_transformer_xl_term_by_term(attention, q, k, v):
    """Section 3.3: q.k (a) + q.W r (b) + u.k (c) + v.W r (d); four older keys are the memory of a segment."""
    u, w, W = (getattr(attention.bias[0], name) for name in ("content", "distance", "projection"))
    e = torch.full((2, 4, 5, 9), -torch.inf, dtype=torch.float64)
    for h, i, j in np.ndindex(4, 5, 9):
        waves = (i + 4 - j) / 10_000 ** (torch.arange(0, 8, 2).double() / 8)
        r = W[h] @ torch.cat((waves.sin(), waves.cos()))
        query, key = q[:, h, i], k[:, h, j]
        if j <= i + 4:
            e[:, h, i, j] = ((query * key).sum(-1) + query @ r + key @ u[h, 0] + w[h, 0] @ r) / math.sqrt(8)
    return e.softmax(-1) @ v, e.softmax(-1)


@oracle("alibi", FLOAT32)
def test_alibi_is_bloom(attention, q, k, v):
    bias = build_alibi_tensor(torch.ones(2, 24), 4, torch.float64).view(2, 4, 1, 24)
    return by_torch(q, k, v, mask=bias + future(24))


@oracle("alibi", arguments={"num_heads": 12}, heads=12)
def test_alibi_of_12_heads_by_hand(attention, q, k, v):
    """Eight slopes for 8 heads, then every other one of those for 16: 2^-0.5, 2^-1.5, 2^-2.5, 2^-3.5."""
    slopes = [2.0**-h for h in range(1, 9)] + [2.0**-h for h in (0.5, 1.5, 2.5, 3.5)]
    apart = torch.arange(24)[:, None] - torch.arange(24)
    return by_torch(q, k, v, mask=-torch.tensor(slopes, dtype=torch.float64).view(12, 1, 1) * apart + future(24))


@oracle("alibi", arguments={"num_heads": 4, "is_causal": False})
def test_alibi_without_a_mask_penalizes_the_future_as_the_past(attention, q, k, v):
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]).double()
    apart = (torch.arange(24)[:, None] - torch.arange(24)).abs()
    return by_torch(q, k, v, mask=-slopes.view(4, 1, 1) * apart)


@pytest.mark.parametrize("num_heads", [1, 2, 3, 6, 8, 12, 16, 20, 71, 112])
def test_alibi_slopes_are_those_of_bloom(num_heads):
    theirs = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float64)[:, 0, 1]
    close(torch.tensor(alibi_slopes(num_heads)).double(), theirs, FLOAT32)


@pytest.mark.parametrize(
    ("make", "variance"),
    [
        (lambda H, D: rg.biases.T5Bias(H), lambda D: 1),  # its numbers are N(0, 1)
        (lambda H, D: rg.biases.ShawBias(D, 2), lambda D: 1 / D),  # q.a / sqrt(D), a of variance 1 / D
        (lambda H, D: rg.biases.TransformerXLBias(H, D), lambda D: 1 / 2),  # q.W r / sqrt(D), W of 1 / D, |r|^2 = D / 2
    ],
    ids=["t5", "shaw", "transformer_xl"],
)
@torch.no_grad()
def test_a_fresh_bias_has_the_variance_of_its_parameters(make, variance):
    """For queries and keys of variance 1; so scores start out alike in models of any width."""
    positions, heads = rg.types.Positions.aligned_to_end(5, 5), 100
    grid = rg.types.Grid.whole(positions, 1, heads, 5)
    for width in (8, 128):
        bias = make(heads, width)
        term = bias.term(grid, *bias.prepare(*torch.randn(2, 1, heads, 5, width), positions))
        assert 0.7 < term.var() / variance(width) < 1.4


def test_learned_table_is_the_bias_of_swin():
    """One dimension of Swin's table: head by distance, gathered for each pair."""
    bias = rg.biases.LearnedTable(2, 3).double()
    bias.table.data.normal_()
    q, k, v = (torch.randn(1, 2, 4, 8).double() for _ in range(3))
    index = torch.tensor([[3, 4, 5, 6], [2, 3, 4, 5], [1, 2, 3, 4], [0, 1, 2, 3]])
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.table[:, index])
    close(rg.Attention(bias=bias)(q, k, v).output, theirs)
