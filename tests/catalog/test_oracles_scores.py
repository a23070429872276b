"""Oracles of scores and heads: torch, jax, scipy, transformers, and the formulas of the papers pair by pair."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from scipy.special import softmax
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from transformers import LlamaConfig, Qwen3NextConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

import regard as rg
from oracles import FLOAT32, Says, agree, by_jax, by_torch, flat, heads, oracle


def from_scores(scores, v):
    weights = softmax(np.asarray(scores), axis=-1)
    return weights @ v.numpy(), weights


def additive(q, k, v, hidden, direction):
    """softmax of direction . tanh(hidden(q_i, k_j)), pair by pair."""
    scores = np.empty((*q.shape[:3], k.shape[2]))
    for b, h, i, j in np.ndindex(scores.shape):
        scores[b, h, i, j] = direction @ np.tanh(hidden(q[b, h, i].numpy(), k[b, 0, j].numpy()))
    return from_scores(scores, v)


@oracle("self_attention")
def test_self_attention_is_the_softmax_of_scaled_products(attention, q, k, v):
    return from_scores(np.einsum("bhid,bhjd->bhij", q, k) / np.sqrt(8), v)


@oracle("multi_head")
def test_multi_head_is_torch_multi_head_attention(attention, q, k, v):
    H, D = q.shape[1], q.shape[3]
    layer = nn.MultiheadAttention(H * D, H, bias=False, batch_first=True, dtype=q.dtype)
    layer.in_proj_weight.data = torch.eye(H * D, dtype=q.dtype).repeat(3, 1)
    layer.out_proj.weight.data = torch.eye(H * D, dtype=q.dtype)
    output, weights = layer(flat(q), flat(k), flat(v), average_attn_weights=False)
    return heads(output, H), weights


@oracle("cross", FLOAT32, value_dim=8)
def test_cross_is_jax_attention(attention, q, k, v):
    return by_jax(q, k, v)


@oracle("cross")
def test_cross_with_narrow_values_is_torch_attention(attention, q, k, v):
    return by_torch(q, k, v)


@oracle("masked", FLOAT32)
def test_masked_is_jax_causal_attention(attention, q, k, v):
    return by_jax(q, k, v, is_causal=True)


@oracle("masked", queries=5, keys=9)
def test_masked_queries_stand_at_the_end_as_in_torch_lower_right(attention, q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(5, 9))


@oracle("grouped_query", FLOAT32)
def test_grouped_query_is_llama_without_rotation(attention, q, k, v):
    (_, H, I, D), G = q.shape, k.shape[1]
    sizes = {"hidden_size": H * D, "num_attention_heads": H, "num_key_value_heads": G, "head_dim": D}
    layer = LlamaAttention(LlamaConfig(**sizes, attn_implementation="eager"), layer_idx=0)
    layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj = Says(q), Says(k), Says(v), nn.Identity()
    future = torch.full((I, I), -torch.inf, dtype=q.dtype).triu(1)[None, None]
    no_turn = torch.ones(1, I, D, dtype=q.dtype), torch.zeros(1, I, D, dtype=q.dtype)
    output, weights = layer(flat(q), no_turn, future)
    return heads(output, H), weights


@oracle("grouped_query", FLOAT32)
def test_grouped_query_is_jax_attention_with_fewer_key_heads(attention, q, k, v):
    return by_jax(q, k, v, is_causal=True)


@oracle("multi_query", FLOAT32)
def test_multi_query_is_jax_attention_with_one_key_head(attention, q, k, v):
    return by_jax(q, k, v, is_causal=True)


@oracle("multi_query")
def test_multi_query_is_torch_grouped_attention(attention, q, k, v):
    return by_torch(q, k, v, is_causal=True, enable_gqa=True)


@oracle("luong_dot")
def test_luong_dot_is_the_softmax_of_plain_products(attention, q, k, v):
    return from_scores(np.einsum("bhid,bhjd->bhij", q, k), v)


@oracle("luong_general")
def test_luong_general_is_torch_bilinear(attention, q, k, v):
    shape = (*q.shape[:3], k.shape[2])
    left = q[:, :, :, None].expand(*shape, -1).contiguous()
    right = k[:, :, None].expand(*shape, -1).contiguous()
    return from_scores(F.bilinear(left, right, attention.score.weight)[..., 0], v)


@oracle("mla", FLOAT32)
def test_mla_is_sdpa_with_keys_of_every_head_turned_as_in_transformers(attention, q, k, v):
    """The expanded form: heads have their own keys, and `v` is the latent. The turn is that of Llama."""
    weight, R = attention.score.weight, attention.position.head_dim
    cos, sin = LlamaRotaryEmbedding(LlamaConfig(head_dim=R))(q, torch.arange(q.shape[2])[None])
    q_turned, k_turned = apply_rotary_pos_emb(q[..., :R], k[..., :R].expand(-1, 4, -1, -1), cos, sin)
    keys = torch.cat((k_turned, torch.einsum("bjc,hdc->bhjd", k[:, 0, :, R:], weight)), -1)
    values = v.expand(-1, 4, -1, -1)
    return by_torch(torch.cat((q_turned, q[..., R:]), -1), keys, values, is_causal=True)


@oracle("gated_output", FLOAT32)
def test_gated_output_has_the_weights_of_qwen3_next(attention, q, k, v):
    """The weights of the module, whose gate comes after them; the gated output is tested in test_output_gate.py."""
    (_, H, I, D), no_gate = q.shape, torch.zeros_like(q)
    sizes = {"hidden_size": H * D, "num_attention_heads": H, "num_key_value_heads": H, "head_dim": D}
    layer = Qwen3NextAttention(Qwen3NextConfig(**sizes, attn_implementation="eager"), layer_idx=0)
    layer.q_proj = Says(torch.cat((q, no_gate), -1))
    layer.k_proj, layer.v_proj, layer.o_proj = Says(k), Says(v), nn.Identity()
    layer.q_norm = layer.k_norm = nn.Identity()
    future = torch.full((I, I), -torch.inf, dtype=q.dtype).triu(1)[None, None]
    no_turn = torch.ones(1, I, D, dtype=q.dtype), torch.zeros(1, I, D, dtype=q.dtype)
    output, weights = layer(flat(q), no_turn, future)
    return 2 * heads(output, H), weights  # sigmoid(0) = 1 / 2


@oracle("bahdanau")
def test_bahdanau_pair_by_pair(attention, q, k, v):
    W, U = attention.score.query.weight.numpy(), attention.score.key.weight.numpy()
    return additive(q, k, v, lambda s, h: W @ s + U @ h, attention.score.direction.numpy())


class TutorialAttention(nn.Module):
    """Bahdanau's attention as tutorials of PyTorch write it, with the biases that nn.Linear has unless told."""

    def __init__(self, query_dim, key_dim, hidden):
        super().__init__()
        self.W_a, self.U_a, self.v_a = (
            nn.Linear(query_dim, hidden),
            nn.Linear(key_dim, hidden),
            nn.Linear(hidden, 1),
        )

    def forward(self, query, keys):
        scores = self.v_a(torch.tanh(self.W_a(query).unsqueeze(1) + self.U_a(keys))).squeeze(-1)
        weights = F.softmax(scores, dim=-1)
        return torch.bmm(weights.unsqueeze(1), keys).squeeze(1), weights


