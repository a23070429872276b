"""Attention as people write it: right functions in many styles."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import regard as rg


def by_matmul(q, k, v, mask=None):
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights, v), weights


def by_einsum(query, key, value, attn_mask=None):
    """(batch, length, heads, width), as in flash-attention; True = may not attend."""
    scores = torch.einsum("bihd,bjhd->bhij", query, key) * query.shape[-1] ** -0.5
    if attn_mask is not None:
        scores = scores.masked_fill(attn_mask, float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), value)


def by_loops(q, k, v):
    output = torch.zeros(len(q), v.shape[1], dtype=v.dtype)
    for i in range(len(q)):
        scores = [(q[i] * k[j]).sum() / len(q[i]) ** 0.5 for j in range(len(k))]
        largest = max(scores)
        weights = [torch.exp(s - largest) for s in scores]
        output[i] = sum(w * v[j] for j, w in enumerate(weights)) / sum(weights)
    return output


def by_torch(query, key, value, attn_mask=None, is_causal=False):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, is_causal=is_causal)


class Additive(nn.Module):
    """Bahdanau's, as in the PyTorch tutorial: one decoder state, returns (context, weights)."""

    def __init__(self, hidden_size):
        super().__init__()
        self.Wa, self.Ua = nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, hidden_size)
        self.Va = nn.Linear(hidden_size, 1)

    def forward(self, query, keys):
        scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(keys))).squeeze(2).unsqueeze(1)
        weights = F.softmax(scores, dim=-1)
        return torch.bmm(weights, keys), weights


class Concat(nn.Module):
    """Luong's concat, for a decoder state (B, C) and encoder states (B, J, C); returns (weights, context)."""

    def __init__(self, hidden):
        super().__init__()
        self.attn, self.v = nn.Linear(2 * hidden, hidden), nn.Linear(hidden, 1, bias=False)

    def forward(self, hidden, encoder_outputs):
        repeated = hidden.unsqueeze(1).expand(-1, encoder_outputs.shape[1], -1)
        energy = torch.tanh(self.attn(torch.cat((repeated, encoder_outputs), 2)))
        weights = self.v(energy).squeeze(2).softmax(1)
        return weights, (weights.unsqueeze(1) @ encoder_outputs).squeeze(1)


class General(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.W = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, query, values):
        return (query @ self.W(values).mT).softmax(-1) @ values


class MultiHead(nn.Module):
    """As tutorials write it: (output, weights), 1/0 mask (B, n, n), dropout on a copy of the weights."""

    def __init__(self, d_model, num_heads, dropout=0.1):
        super().__init__()
        self.num_heads, self.d_k = num_heads, d_model // num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def split(self, x):
        return x.view(x.shape[0], -1, self.num_heads, self.d_k).transpose(1, 2)

    def factor(self, q):
        return 1 / math.sqrt(self.d_k)

    def forward(self, query, key, value, mask=None):
        q, k, v = self.split(self.W_q(query)), self.split(self.W_k(key)), self.split(self.W_v(value))
        scores = q @ k.transpose(-2, -1) * self.factor(q)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        weights = scores.softmax(-1)
        output = (self.dropout(weights) @ v).transpose(1, 2).reshape(query.shape)
        return self.W_o(output), weights


