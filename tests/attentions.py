"""Attention as people write it: right functions in many styles, and functions with one planted mistake each."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import regard as rg

# Right ones


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


#: Each right function with the mechanism that it equals, and what its user means.
def scores_in_float32(q, k, v):
    """As Llama does it in half precision."""
    scores = q.float() @ k.float().mT / math.sqrt(q.shape[-1])
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


RIGHT = {
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
    "torch's module": (nn.MultiheadAttention(16, 4, batch_first=True), "multi_head", {}),
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
    "Regard's module": (rg.nn.MultiHeadAttention(16, 4), "multi_head", {}),
    "unscaled, as meant": (lambda q, k, v: (q @ k.mT).softmax(-1) @ v, "luong_dot", {"scale": 1.0}),
}


# Wrong ones: each has one mistake


def no_scale(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


def scale_by_width(q, k, v):
    return (q @ k.mT / q.shape[-1]).softmax(-1) @ v


def softmax_over_queries(q, k, v):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-2) @ v


def softmax_over_heads(q, k, v):
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(1), v)


def softmax_over_batch(q, k, v):
    return torch.bmm((torch.bmm(q, k.transpose(1, 2)) / q.shape[-1] ** 0.5).softmax(0), v)


def reversed_mask(q, k, v, mask=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return (scores if mask is None else scores.masked_fill(mask == 1, -1e9)).softmax(-1) @ v


def mask_after_softmax(q, k, v, mask=None):
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return (weights if mask is None else weights * mask) @ v


def causal_by(pattern):
    def attention(q, k, v):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        visible = pattern(torch.ones(scores.shape[-2:], dtype=torch.bool))
        return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v

    return attention


class SeesTheNext(CausalSelfAttention):
    def pattern(self, ones):
        return torch.tril(ones, diagonal=1)


class HidesItself(CausalSelfAttention):
    def pattern(self, ones):
        return torch.tril(ones, diagonal=-1)


def padding_on_queries(q, k, v, mask=None):
    scores = torch.bmm(q, k.transpose(1, 2)) / q.shape[-1] ** 0.5
    return (scores if mask is None else scores.masked_fill(~mask[:, :, None], -1e9)).softmax(-1) @ v


def mask_is_added(q, k, v, mask=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return (scores if mask is None else scores + mask.to(scores.dtype)).softmax(-1) @ v


def one_minus_mask(q, k, v, mask=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return (scores if mask is None else scores + (1 - mask.to(scores.dtype))).softmax(-1) @ v


def scores_set_to_zero(q, k, v, mask=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return (scores if mask is None else scores.masked_fill(mask == 0, 0.0)).softmax(-1) @ v


def mask_is_ignored(q, k, v, mask=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        scores.masked_fill(mask == 0, -1e9)  # not in place
    return scores.softmax(-1) @ v


def mask_is_transposed(q, k, v, mask=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return (scores if mask is None else scores.masked_fill(mask.mT == 0, -1e9)).softmax(-1) @ v


def causal_is_ignored(q, k, v, is_causal=False):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if is_causal:
        scores = scores + torch.triu(torch.ones(scores.shape[-2:]), 1)
    return scores.softmax(-1) @ v


def dropout_is_on(q, k, v, dropout=0.1):
    return F.dropout((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1), dropout) @ v


class DropoutIsOn(MultiHead):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.dropout = Always()


class Always(nn.Module):
    def forward(self, weights):
        return F.dropout(weights, 0.1)


def weights_after_dropout(query, key, value, mask=None, dropout=None):
    """The attention of the Annotated Transformer."""
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    p_attn = scores.softmax(dim=-1)
    if dropout is not None:
        p_attn = dropout(p_attn)
    return torch.matmul(p_attn, value), p_attn


class WeightsAfterDropout(MultiHead):
    def forward(self, query, key, value):
        q, k, v = self.split(self.W_q(query)), self.split(self.W_k(key)), self.split(self.W_v(value))
        weights = self.dropout((q @ k.mT * self.factor(q)).softmax(-1))
        return self.W_o((weights @ v).transpose(1, 2).reshape(query.shape)), weights


def scores_are_returned(q, k, v):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.softmax(-1) @ v, scores


def swapped(q, k, v):
    return (k @ q.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def overflows(q, k, v):
    weights = torch.exp(q @ k.mT / q.shape[-1] ** 0.5)
    return weights / weights.sum(-1, keepdim=True) @ v


def in_place(q, k, v):
    q /= q.shape[-1] ** 0.5
    return (q @ k.mT).softmax(-1) @ v


def detached(q, k, v):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1).detach() @ v


class WholeWidth(MultiHead):
    def factor(self, q):
        return 1 / math.sqrt(self.num_heads * self.d_k)


class BatchIsMixed(MultiHead):
    def split(self, x):
        return x.transpose(0, 1).reshape(x.shape[0], -1, self.num_heads, self.d_k).transpose(1, 2)


#: Each wrong function with its mistake, and what its user means.
def mean_over_the_batch(q, k, v):
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1).mean(0, keepdim=True) @ v


def causal_after_softmax(q, k, v, is_causal=False):
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
    return (weights.tril() if is_causal else weights) @ v


def causal_but_the_last_key(q, k, v, is_causal=False):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[-2:]).triu(1).bool()
    later[:, -1] = False
    return (scores.masked_fill(later, -math.inf) if is_causal else scores).softmax(-1) @ v


def without_values(q, k, v):
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ k


def nothing_but_nan(q, k, v):
    return (q @ k.mT / math.sqrt(0 * q[:1].sum())).softmax(-1) @ v


WRONG = {
    "only NaN": (nothing_but_nan, "the output is NaN", {}),
    "mean over the batch": (mean_over_the_batch, "sequences of a batch mix", {}),
    "causal after the softmax": (causal_after_softmax, "the causal mask is applied after the softmax", {}),
    "causal but the last key": (causal_but_the_last_key, "the causal mask shows later tokens", {}),
    "keys for values": (without_values, "the values are not used", {}),
    "no scale": (no_scale, "the scores are not scaled", {}),
    "scale by d": (scale_by_width, "the scores are divided by d instead of sqrt(d)", {}),
    "scale of the whole width": (
        WholeWidth,
        "the scores are divided by the root of the whole width instead of that of a head",
        {},
    ),
    "softmax over queries": (softmax_over_queries, "the softmax is over the queries", {}),
    "softmax over heads": (softmax_over_heads, "the softmax is over the heads", {}),
    "softmax over the batch": (softmax_over_batch, "the softmax is over the batch", {}),
    "query and key swapped": (swapped, "query and key are swapped", {}),
    "mask reversed": (reversed_mask, "the mask is reversed", {"mask": "keep"}),
    "causal mask reversed": (causal_by(torch.triu), "the causal mask is reversed", {}),
    "mask after softmax": (mask_after_softmax, "the mask is applied after the softmax", {}),
    "next token visible": (
        causal_by(lambda x: x.tril(1)),
        "the causal mask is off by one: it shows the next token",
        {},
    ),
    "next token visible, module": (SeesTheNext, "the causal mask is off by one: it shows the next token", {}),
    "own token hidden": (causal_by(lambda x: x.tril(-1)), "the causal mask hides the token itself", {}),
    "own token hidden, module": (HidesItself, "the causal mask hides the token itself", {}),
    "is_causal ignored": (causal_is_ignored, "the causal mask does nothing", {}),
    "padding on queries": (padding_on_queries, "the padding mask hides queries instead of keys", {}),
    "mask added as 0 and 1": (mask_is_added, "the mask is added as 0 and 1", {"mask": "keep"}),
    "one minus mask": (one_minus_mask, "the mask is added as 0 and 1", {}),
    "scores set to 0": (scores_set_to_zero, "the mask does not hide keys", {}),
    "mask not in place": (mask_is_ignored, "the mask does nothing", {}),
    "mask transposed": (mask_is_transposed, "the mask is transposed", {}),
    "dropout on": (dropout_is_on, "dropout is on in evaluation", {}),
    "dropout on, module": (DropoutIsOn, "dropout is on in evaluation", {}),
    "weights after dropout": (weights_after_dropout, "the returned weights are those after dropout", {}),
    "weights after dropout, module": (WeightsAfterDropout, "the returned weights are those after dropout", {}),
    "weights after dropout, torch's module": (
        nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True),
        "the returned weights are those after dropout",
        {},
    ),
    "scores returned": (scores_are_returned, "the returned weights are not those used", {}),
    "overflow": (overflows, "large scores overflow", {}),
    "in place": (in_place, "the inputs are changed in place", {}),
    "detached": (detached, "the gradient is detached", {}),
    "batch mixed": (BatchIsMixed, "sequences of a batch mix", {}),
}
