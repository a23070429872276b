"""Attention with one planted mistake each."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from attentions import CausalSelfAttention, Grouped, MultiHead, by_matmul, repeated


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


def repeated_differently(q, k, v):
    return by_matmul(q, repeated(k, q.shape[1]), repeated(v, q.shape[1], is_tiled=True))


class RepeatedDifferently(Grouped):
    def repeat_values(self, v):
        return repeated(v, self.num_heads, is_tiled=True)


def mask_of_the_first_entry(q, k, v, mask=None):
    return by_matmul(q, k, v, None if mask is None else mask[:1])


def mask_of_the_last_entry(query, key, value, attn_mask=None):
    """(batch, length, width)"""
    scores = torch.bmm(query, key.transpose(1, 2)) / math.sqrt(query.shape[-1])
    return (scores if attn_mask is None else scores.masked_fill(~attn_mask[-1], -math.inf)).softmax(-1) @ value


def masks_of_the_batch_joined(q, k, v, mask=None):
    return by_matmul(q, k, v, None if mask is None else mask.any(0, keepdim=True))


def softmax_over_axis_1(q, k, v):
    return F.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), dim=1) @ v


def weights_transposed(q, k, v):
    output, weights = by_matmul(q, k, v)
    return output, weights.mT


class WeightsTransposed(MultiHead):
    def forward(self, x):
        output, weights = super().forward(x, x, x)
        return output, weights.mT


def with_residual(q, k, v, mask=None):
    return q + by_matmul(q, k, v, mask)[0]


def with_residual_of_keys(q, k, v):
    return by_matmul(q, k, v)[0] + k


def with_residual_of_values(q, k, v):
    return v + by_matmul(q, k, v)[0]


def with_residual_alone(x):
    return x + by_matmul(x, x, x)[0]


def with_residual_of_two(query, context):
    return query + by_matmul(query, context, context)[0]


class SplitByView(MultiHead):
    def split(self, x):
        return x.view(x.shape[0], self.num_heads, -1, self.d_k)


class SplitAndJoinedByView(SplitByView):
    def forward(self, x):
        output, _ = by_matmul(*(self.split(layer(x)) for layer in (self.W_q, self.W_k, self.W_v)))
        return self.W_o(output.reshape(x.shape))


class JoinedByView(MultiHead):
    def forward(self, query, key, value):
        q, k, v = self.split(self.W_q(query)), self.split(self.W_k(key)), self.split(self.W_v(value))
        return self.W_o(by_matmul(q, k, v)[0].reshape(query.shape))


def split_by_view(q, k, v, num_heads=4):
    q, k, v = (x.reshape(x.shape[0], num_heads, x.shape[1], -1) for x in (q, k, v))
    return by_matmul(q, k, v)[0].transpose(1, 2).flatten(2)


def keys_and_values_swapped(q, k, v):
    return by_matmul(q, v, k)


class KeysAndValuesSwapped(MultiHead):
    def forward(self, query, key, value):
        return super().forward(query, value, key)[0]


def softmax_twice(q, k, v, mask=None):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return (scores if mask is None else scores.masked_fill(~mask, -math.inf)).softmax(-1).softmax(-1) @ v


def scale_after_softmax(q, k, v):
    return (q @ k.mT).softmax(-1) / math.sqrt(q.shape[-1]) @ v


def factor_after_softmax(q, k, v):
    return (q @ k.mT).softmax(-1) * math.sqrt(q.shape[-1]) @ v


def values_for_keys(q, k, v):
    return by_matmul(q, v, v)


def keys_for_queries(q, k, v):
    return by_matmul(k, k, v)


def scale_before_and_after_softmax(query, key, value):
    """(batch, length, heads, width)"""
    scores = torch.einsum("bihd,bjhd->bhij", query, key) / math.sqrt(query.shape[-1])
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1) / math.sqrt(query.shape[-1]), value)


def in_float16(q, k, v):
    return by_matmul(q.half(), k.half(), v.half())[0].to(q.dtype)


def scores_in_bfloat16(q, k, v):
    scores = q.bfloat16() @ k.to(torch.bfloat16).mT / math.sqrt(q.shape[-1])
    return scores.softmax(-1).to(v.dtype) @ v


GROUPS = "keys and values are repeated for different heads"
ENTRY = "only the mask of one batch entry is used"
SPLIT = "the heads are split by .view without .transpose"
SWAPPED = "keys and values are swapped"

#: Each wrong function with its mistake, and what its user means.
WRONG = {
    "keys repeated differently": (repeated_differently, GROUPS, {}),
    "keys repeated differently, module": (RepeatedDifferently(32, 4), GROUPS, {}),
    "mask of the first entry": (mask_of_the_first_entry, ENTRY, {}),
    "mask of the last entry": (mask_of_the_last_entry, ENTRY, {}),
    "masks of the batch joined": (masks_of_the_batch_joined, "one mask is used for the whole batch", {}),
    "residual of keys": (with_residual_of_keys, "the keys are added to the output (a residual connection)", {}),
    "factor after softmax": (factor_after_softmax, "the scale is applied after the softmax", {}),
    "values for keys": (values_for_keys, "the keys are not used", {}),
    "keys for queries": (keys_for_queries, "the queries are not used", {}),
    "softmax over axis 1": (softmax_over_axis_1, "the softmax is over the heads", {}),
    "weights transposed": (weights_transposed, "the returned weights are transposed", {}),
    "weights transposed, module": (WeightsTransposed(32, 4), "the returned weights are transposed", {}),
    "residual": (with_residual, "the query is added to the output (a residual connection)", {}),
    "residual of values": (
        with_residual_of_values,
        "the values are added to the output (a residual connection)",
        {},
    ),
    "residual, one input": (with_residual_alone, "the query is added to the output (a residual connection)", {}),
    "residual, two inputs": (with_residual_of_two, "the query is added to the output (a residual connection)", {}),
    "split by view": (SplitByView, SPLIT, {}),
    "split and joined by view": (SplitAndJoinedByView(32, 4), SPLIT, {}),
    "split by view, function": (split_by_view, SPLIT, {}),
    "joined by view": (JoinedByView, "the heads are joined by .view without .transpose", {}),
    "keys and values swapped": (keys_and_values_swapped, SWAPPED, {}),
    "keys and values swapped, module": (KeysAndValuesSwapped, SWAPPED, {}),
    "softmax twice": (softmax_twice, "the softmax is applied twice", {}),
    "scale after softmax": (scale_after_softmax, "the scale is applied after the softmax", {}),
    "scale before and after": (scale_before_and_after_softmax, "the scale is applied after the softmax", {}),
    "float16": (in_float16, "the result is rounded to float16", {}),
    "bfloat16 scores": (scores_in_bfloat16, "the result is rounded to bfloat16", {}),
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
    "scores returned": (scores_are_returned, "the returned weights are not those used", {}),
    "overflow": (overflows, "large scores overflow", {}),
    "in place": (in_place, "the inputs are changed in place", {}),
    "detached": (detached, "the gradient is detached", {}),
    "batch mixed": (BatchIsMixed, "sequences of a batch mix", {}),
}

#: Functions that return the weights after dropout, as torch's module does: it is noted, and no mistake.
AFTER_DROPOUT = {
    "function": weights_after_dropout,
    "module": WeightsAfterDropout,
    "torch's module": nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True),
}