class CausalSelfAttention(nn.Module):
    """As in nanoGPT: one matrix for q, k and v, a buffer of ones for the mask; the input alone."""

    def __init__(self, n_embd, n_head, block_size, dropout=0.1):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.n_head, self.drop = n_head, nn.Dropout(dropout)
        self.register_buffer(
            "bias", self.pattern(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size)
        )

    def pattern(self, ones):
        return torch.tril(ones)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (y.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for y in self.c_attn(x).split(C, dim=2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = self.drop(F.softmax(scores, dim=-1)) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Head(nn.Module):
    """One head of a smaller width: q, k and v by (width, head_size) matrices."""

    def __init__(self, d_in, d_out):
        super().__init__()
        self.W_query, self.W_key, self.W_value = (nn.Parameter(torch.rand(d_in, d_out)) for _ in range(3))

    def forward(self, x):
        q, k, v = x @ self.W_query, x @ self.W_key, x @ self.W_value
        return torch.softmax(q @ k.transpose(1, 2) / k.shape[-1] ** 0.5, dim=-1) @ v


def linear(q, k, v):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return q @ (k.transpose(-2, -1) @ v) / (q @ k.sum(-2, keepdim=True).transpose(-2, -1))


def cosine(q, k, v):
    return (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * 10.0).softmax(-1) @ v


def with_added_mask(Q, K, V, mask=None):
    scores = Q @ K.mT / Q.shape[-1] ** 0.5
    return (scores if mask is None else scores + mask).softmax(-1) @ V


def with_padding_mask(q, k, v, key_padding_mask=None):
    """(batch, length, width), a mask (batch, length) of real keys."""
    scores = torch.bmm(q, k.transpose(1, 2)) / q.size(2) ** 0.5
    if key_padding_mask is not None:
        scores = scores.masked_fill(~key_padding_mask[:, None, :], -torch.inf)
    return torch.bmm(scores.softmax(2), v)


def in_numpy(q, k, v):
    scores = np.matmul(q, np.swapaxes(k, -1, -2)) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = weights / weights.sum(axis=-1, keepdims=True)
    return np.matmul(weights, v), weights


def without_parameters(x):
    return F.softmax(x @ x.transpose(1, 2) / x.shape[-1] ** 0.5, dim=2) @ x


def alibi(q, k, v):
    distance = torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]
    slopes = 2.0 ** (-8 * torch.arange(1, q.shape[1] + 1) / q.shape[1])
    scores = q @ k.mT / q.shape[-1] ** 0.5 - slopes[:, None, None] * distance.abs()
    return scores.masked_fill(distance > 0, -torch.inf).softmax(-1) @ v


def sequence_first(q, k, v):
    return torch.einsum("bij,jbd->ibd", (torch.einsum("ibd,jbd->bij", q, k) / q.shape[-1] ** 0.5).softmax(-1), v)


def scores_in_float32(q, k, v):
    """As Llama does it in half precision."""
    scores = q.float() @ k.float().mT / math.sqrt(q.shape[-1])
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


def repeated(x, num_heads, is_tiled=False):
    """Shared key heads (B, G, n, D) for all query heads: 0, 0, 1, 1, or 0, 1, 0, 1."""
    times = num_heads // x.shape[1]
    return x.repeat(1, times, 1, 1) if is_tiled else x.repeat_interleave(times, dim=1)


def grouped(q, k, v, attn_mask=None):
    return by_matmul(q, repeated(k, q.shape[1]), repeated(v, q.shape[1]), attn_mask)


def grouped_by_tiles(q, k, v):
    return by_matmul(q, repeated(k, q.shape[1], True), repeated(v, q.shape[1], True))


def grouped_by_view(q, k, v):
    """Without any copy of keys: query heads get an axis of their group."""
    B, H, I, D = q.shape
    scores = torch.einsum("bgrid,bgjd->bgrij", q.view(B, k.shape[1], -1, I, D), k) / D**0.5
    return torch.einsum("bgrij,bgjd->bgrid", scores.softmax(-1), v).reshape(B, H, I, D)


def grouped_by_torch(query, key, value, is_causal=False):
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)


class Grouped(nn.Module):
    """As in Llama: fewer heads of keys and values than of queries."""

    def __init__(self, d_model, num_heads, num_kv_heads=2):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, d_model // num_heads
        self.q_proj, self.o_proj = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.k_proj, self.v_proj = (nn.Linear(d_model, num_kv_heads * self.head_dim) for _ in range(2))

    def split(self, x):
        return x.view(x.shape[0], x.shape[1], -1, self.head_dim).transpose(1, 2)

    def repeat_values(self, v):
        return repeated(v, self.num_heads)

    def forward(self, hidden_states):
        q, k, v = (self.split(p(hidden_states)) for p in (self.q_proj, self.k_proj, self.v_proj))
        output, _ = by_matmul(q, repeated(k, self.num_heads), self.repeat_values(v))
        return self.o_proj(output.transpose(1, 2).flatten(2))