@oracle("bahdanau", arguments={"query_dim": 8, "key_dim": 6, "hidden": 5, "bias": True}, value_dim=6)
def test_bahdanau_with_a_bias_is_the_class_of_the_tutorials(attention, q, k, v):
    score, theirs = attention.score, TutorialAttention(8, 6, 5).double()
    theirs.W_a.weight.data, theirs.U_a.weight.data = score.query.weight.data, score.key.weight.data
    theirs.W_a.bias.data = score.query.bias.data - theirs.U_a.bias.data  # two biases inside the tanh are one
    theirs.v_a.weight.data = score.direction.data[None]
    v.copy_(k)
    outputs, weights = zip(*(theirs(query, k[:, 0]) for query in q[:, 0].unbind(1)), strict=True)
    return torch.stack(outputs, 1)[:, None], torch.stack(weights, 1)[:, None]


@oracle("luong_concat", arguments={"query_dim": 8, "key_dim": 6, "hidden": 5, "bias": True})
def test_luong_concat_with_a_bias_is_a_linear_layer_of_each_pair(attention, q, k, v):
    layer = nn.Linear(14, 5).double()
    layer.load_state_dict(attention.score.projection.state_dict())
    pairs = torch.cat(
        (q.unsqueeze(3).expand(-1, -1, -1, k.shape[2], -1), k.unsqueeze(2).expand(-1, -1, q.shape[2], -1, -1)), -1
    )
    return from_scores(layer(pairs).tanh() @ attention.score.direction, v)