class MultiQuery(nn.Module):
    """One head of keys and values, of a joint matrix."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, d_model // num_heads
        self.q, self.kv = nn.Linear(d_model, d_model), nn.Linear(d_model, 2 * self.head_dim)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = (y[:, None] for y in self.kv(x).chunk(2, dim=-1))
        return self.out(by_matmul(q, k, v)[0].transpose(1, 2).flatten(2))


def flash(q, k, v, size=3):
    """Blocks of keys, with a running maximum and sum."""
    output, total = torch.zeros_like(q), torch.zeros_like(q[..., :1])
    largest = torch.full_like(total, -math.inf)
    for start in range(0, k.shape[-2], size):
        scores = q @ k[..., start : start + size, :].mT / math.sqrt(q.shape[-1])
        highest = torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights, old = torch.exp(scores - highest), torch.exp(largest - highest)
        output = output * old + weights @ v[..., start : start + size, :]
        total, largest = total * old + weights.sum(-1, keepdim=True), highest
    return output / total


def by_four_loops(q, k, v):
    output = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                scores = torch.stack([q[b, h, i] @ key for key in k[b, h]]) / q.shape[-1] ** 0.5
                output[b, h, i] = sum(w * value for w, value in zip(scores.softmax(0), v[b, h], strict=True))
    return output


def top_k(q, k, v):
    """Has a threshold: not smooth, and not rounded."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    smallest = scores.topk(3, dim=-1).values[..., -1:]
    return scores.masked_fill(scores < smallest, -math.inf).softmax(-1) @ v


class FeedForward(nn.Module):
    """A network of ReLU behind the attention: its weights cannot be measured, and it is not smooth."""

    def __init__(self, d_model):
        super().__init__()
        self.up, self.down = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)

    def forward(self, q, k, v):
        return self.down(self.up(by_matmul(q, k, v)[0]).relu())


def with_positions_in_values(q, k, v):
    """Vectors of positions are added to the values, as in Shaw et al. for distances."""
    return by_matmul(q, k, v + torch.linspace(-1, 1, v.shape[-2], dtype=v.dtype)[:, None])[0]


def random_synthesizer(q, k, v):
    """Weights that do not depend on the inputs."""
    scores = torch.arange(q.shape[-2])[:, None] * torch.arange(k.shape[-2]) % 5
    return scores.to(v.dtype).softmax(-1) @ v


def t5(q, k, v):
    """A learned bias of the distance, no scale."""
    distance = torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]
    table = torch.linspace(-1, 1, 33).sin()
    return (q @ k.mT + table[distance.clamp(-16, 16) + 16]).softmax(-1) @ v


def sliding(q, k, v):
    distance = torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill((distance < 0) | (distance >= 3), -math.inf)
    return scores.softmax(-1) @ v


def by_bmm(query, key, value, mask=None):
    """(batch, length, width); the softmax names its axis from the front."""
    scores = torch.bmm(query, key.transpose(1, 2)) / math.sqrt(query.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    weights = F.softmax(scores, dim=2)
    return torch.bmm(weights, value), weights


def of_one_sequence(q, k, v):
    return F.softmax(q @ k.T / math.sqrt(q.shape[1]), dim=1) @ v


def softcapped(q, k, v):
    return (30 * torch.tanh(q @ k.mT / math.sqrt(q.shape[-1]) / 30)).softmax(-1) @ v


def with_a_sink(q, k, v):
    """One more entry in each row, whose weight goes to no key."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores = torch.cat((scores, torch.zeros_like(scores[..., :1])), -1)
    return scores.softmax(-1)[..., :-1] @ v


def with_a_regard_mask(q, k, v, mask=None):
    return (rg.Attention() if mask is None else rg.Attention(mask=mask))(q, k, v).output


class JointMatrix(nn.Module):
    """As in timm: (B, n, 3, H, D) permuted; torch's kernel."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        B, n, C = x.shape
        q, k, v = self.qkv(x).reshape(B, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, n, C))


class AdditiveOfThree(nn.Module):
    """As in Dive into Deep Learning: queries, keys and values of their own."""

    def __init__(self, hidden):
        super().__init__()
        self.W_k, self.W_q, self.w_v = (nn.Linear(hidden, n, bias=False) for n in (hidden, hidden, 1))

    def forward(self, queries, keys, values):
        features = torch.tanh(self.W_q(queries).unsqueeze(2) + self.W_k(keys).unsqueeze(1))
        return torch.bmm(F.softmax(self.w_v(features).squeeze(-1), dim=-1), values)


#: Each right function with the mechanism that it equals, and what its user means.
RIGHT = {
    "grouped queries": (grouped, "multi_head", {}),
    "grouped queries, tiles": (grouped_by_tiles, "multi_head", {}),
    "grouped queries, a view": (grouped_by_view, "multi_head", {}),
    "grouped queries, torch": (grouped_by_torch, "multi_head", {}),
    "grouped queries, module": (Grouped(32, 4), "multi_head", {}),
    "multi-query, module": (MultiQuery(32, 4), "multi_head", {}),
    "four loops": (by_four_loops, "multi_head", {}),
    "positions in values": (with_positions_in_values, "multi_head", {}),
    "synthesizer": (random_synthesizer, None, {}),
    "top-k": (top_k, "top_k", {}),
    "feed-forward layer": (FeedForward, None, {}),
    "flash": (flash, "multi_head", {}),
    "t5": (t5, None, {}),
    "sliding window": (sliding, "sliding_window", {}),
    "softmax over axis 3": (lambda q, k, v: F.softmax(q @ k.mT / math.sqrt(q.shape[-1]), 3) @ v, "multi_head", {}),
    "bmm": (by_bmm, "cross", {}),
    "one sequence": (of_one_sequence, "cross", {}),
    "softcap": (softcapped, "softcap", {}),
    "sink": (with_a_sink, None, {}),
    "a mask of Regard": (with_a_regard_mask, "multi_head", {}),
    "additive, three inputs": (AdditiveOfThree, "bahdanau", {}),
    "scores in float32": (scores_in_float32, "multi_head", {}),
    "matmul": (by_matmul, "multi_head", {}),
    "einsum, drop mask": (by_einsum, "multi_head", {"mask": "drop"}),
    "einsum, drop mask, nothing said": (by_einsum, "multi_head", {}),
    "loops": (by_loops, "cross", {}),
    "torch": (by_torch, "multi_head", {}),
    "torch itself": (F.scaled_dot_product_attention, "multi_head", {}),
    "additive, bahdanau": (Additive, "bahdanau", {}),
    "concat, luong": (Concat, "luong_concat", {}),
    "general, luong": (General, "luong_general", {}),
    "multi-head module": (MultiHead, "multi_head", {}),
    "torch's module, length first": (nn.MultiheadAttention(24, 2), "multi_head", {"mask": "drop"}),
    "nanoGPT": (CausalSelfAttention, "masked", {}),
    "one head": (Head(16, 8), "self_attention", {}),
    "linear": (linear, "linear", {}),
    "cosine": (cosine, "cosine", {}),
    "added mask": (with_added_mask, "multi_head", {"mask": "additive"}),
    "added mask, nothing said": (with_added_mask, "multi_head", {}),
    "padding mask": (with_padding_mask, "cross", {"mask": "keep"}),
    "NumPy": (in_numpy, "multi_head", {}),
    "no parameters": (without_parameters, "self_attention", {}),
    "alibi": (alibi, "alibi", {}),
    "length first": (sequence_first, "cross", {}),
    "unscaled, as meant": (lambda q, k, v: (q @ k.mT).softmax(-1) @ v, "luong_dot", {"scale": 1.0}),
}