@oracle("luong_concat")
def test_luong_concat_pair_by_pair(attention, q, k, v):
    W = attention.score.projection.weight.numpy()
    return additive(q, k, v, lambda s, h: W @ np.concatenate((s, h)), attention.score.direction.numpy())


@oracle("cosine")
def test_cosine_is_one_minus_scipy_cosine_distance(attention, q, k, v):
    distance = [[cdist(a, b, "cosine") for a, b in zip(*x, strict=True)] for x in zip(q, k, strict=True)]
    return from_scores(10.0 * (1 - np.array(distance)), v)


@oracle("softcap")
def test_softcap_by_hand(attention, q, k, v):
    capped = 1.5 * np.tanh(np.einsum("bhid,bhjd->bhij", q, k) / np.sqrt(8) / 1.5)
    return from_scores(np.where(np.tri(24, dtype=bool), capped, -np.inf), v)


@oracle("softcap", FLOAT32)
def test_softcap_is_gemma_2(attention, q, k, v):
    gemma = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")
    layer, future = nn.Module(), torch.full((24, 24), -torch.inf, dtype=q.dtype).triu(1)
    layer.num_key_value_groups = 1
    output, weights = gemma.eager_attention_forward(layer, q, k, v, future, scaling=8**-0.5, softcap=1.5)
    return output.transpose(1, 2), weights


def test_bahdanau_scores_of_two_keys_are_a_sigmoid():
    """With W = U = 1, v = 2: the weight of the first key is sigmoid(2 tanh(q + k_1) - 2 tanh(q + k_2))."""
    attention = rg.Attention(rg.scores.Additive(1, 1, 1).double())
    for parameter, value in zip(attention.parameters(), (2.0, 1.0, 1.0), strict=True):
        parameter.data.fill_(value)
    q, k = torch.tensor([[[[0.3]]]]).double(), torch.tensor([[[[0.5], [-1.0]]]]).double()
    first = 1 / (1 + np.exp(2 * np.tanh(0.3 - 1.0) - 2 * np.tanh(0.3 + 0.5)))
    agree(attention, q, k, torch.tensor([[[[1.0], [0.0]]]]).double(), np.array([[[[first]]]]))


@pytest.mark.parametrize("kind", [rg.scores.Additive, rg.scores.Concat])
def test_additive_scores_are_a_matrix_and_a_direction_of_small_entries(kind):
    """A projection of 10 channels to 64 and a direction, without bias; the direction starts within +-1/sqrt(64)."""
    score = kind(4, 6, 64)
    assert sum(p.numel() for p in score.parameters()) == 10 * 64 + 64
    assert -1 / 8 <= score.direction.min() < -0.05 and 0.05 < score.direction.max() <= 1 / 8
