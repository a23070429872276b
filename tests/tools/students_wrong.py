"""Wrong solutions of attention exercises, each with one mistake, its reference and the words that name the step."""

import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


def seeded(factory, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return factory()


# scaled dot-product attention


def unscaled(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1), dim=-1) @ v


def scaled_by_width(query, key, value):
    scores = torch.einsum("...id,...jd->...ij", query, key) / query.shape[-1]
    weights = scores.softmax(-1)
    return weights @ value, weights


def scaled_by_length(q, k, v):
    scores = q @ k.mT / math.sqrt(k.shape[-2])
    return F.softmax(scores, dim=-1) @ v


def scaled_by_heads(q, k, v):
    _, heads, _, _ = q.shape
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(heads)
    return torch.matmul(scores.softmax(dim=-1), v)


def scaled_upwards(Q, K, V):
    S = Q @ np.swapaxes(K, -1, -2) * np.sqrt(Q.shape[-1])
    A = np.exp(S - S.max(axis=-1, keepdims=True))
    return A / A.sum(axis=-1, keepdims=True) @ V


def scaled_after_softmax(q, k, v):
    weights = torch.softmax(q @ k.transpose(-2, -1), dim=-1) / math.sqrt(q.size(-1))
    return weights @ v


def softmax_over_queries(q, k, v):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    weights = torch.softmax(scores, dim=-2)
    return weights @ v


def matrices_summed_over_queries(Q, K, V):
    scores = Q @ K.T / np.sqrt(Q.shape[-1])
    weights = np.exp(scores) / np.exp(scores).sum(0, keepdims=True)
    return weights @ V


def sum_over_queries(q, k, v):
    s = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-2, keepdims=True) @ v


def softmax_over_heads(q, k, v):
    _, _, _, d = q.shape
    scores = q @ k.transpose(-2, -1) / math.sqrt(d)
    weights = F.softmax(scores, dim=1)
    return weights @ v


def softmax_twice(q, k, v):
    attn = F.softmax(q @ k.mT * q.size(-1) ** -0.5, dim=-1)
    return F.softmax(attn, dim=-1) @ v


def sigmoid_weights(queries, keys, values):
    scores = torch.bmm(queries, keys.transpose(1, 2)) / queries.size(2) ** 0.5
    return torch.bmm(torch.sigmoid(scores), values)


def exponentials_without_a_sum(q, k, v):
    s = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    return torch.exp(s - s.max(-1, keepdim=True).values) @ v


def sum_over_everything(Q, K, V):
    S = np.einsum("...id,...jd->...ij", Q, K) / np.sqrt(Q.shape[-1])
    E = np.exp(S - S.max(axis=-1, keepdims=True))
    return (E / E.sum()) @ V


def global_maximum(q, k, v):
    s = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    e = torch.exp(s - s.max())
    return e / e.sum(-1, keepdim=True) @ v


def no_maximum(q, k, v):
    e = torch.exp(torch.einsum("...id,...jd->...ij", q, k) / math.sqrt(q.shape[-1]))
    weights = e / e.sum(-1, keepdim=True)
    return torch.einsum("...ij,...jd->...id", weights, v)


def linear_normalisation(q, k, v):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    shifted = scores - scores.min(dim=-1, keepdim=True).values
    return shifted / shifted.sum(-1, keepdim=True) @ v


def hardest_key(q, k, v):
    scores = q @ k.mT / math.sqrt(q.size(-1))
    weights = F.one_hot(scores.argmax(-1), k.size(-2)).to(v)
    return weights @ v, weights


def relu_scores(q, k, v):
    scores = F.relu(q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
    return scores.softmax(-1) @ v


def absolute_scores(q, k, v):
    outputs = []
    for query in q:
        scores = torch.stack([torch.dot(query, key).abs() for key in k]) / q.shape[1] ** 0.5
        outputs.append(torch.softmax(scores, 0) @ v)
    return torch.stack(outputs)


def clipped_scores(q, k, v):
    scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).clamp(-5, 5)
    return scores.softmax(-1) @ v


def normalised_queries(q, k, v):
    q = F.normalize(q, dim=-1)
    weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), -1)
    return weights @ v


def keys_with_keys(q, k, v):
    scores = torch.matmul(k, k.transpose(-2, -1)) / math.sqrt(k.size(-1))
    return torch.matmul(F.softmax(scores, dim=-1), v)


def distances(q, k, v):
    scores = -torch.cdist(q, k) / math.sqrt(q.shape[-1])
    return torch.softmax(scores, dim=-1) @ v


def last_key_dropped(q, k, v):
    n = k.shape[-2] - 1
    scores = q @ k[..., :n, :].transpose(-2, -1) / math.sqrt(q.shape[-1])
    return scores.softmax(-1) @ v[..., :n, :]


def first_key_twice(q, k, v):
    k = torch.cat([k[..., :1, :], k], dim=-2)
    v = torch.cat([v[..., :1, :], v], dim=-2)
    return F.scaled_dot_product_attention(q, k, v)


def only_sixteen_keys(q, k, v):
    k, v = k[..., :16, :], v[..., :16, :]
    return torch.softmax(q @ k.mT / q.size(-1) ** 0.5, -1) @ v


def window_of_sixteen(q, k, v):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    i, j = torch.arange(q.shape[-2]), torch.arange(k.shape[-2])
    scores = scores.masked_fill((i[:, None] - j[None, :]).abs() >= 16, float("-inf"))
    return scores.softmax(-1) @ v


def diagonal_removed(q, k, v):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    itself = torch.eye(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
    return torch.softmax(scores.masked_fill(itself, float("-inf")), dim=-1) @ v


def keys_of_the_first_example(q, k, v):
    scores = q @ k[0].transpose(-2, -1) / math.sqrt(q.shape[-1])
    return scores.softmax(-1) @ v


def mean_of_values(q, k, v):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    weights = scores.softmax(-1)
    return v.mean(-2, keepdim=True).expand(*q.shape[:-1], v.shape[-1]), weights


def shifted_values(q, k, v):
    weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), dim=-1)
    return weights @ torch.roll(v, 1, dims=-2)


def keys_as_values(q, k, v):
    weights = F.softmax(torch.einsum("...id,...jd->...ij", q, k) / q.shape[-1] ** 0.5, dim=-1)
    return torch.einsum("...ij,...jd->...id", weights, k)


def transposed_weights(q, k, v):
    weights = F.softmax(torch.einsum("...id,...jd->...ij", q, k) / q.shape[-1] ** 0.5, dim=-1)
    return torch.einsum("...ji,...jd->...id", weights, v)


class AveragedContext(nn.Module):
    def forward(self, q, k, v):
        weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), dim=-1)
        return weights @ v / v.shape[-2]


# causal dot-product attention


def causal_reversed(q, k, v):
    n = q.shape[-2]
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    mask = torch.tril(torch.ones(n, n, dtype=torch.bool, device=q.device), diagonal=-1)
    return scores.masked_fill(mask, float("-inf")).softmax(-1) @ v


def causal_without_itself(q, k, v):
    t = q.size(-2)
    hidden = torch.triu(torch.ones(t, t, device=q.device), diagonal=0)
    scores = q @ k.mT / math.sqrt(q.size(-1)) - 1e9 * hidden
    return F.softmax(scores, dim=-1) @ v


def causal_one_ahead(q, k, v):
    rows = []
    for t in range(q.shape[-2]):
        past_k, past_v = k[..., : t + 2, :], v[..., : t + 2, :]
        w = torch.softmax(past_k @ q[..., t, :, None] / math.sqrt(q.shape[-1]), -2)
        rows.append((w * past_v).sum(-2))
    return torch.stack(rows, dim=-2)


def causal_forgotten(q, k, v):
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
    weights = F.softmax(scores, dim=-1)
    return torch.matmul(weights, v), weights


def causal_zero_scores(q, k, v):
    n = q.shape[-2]
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    scores = scores * torch.tril(torch.ones(n, n, dtype=q.dtype, device=q.device))
    return scores.softmax(-1) @ v


def causal_after_softmax(q, k, v):
    n = q.shape[-2]
    weights = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1)
    weights = weights.masked_fill(torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1), 0.0)
    return weights @ v


def causal_unscaled(query, key, value):
    n = query.shape[-2]
    bias = torch.full((n, n), float("-inf"), dtype=query.dtype).triu(1)
    return torch.softmax(query @ key.transpose(-2, -1) + bias, -1) @ value


def causal_sixteen_back(q, k, v):
    n = q.shape[-2]
    i = torch.arange(n)
    seen = (i[None, :] <= i[:, None]) & (i[None, :] > i[:, None] - 16)
    scores = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ v


def causal_softmax_down(q, k, v):
    scores = np.einsum("...id,...jd->...ij", q, k) / np.sqrt(q.shape[-1])
    i, j = np.indices(scores.shape[-2:])
    scores = np.where(j > i, -1e9, scores)
    e = np.exp(scores - scores.max(-2, keepdims=True))
    return np.einsum("...ij,...jd->...id", e / e.sum(-2, keepdims=True), v)


def causal_running_mean(q, k, v):
    return torch.cumsum(v, dim=-2) / torch.arange(1, v.shape[-2] + 1, dtype=v.dtype)[:, None]


# Luong attention


def luong_dot_scaled(decoder_hidden, encoder_outputs):
    scores = torch.bmm(encoder_outputs, decoder_hidden.unsqueeze(2)).squeeze(2) / encoder_outputs.size(2) ** 0.5
    weights = F.softmax(scores, dim=1)
    return torch.bmm(weights.unsqueeze(1), encoder_outputs).squeeze(1), weights


def luong_dot_over_batch(decoder_hidden, encoder_outputs):
    energy = torch.sum(decoder_hidden[:, None, :] * encoder_outputs, dim=2)
    alpha = F.softmax(energy, dim=0)
    return (alpha[:, :, None] * encoder_outputs).sum(dim=1), alpha


def luong_dot_last_state(decoder_hidden, encoder_outputs):
    query = encoder_outputs[:, -1]
    a = torch.einsum("bd,bnd->bn", query, encoder_outputs).softmax(-1)
    return torch.einsum("bn,bnd->bd", a, encoder_outputs)


def luong_dot_tanh(query, keys):
    a = torch.tanh(torch.einsum("bd,bnd->bn", query, keys)).softmax(-1)
    return torch.einsum("bn,bnd->bd", a, keys)


def luong_dot_plus(hidden, encoder_outputs):
    energy = torch.sum(hidden[:, None, :] + encoder_outputs, dim=2)
    alpha = torch.softmax(energy, dim=1)
    return (alpha[:, :, None] * encoder_outputs).sum(dim=1), alpha


def luong_dot_query_context(query, keys):
    weights = torch.softmax((keys @ query.unsqueeze(-1)).squeeze(-1), dim=-1)
    return (weights.unsqueeze(-1) * query.unsqueeze(1)).sum(1), weights


def values_before_the_cache(q, k, v):
    keys, values, rows = k[..., :0, :], v[..., :0, :], []
    for t in range(q.shape[-2]):
        keys = torch.cat([keys, k[..., t : t + 1, :]], dim=-2)
        values = torch.cat([v[..., t : t + 1, :], values], dim=-2)
        weights = torch.softmax(q[..., t : t + 1, :] @ keys.mT / math.sqrt(q.shape[-1]), dim=-1)
        rows.append(weights @ values)
    return torch.cat(rows, dim=-2)


def keys_before_the_cache(q, k, v):
    keys, values, rows = k[..., :0, :], v[..., :0, :], []
    for t in range(q.shape[-2]):
        keys, values = torch.cat([k[..., t, None, :], keys], -2), torch.cat([values, v[..., t, None, :]], -2)
        rows.append(F.softmax(q[..., t, None, :] @ keys.mT * q.shape[-1] ** -0.5, -1) @ values)
    return torch.cat(rows, dim=-2)


class GeneralBothProjected(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.attn = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, decoder_hidden, encoder_outputs):
        scores = torch.bmm(self.attn(encoder_outputs), self.attn(decoder_hidden).unsqueeze(2)).squeeze(2)
        weights = F.softmax(scores, dim=-1)
        return (weights.unsqueeze(1) @ encoder_outputs).squeeze(1), weights


class GeneralProjectedContext(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.attn = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, decoder_hidden, encoder_outputs):
        energy = self.attn(encoder_outputs)
        weights = F.softmax(torch.bmm(energy, decoder_hidden.unsqueeze(2)).squeeze(2), dim=-1)
        return (weights.unsqueeze(1) @ energy).squeeze(1), weights


class GeneralTanh(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.W = nn.Parameter(torch.randn(dim, dim) * 0.3)

    def forward(self, query, keys):
        projected = torch.tanh(keys @ self.W.T)
        a = torch.softmax(torch.einsum("bd,bnd->bn", query, projected), dim=-1)
        return torch.einsum("bn,bnd->bd", a, keys)


class GeneralUnusedMatrix(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.W = nn.Parameter(torch.randn(dim, dim) * 0.3)

    def forward(self, query, keys):
        query @ self.W
        a = torch.softmax(torch.einsum("bd,bnd->bn", query, keys), dim=-1)
        return torch.einsum("bn,bnd->bd", a, keys)


class GeneralUnusedState(nn.Module):
    def __init__(self, units):
        super().__init__()
        self.W = nn.Linear(units, units, bias=False)

    def forward(self, state, encoder_outputs):
        scores = (self.W(encoder_outputs) * encoder_outputs).sum(-1)
        weights = torch.softmax(scores, dim=1)
        return (weights[:, :, None] * encoder_outputs).sum(1), weights


class GeneralSigmoid(nn.Module):
    def __init__(self, units):
        super().__init__()
        self.W = nn.Linear(units, units, bias=False)

    def forward(self, query, keys):
        weights = torch.sigmoid(torch.bmm(self.W(query)[:, None], keys.mT))
        return (weights @ keys).squeeze(1)


class ConcatWithoutTanh(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.attn = nn.Linear(hidden_size * 2, hidden_size)
        self.v = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, decoder_hidden, encoder_outputs):
        repeated = decoder_hidden.unsqueeze(1).repeat(1, encoder_outputs.size(1), 1)
        energy = self.attn(torch.cat((repeated, encoder_outputs), dim=2))
        weights = F.softmax(self.v(energy).squeeze(2), dim=1)
        return torch.bmm(weights.unsqueeze(1), encoder_outputs).squeeze(1), weights


class ConcatEncoderTwice(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.attn = nn.Linear(hidden_size * 2, hidden_size)
        self.v = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, decoder_hidden, encoder_outputs):
        energy = torch.tanh(self.attn(torch.cat((encoder_outputs, encoder_outputs), dim=2)))
        weights = F.softmax(self.v(energy).squeeze(2), dim=1)
        return torch.bmm(weights.unsqueeze(1), encoder_outputs).squeeze(1), weights


class ConcatRelu(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.W = nn.Parameter(torch.randn(2 * d, d) * 0.2)
        self.v = nn.Parameter(torch.randn(d))

    def forward(self, query, keys):
        pairs = torch.cat([query[:, None].expand_as(keys), keys], -1)
        alpha = ((pairs @ self.W).relu() @ self.v).softmax(-1)
        return (alpha.unsqueeze(-1) * keys).sum(1)


class ConcatSummed(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.W = nn.Linear(2 * d, d)
        self.v = nn.Parameter(torch.randn(d))

    def forward(self, query, keys):
        pairs = torch.cat([query[:, None].expand_as(keys), keys], -1)
        alpha = torch.tanh(self.W(pairs)).sum(-1).softmax(-1)
        return torch.einsum("bn,bnd->bd", alpha, keys), alpha


class ConcatMeanContext(nn.Module):
    def __init__(self, units):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 * units, units), nn.Tanh(), nn.Linear(units, 1, bias=False))

    def forward(self, hidden, encoder_outputs):
        n = encoder_outputs.shape[1]
        scores = [self.net(torch.cat([hidden, encoder_outputs[:, t]], dim=1)) for t in range(n)]
        weights = torch.softmax(torch.cat(scores, dim=1), dim=1)
        return encoder_outputs.mean(dim=1), weights


# Bahdanau attention


class AdditiveWithoutTanh(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.Wa = nn.Linear(hidden_size, hidden_size)
        self.Ua = nn.Linear(hidden_size, hidden_size)
        self.Va = nn.Linear(hidden_size, 1)

    def forward(self, query, keys):
        scores = self.Va(self.Wa(query.unsqueeze(1)) + self.Ua(keys))
        weights = F.softmax(scores.squeeze(2), dim=-1)
        return torch.bmm(weights.unsqueeze(1), keys).squeeze(1), weights


class AdditiveBatchOfContexts(nn.Module):
    def __init__(self, width=16, hidden=24):
        super().__init__()
        self.W, self.U = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.v = nn.Linear(hidden, 1, bias=False)

    def forward(self, state, encoder_states):
        weights = self.v(torch.tanh(self.W(state) + self.U(encoder_states))).squeeze(-1).softmax(-1)
        return weights @ encoder_states, weights


class AdditiveTanhOfEach(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.Wa = nn.Linear(hidden_size, hidden_size)
        self.Ua = nn.Linear(hidden_size, hidden_size)
        self.Va = nn.Linear(hidden_size, 1)

    def forward(self, query, keys):
        scores = self.Va(torch.tanh(self.Wa(query.unsqueeze(1))) + torch.tanh(self.Ua(keys)))
        weights = F.softmax(scores.squeeze(2), dim=-1)
        return torch.bmm(weights.unsqueeze(1), keys).squeeze(1), weights


class AdditiveProduct(nn.Module):
    def __init__(self, d, units):
        super().__init__()
        self.W1 = nn.Parameter(torch.randn(d, units) / d**0.5)
        self.W2 = nn.Parameter(torch.randn(d, units) / d**0.5)
        self.v = nn.Parameter(torch.randn(units))

    def forward(self, decoder_hidden, encoder_outputs):
        e = torch.tanh((decoder_hidden @ self.W1)[:, None] * (encoder_outputs @ self.W2)) @ self.v
        return torch.einsum("bn,bnd->bd", e.softmax(1), encoder_outputs)


class AdditiveUnusedState(nn.Module):
    def __init__(self, dec_dim, enc_dim, attn_dim):
        super().__init__()
        self.dec_proj = nn.Linear(dec_dim, attn_dim, bias=False)
        self.enc_proj = nn.Linear(enc_dim, attn_dim)
        self.energy = nn.Linear(attn_dim, 1, bias=False)

    def forward(self, state, annotations):
        alpha = torch.softmax(self.energy(torch.tanh(self.enc_proj(annotations))), dim=1)
        return (alpha * annotations).sum(dim=1), alpha.squeeze(-1)


class AdditiveSigmoid(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.W_q = nn.Linear(d, d, bias=False)
        self.W_k = nn.Linear(d, d, bias=False)
        self.w_v = nn.Linear(d, 1, bias=False)

    def forward(self, query, keys):
        weights = torch.sigmoid(self.w_v(torch.tanh(self.W_q(query)[:, None] + self.W_k(keys))))
        return (weights * keys).sum(1), weights.squeeze(-1)


class AdditiveProjectedContext(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.W_q = nn.Linear(d, d, bias=False)
        self.W_k = nn.Linear(d, d, bias=False)
        self.w_v = nn.Linear(d, 1, bias=False)

    def forward(self, query, keys):
        keys = self.W_k(keys)
        weights = F.softmax(self.w_v(torch.tanh(self.W_q(query)[:, None] + keys)).squeeze(-1), dim=-1)
        return torch.bmm(weights[:, None], keys)[:, 0], weights


class AdditiveSoftmaxOfOne(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.query_layer = nn.Linear(d, d)
        self.key_layer = nn.Linear(d, d)
        self.energy_layer = nn.Linear(d, 1, bias=False)

    def forward(self, query, keys):
        scores = self.energy_layer(torch.tanh(self.query_layer(query).unsqueeze(1) + self.key_layer(keys)))
        weights = F.softmax(scores, dim=-1)
        return (weights * keys).sum(dim=1), weights.squeeze(2)


class AdditiveManyQueries(nn.Module):
    def __init__(self, num_hiddens):
        super().__init__()
        self.W_k = nn.Linear(num_hiddens, num_hiddens, bias=False)
        self.W_q = nn.Linear(num_hiddens, num_hiddens, bias=False)
        self.w_v = nn.Linear(num_hiddens, 1, bias=False)

    def forward(self, queries, keys, values):
        features = torch.tanh(self.W_q(queries).unsqueeze(2) + self.W_k(keys).unsqueeze(1))
        weights = F.softmax(self.w_v(features).squeeze(-1), dim=1)
        return torch.bmm(weights, values)


# multi-head attention


class HeadsByView(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h, self.d_k = num_heads, d_model // num_heads
        self.W_q, self.W_k = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.W_v, self.W_o = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def forward(self, Q, K, V):
        b, n, d = Q.shape
        q = self.W_q(Q).view(b, self.h, n, self.d_k)
        k = self.W_k(K).view(b, self.h, K.size(1), self.d_k)
        v = self.W_v(V).view(b, self.h, V.size(1), self.d_k)
        attn = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(self.d_k), dim=-1)
        return self.W_o((attn @ v).transpose(1, 2).reshape(b, n, d))


class MergedByView(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h, self.d_k = num_heads, d_model // num_heads
        self.W_q, self.W_k = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.W_v, self.W_o = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def split(self, x):
        return x.view(x.size(0), x.size(1), self.h, self.d_k).transpose(1, 2)

    def forward(self, Q, K, V):
        q, k, v = self.split(self.W_q(Q)), self.split(self.W_k(K)), self.split(self.W_v(V))
        attn = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(self.d_k), dim=-1)
        return self.W_o((attn @ v).contiguous().view(Q.shape))


class ScaledByModelWidth(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.scale = dim**-0.5
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        attn = (q @ k.transpose(-2, -1) * self.scale).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))


class UnscaledHead(nn.Module):
    def __init__(self, d_in, d_head):
        super().__init__()
        self.query = nn.Linear(d_in, d_head, bias=False)
        self.key = nn.Linear(d_in, d_head, bias=False)
        self.value = nn.Linear(d_in, d_head, bias=False)

    def forward(self, x):
        return F.softmax(self.query(x) @ self.key(x).transpose(1, 2), dim=-1) @ self.value(x)


class UnscaledHeads(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.heads = nn.ModuleList([UnscaledHead(d_model, d_model // n_heads) for _ in range(n_heads)])
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


class ZeroedHead(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.h = num_heads
        self.q_proj, self.k_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)
        self.v_proj, self.out_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (self.h, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        heads = torch.zeros_like(q)
        for i in range(1, self.h):
            heads[:, i] = F.scaled_dot_product_attention(q[:, i], k[:, i], v[:, i])
        return self.out_proj(heads.transpose(1, 2).flatten(2))


class HalfOfTheHeads(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        d_head = d_model // heads
        self.heads = heads
        self.wq = nn.Parameter(torch.randn(heads, d_model, d_head) * d_model**-0.5)
        self.wk = nn.Parameter(torch.randn(heads, d_model, d_head) * d_model**-0.5)
        self.wv = nn.Parameter(torch.randn(heads, d_model, d_head) * d_model**-0.5)
        self.wo = nn.Parameter(torch.randn(heads, d_head, d_model) * d_model**-0.5)

    def forward(self, x):
        out = torch.zeros_like(x)
        for h in range(self.heads // 2):
            q, k, v = x @ self.wq[h], x @ self.wk[h], x @ self.wv[h]
            a = torch.softmax(q @ k.transpose(1, 2) / q.size(-1) ** 0.5, dim=-1)
            out = out + a @ v @ self.wo[h]
        return out


class SwappedKeyValue(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.value, self.out = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def forward(self, x):
        b, n, d = x.shape
        q = self.query(x).view(b, n, self.num_heads, -1).transpose(1, 2)
        k = self.value(x).view(b, n, self.num_heads, -1).transpose(1, 2)
        v = self.key(x).view(b, n, self.num_heads, -1).transpose(1, 2)
        attn = torch.softmax(q @ k.mT / math.sqrt(d // self.num_heads), dim=-1)
        return self.out((attn @ v).transpose(1, 2).reshape(b, n, d))


class KeysByTheQueryProjection(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.value, self.out = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def forward(self, x):
        b, n, d = x.shape
        q = self.query(x).view(b, n, self.num_heads, -1).transpose(1, 2)
        k = self.query(x).view(b, n, self.num_heads, -1).transpose(1, 2)
        v = self.value(x).view(b, n, self.num_heads, -1).transpose(1, 2)
        attn = torch.softmax(q @ k.mT / math.sqrt(d // self.num_heads), dim=-1)
        return self.out((attn @ v).transpose(1, 2).reshape(b, n, d))


class NoOutputProjection(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class BiasOfTheOutputAlone(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x):
        linears = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (F.linear(x, one.weight).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for one in linears)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class SoftmaxAcrossHeads(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.W_q, self.W_k = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.W_v, self.W_o = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def forward(self, query, key, value):
        q, k, v = self.W_q(query), self.W_k(key), self.W_v(value)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)) for t in (q, k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.size(-1) ** 0.5
        weights = torch.softmax(scores, dim=1)
        return self.W_o(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2))


class AveragedHeads(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        heads = F.scaled_dot_product_attention(q, k, v)
        mean = heads.mean(dim=1, keepdim=True).expand_as(heads)
        return self.proj(mean.transpose(1, 2).flatten(2))


# causal multi-head attention


class CausalByModelWidth(nn.Module):
    def __init__(self, n_embd, n_head, block_size=128):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        att = (q @ k.transpose(-2, -1)) / math.sqrt(C)
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = (F.softmax(att, dim=-1) @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class CausalNotAssigned(nn.Module):
    def __init__(self, n_embd, n_head, block_size=128, dropout=0.1):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = (self.dropout(F.softmax(att, dim=-1)) @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class FutureHead(nn.Module):
    def __init__(self, n_embd, head_size):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)

    def forward(self, x):
        T = x.shape[1]
        wei = self.query(x) @ self.key(x).transpose(-2, -1) * self.key.out_features**-0.5
        wei = wei.masked_fill(torch.triu(torch.ones(T, T)) == 0, float("-inf"))
        return F.softmax(wei, dim=-1) @ self.value(x)


class FutureHeads(nn.Module):
    def __init__(self, n_embd, num_heads):
        super().__init__()
        self.heads = nn.ModuleList([FutureHead(n_embd, n_embd // num_heads) for _ in range(num_heads)])
        self.proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        return self.proj(torch.cat([h(x) for h in self.heads], dim=-1))


class StrictlyPast(nn.Module):
    def __init__(self, d_model, nhead):
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, nhead, batch_first=True)

    def forward(self, x):
        n = x.size(1)
        mask = torch.triu(torch.full((n, n), -1e9, dtype=x.dtype, device=x.device), diagonal=0)
        return self.attn(x, x, x, attn_mask=mask)[0]


class FirstHeadMasked(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        n = x.size(1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        mask = torch.ones(self.heads, n, n, dtype=torch.bool, device=x.device)
        mask[0] = mask[0].tril()
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.to_out(out.transpose(1, 2).flatten(2))


class CausalWithoutProjection(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class CausalHeadsByView(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.o = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (p(x).reshape(b, self.heads, n, d // self.heads) for p in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.reshape(b, n, d))


# encoder block


class EncoderWithoutResidual(nn.Module):
    def __init__(self, d_model, heads, d_ff):
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, heads, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x):
        x = self.norm1(self.attn(x, x, x)[0])
        return self.norm2(x + self.fc2(torch.relu(self.fc1(x))))


class EncoderWithoutSecondResidual(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return self.mlp(self.norm2(x))


class EncoderResidualOfTheNorm(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = self.norm1(x)
        x = x + self.attn(x, x, x)[0]
        x = x + self.mlp(self.norm2(x))
        return x


class EncoderPooledFeedForward(nn.Module):
    def __init__(self, d_model, heads, d_ff):
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, heads, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x):
        x = self.norm1(x + self.attn(x, x, x)[0])
        return self.norm2(x + self.ff(x.mean(dim=1, keepdim=True)))


class EncoderNormOverTokens(nn.Module):
    def __init__(self, size, heads, hidden):
        super().__init__()
        self.attn = nn.MultiheadAttention(size, heads, batch_first=True)
        self.up, self.down = nn.Linear(size, hidden), nn.Linear(hidden, size)

    def norm(self, x):
        mean = x.mean(dim=1, keepdim=True)
        var = x.var(dim=1, keepdim=True, unbiased=False)
        return (x - mean) / torch.sqrt(var + 1e-5)

    def forward(self, x):
        x = self.norm(x + self.attn(x, x, x)[0])
        return self.norm(x + self.down(F.relu(self.up(x))))


class EncoderWithoutActivation(nn.Module):
    def __init__(self, size, heads, hidden):
        super().__init__()
        self.attn = nn.MultiheadAttention(size, heads, batch_first=True)
        self.up, self.down = nn.Linear(size, hidden), nn.Linear(hidden, size)
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        x = self.norm1(x + self.dropout(self.attn(x, x, x)[0]))
        return self.norm2(x + self.dropout(self.down(self.up(x))))


class EncoderWithoutLastNorm(nn.Module):
    def __init__(self, d_model, heads, d_ff):
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, heads, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x):
        x = self.norm1(x + self.attn(x, x, x)[0])
        return x + self.ff(x)


class EncoderFeedForwardForgotten(nn.Module):
    def __init__(self, d_model, heads, d_ff):
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, heads, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x):
        x = self.norm1(x + self.attn(x, x, x)[0])
        self.ff(x)
        return self.norm2(x)


class EncoderUnscaled(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def attention(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return self.proj(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


# causal block


class BlockWithoutMask(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = nn.MultiheadAttention(n_embd, n_head, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        h = self.ln_1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class BlockWithReversedMask(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = nn.MultiheadAttention(n_embd, n_head, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        h, T = self.ln_1(x), x.size(1)
        mask = torch.tril(torch.ones(T, T, device=x.device), diagonal=-1).bool()
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class BlockWithoutResidual(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.fc_in, self.fc_out = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def attn(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.c_attn(x).split(x.size(-1), dim=-1))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, x):
        x = self.attn(self.ln_1(x))
        x = x + self.fc_out(F.gelu(self.fc_in(self.ln_2(x))))
        return x


class BlockWithoutActivation(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim), nn.Dropout(0.1))

    def attn(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.c_attn(x).split(x.size(-1), dim=-1))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class BlockWithOneNorm(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.sa = nn.MultiheadAttention(n_embd, n_head, batch_first=True)
        self.ffwd = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.ReLU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        h = self.ln1(x)
        future = nn.Transformer.generate_square_subsequent_mask(x.size(1)).to(x)
        x = x + self.sa(h, h, h, attn_mask=future, need_weights=False)[0]
        return x + self.ffwd(x)


class BlockFeedForwardOfNeighbours(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.sa = nn.MultiheadAttention(n_embd, n_head, batch_first=True)
        self.ffwd = nn.Sequential(nn.Linear(n_embd, 2 * n_embd), nn.ReLU(), nn.Linear(2 * n_embd, n_embd))

    def forward(self, x):
        h = self.ln1(x)
        future = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).triu(1)
        x = x + self.sa(h, h, h, attn_mask=future, need_weights=False)[0]
        return x + self.ffwd(torch.roll(self.ln2(x), -1, dims=1))


# decoder block


class DecoderCrossToItself(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln1, self.ln2, self.ln3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.masked = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.cross = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, memory):
        future = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).triu(1)
        h = self.ln1(x)
        x = x + self.masked(h, h, h, attn_mask=future)[0]
        h = self.ln2(x)
        x = x + self.cross(h, h, h)[0]
        return x + self.mlp(self.ln3(x))


class DecoderFirstWord(nn.Module):
    def __init__(self, d_model, heads, d_ff):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(d_model, heads, dropout=0.1, batch_first=True)
        self.cross_attn = nn.MultiheadAttention(d_model, heads, dropout=0.1, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(d_model), nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x, memory):
        mask = torch.triu(torch.full((x.size(1), x.size(1)), float("-inf"), dtype=x.dtype), diagonal=1)
        x = self.norm1(x + self.self_attn(x, x, x, attn_mask=mask)[0])
        x = self.norm2(x + self.cross_attn(x, memory[:, :1], memory[:, :1])[0])
        return self.norm3(x + self.ff(x))


class DecoderCrossWithoutResidual(nn.Module):
    def __init__(self, d_model, heads, d_ff):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(d_model, heads, dropout=0.1, batch_first=True)
        self.cross_attn = nn.MultiheadAttention(d_model, heads, dropout=0.1, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(d_model), nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x, memory):
        mask = torch.triu(torch.full((x.size(1), x.size(1)), float("-inf"), dtype=x.dtype), diagonal=1)
        x = self.norm1(x + self.self_attn(x, x, x, attn_mask=mask)[0])
        x = self.norm2(self.cross_attn(x, memory, memory)[0])
        return self.norm3(x + self.ff(x))


class DecoderWithoutCross(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln1, self.ln2, self.ln3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.masked = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.cross = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, x, memory):
        future = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).triu(1)
        h = self.ln1(x)
        x = x + self.masked(h, h, h, attn_mask=future)[0]
        return x + self.mlp(self.ln3(x))


class DecoderCausalCross(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln1, self.ln2, self.ln3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.masked = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.cross = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, x, memory):
        future = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).triu(1)
        h = self.ln1(x)
        x = x + self.masked(h, h, h, attn_mask=future)[0]
        ahead = torch.ones(x.size(1), memory.size(1), dtype=torch.bool, device=x.device).triu(1)
        x = x + self.cross(self.ln2(x), memory, memory, attn_mask=ahead)[0]
        return x + self.mlp(self.ln3(x))


# positions


class SinusoidsOfMaxLen(nn.Module):
    def __init__(self, d_model, dropout=0.1, max_len=512):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / max_len))
        pe = torch.zeros(1, max_len, d_model)
        pe[0, :, 0::2] = torch.sin(position * div_term)
        pe[0, :, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe)

    def forward(self, x):
        x = x + self.pe[:, : x.size(1)]
        return self.dropout(x)


class SinusoidsOfBaseThousand(nn.Module):
    def __init__(self, d_model, max_len=512):
        super().__init__()
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(1000.0) / d_model))
        pe = torch.zeros(1, max_len, d_model)
        pe[0, :, 0::2] = torch.sin(position * div_term)
        pe[0, :, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe)

    def forward(self, x):
        return x + self.pe[:, : x.size(1)]


def swapped_sine_cosine(x):
    n, d = x.shape[-2:]
    angle = torch.arange(n, dtype=x.dtype)[:, None] / 10000 ** (torch.arange(0, d, 2, dtype=x.dtype) / d)
    return x + torch.stack([angle.cos(), angle.sin()], dim=-1).flatten(-2)


def sinusoids_from_one(x):
    n, d = x.shape[-2:]
    pe = torch.zeros(n, d)
    for pos in range(n):
        for i in range(0, d, 2):
            angle = (pos + 1) / 10000 ** (i / d)
            pe[pos, i] = math.sin(angle)
            pe[pos, i + 1] = math.cos(angle)
    return x + pe


def multiplied_sinusoids(x):
    n, d = x.shape[-2:]
    angle = torch.arange(n)[:, None] / 10000 ** (torch.arange(0, d, 2) / d)
    return x * torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)


def doubled_exponent(x):
    pos = np.arange(x.shape[-2])[:, np.newaxis]
    i = np.arange(x.shape[-1])[np.newaxis, :]
    angles = pos * 10000.0 ** (-(2 * i) / x.shape[-1])
    return x + np.where(i % 2 == 0, np.sin(angles), np.cos(angles))


def only_sines(x):
    pos = np.arange(x.shape[-2])[:, np.newaxis]
    i = np.arange(x.shape[-1])[np.newaxis, :]
    return x + np.sin(pos * 10000.0 ** (-(2 * (i // 2)) / x.shape[-1]))


class MultipliedEmbedding(nn.Module):
    def __init__(self, max_len, d_model):
        super().__init__()
        self.position_embeddings = nn.Embedding(max_len, d_model)

    def forward(self, x):
        return x * self.position_embeddings(torch.arange(x.size(1), device=x.device))


class SamePosition(nn.Module):
    def __init__(self, max_len, d_model):
        super().__init__()
        self.position_embeddings = nn.Embedding(max_len, d_model)

    def forward(self, x):
        last = torch.tensor(x.size(1) - 1, device=x.device)
        return x + self.position_embeddings(last)


class ReversedPositions(nn.Module):
    def __init__(self, n_positions, dim, dropout=0.1):
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.randn(1, n_positions, dim))
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return self.drop(x + self.pos_embedding[:, : x.shape[1]].flip(1))


class FirstPositionOnly(nn.Module):
    def __init__(self, max_len, d_model):
        super().__init__()
        self.wpe = nn.Embedding(max_len, d_model)

    def forward(self, x):
        pos = self.wpe(torch.arange(x.size(1), device=x.device))
        return torch.cat([x[:, :1] + pos[:1], x[:, 1:]], dim=1)


class WrappedPositions(nn.Module):
    def __init__(self, max_len, d_model):
        super().__init__()
        self.wpe = nn.Embedding(max_len, d_model)

    def forward(self, x):
        pos = torch.arange(x.size(1), device=x.device) % 16
        return x + self.wpe(pos)


def rope_plus_signs(x):
    n, d = x.shape[-2:]
    m = torch.arange(n)[:, None] * 10000.0 ** (-torch.arange(0, d, 2) / d)
    even, odd = x[..., 0::2], x[..., 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = even * m.cos() + odd * m.sin()
    out[..., 1::2] = even * m.sin() + odd * m.cos()
    return out


def rope_mixed_pairs(x):
    n, d = x.shape[-2:]
    angles = torch.outer(torch.arange(n).float(), 10000.0 ** (-torch.arange(0, d, 2) / d))
    angles = angles.repeat_interleave(2, dim=-1)
    x1, x2 = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat([-x2, x1], dim=-1) * angles.sin()


def rope_of_base_hundred(x):
    n, d = x.shape[-2:]
    freqs = torch.outer(torch.arange(n), 1.0 / 100 ** (torch.arange(0, d, 2) / d))
    rotations = torch.polar(torch.ones_like(freqs), freqs)
    as_complex = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(as_complex * rotations).flatten(-2)


def rope_without_sine(x):
    n, d = x.shape[-2:]
    emb = torch.outer(torch.arange(n).float(), 1.0 / 10000 ** (torch.arange(0, d, 2).float() / d))
    return x * torch.cat([emb, emb], dim=-1).cos()


def rope_forgotten(x):
    return x


def rope_one_angle(x):
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None]
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * angles.cos() - x2 * angles.sin(), x1 * angles.sin() + x2 * angles.cos()], dim=-1)


class RotaryDoubledExponent(nn.Module):
    def __init__(self, dim, max_len=256, base=10000):
        super().__init__()
        angles = torch.arange(max_len)[:, None] * base ** (-2 * torch.arange(0, dim, 2) / dim)
        self.register_buffer("cos", angles.cos().repeat_interleave(2, dim=-1))
        self.register_buffer("sin", angles.sin().repeat_interleave(2, dim=-1))

    def forward(self, x):
        n = x.size(-2)
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).reshape(x.shape)
        return x * self.cos[:n] + turned * self.sin[:n]


# masks


def mask_transposed(n):
    return torch.triu(torch.full((n, n), float("-inf"))).T.fill_diagonal_(0)


def mask_upper_ones(n):
    return np.triu(np.ones((n, n), dtype=np.int64))


def mask_one_ahead(n):
    return torch.tril(torch.ones(n, n), diagonal=1).bool()


def mask_of_itself(size):
    return torch.triu(torch.full((size, size), float("-inf")), diagonal=0)


def mask_without_diagonal(n):
    i = torch.arange(n)
    return i[:, None] > i[None, :]


def mask_of_nothing(sz):
    return torch.ones(1, 1, sz, sz, dtype=torch.bool)


def mask_of_sixteen(n):
    i = torch.arange(n)
    distance = i[:, None] - i[None, :]
    return (distance >= 0) & (distance < 16)


def mask_first_row_open(n):
    mask = [[1 if key <= query else 0 for key in range(n)] for query in range(n)]
    mask[0] = [1] * n
    return mask


def padding_queries(ids):
    b, n = ids.shape
    return (ids != 0)[:, :, None].expand(b, n, n)


def padding_reversed(tokens):
    mask = torch.zeros(tokens.shape)
    return mask.masked_fill(tokens != 0, float("-inf"))[:, None, :]


def padding_of_id_one(token_ids, pad_id=1):
    return (token_ids != pad_id).unsqueeze(1).unsqueeze(2)


def padding_of_the_first(seq):
    return (seq[:1] != 0).expand(seq.shape)


def padding_last_only(token_ids):
    keep = torch.ones_like(token_ids, dtype=torch.bool)
    keep[:, -1] = token_ids[:, -1] != 0
    return keep[:, None, None, :]


def padding_one_short(src):
    lengths = (src != 0).sum(1, keepdim=True)
    return torch.arange(src.size(1)) < lengths - 1


SCORES = "scores|scal|similarit|logit|quer|key"
SCALE = "scal|scores|logit|temperature"
WEIGHTS = "softmax|weights|normali[sz]"
CONTEXT = "context|values|output|weighted|sum"
CAUSAL = "mask|causal|future|hid"
HEADS = "head|split|reshape|view|transpos|merge"
PROJECTION = "projection|project|linear|matrix"
ACTIVATION = "tanh|relu|activation|nonlinear|non-linear"
POSITION = "position|angle|base|sine|sinusoid|frequenc|encoding"
ROTATION = f"{POSITION}|rotat|rope|pair|sign"
FEED_FORWARD = "feed-forward|feed forward|feedforward|ffn|mlp"
PADDING = "pad|mask|key|hid"

WRONG = {
    "scaled dot product, maximum of keys and sum over queries": (
        sum_over_queries,
        "scaled_dot_product",
        "largest score is that of the keys, and the sum is over the queries",
    ),
    "scaled dot product, matrices of one text, sum over queries": (
        matrices_summed_over_queries,
        "scaled_dot_product",
        "softmax is over the queries",
    ),
    "causal, values in front of the cache": (values_before_the_cache, "causal_dot_product", "different orders"),
    "causal, keys in front of the cache": (keys_before_the_cache, "causal_dot_product", "different orders"),
    "additive, a context for each pair of sentences": (seeded(AdditiveBatchOfContexts), "bahdanau", "batch mix"),
    "scaled dot product, no scale": (unscaled, "scaled_dot_product", SCALE),
    "scaled dot product, scale by d": (scaled_by_width, "scaled_dot_product", SCALE),
    "scaled dot product, scale by sqrt(n)": (scaled_by_length, "scaled_dot_product", SCALE),
    "scaled dot product, scale by the number of heads": (scaled_by_heads, "scaled_dot_product", SCALE),
    "scaled dot product, multiplied by sqrt(d), NumPy": (scaled_upwards, "scaled_dot_product", SCALE),
    "scaled dot product, scale after the softmax": (
        scaled_after_softmax,
        "scaled_dot_product",
        f"{SCALE}|{WEIGHTS}",
    ),
    "scaled dot product, softmax over the queries": (softmax_over_queries, "scaled_dot_product", WEIGHTS),
    "scaled dot product, softmax over the heads": (softmax_over_heads, "scaled_dot_product", WEIGHTS),
    "scaled dot product, softmax twice": (softmax_twice, "scaled_dot_product", WEIGHTS),
    "scaled dot product, sigmoid": (sigmoid_weights, "scaled_dot_product", f"{WEIGHTS}|sigmoid"),
    "scaled dot product, exponentials without their sum": (exponentials_without_a_sum, "scaled_dot_product", WEIGHTS),
    "scaled dot product, sum over all axes, NumPy": (sum_over_everything, "scaled_dot_product", WEIGHTS),
    "scaled dot product, global maximum that underflows": (
        global_maximum,
        "scaled_dot_product",
        f"{WEIGHTS}|maximum|flow|nan|finite|large|numeric",
    ),
    "scaled dot product, no maximum, overflow": (
        no_maximum,
        "scaled_dot_product",
        f"{WEIGHTS}|maximum|flow|nan|finite|large|numeric",
    ),
    "scaled dot product, linear normalisation": (linear_normalisation, "scaled_dot_product", WEIGHTS),
    "scaled dot product, argmax": (hardest_key, "scaled_dot_product", f"{WEIGHTS}|argmax|maximum"),
    "scaled dot product, relu of the scores": (relu_scores, "scaled_dot_product", f"{SCORES}|relu"),
    "scaled dot product, absolute scores, loops": (absolute_scores, "scaled_dot_product", SCORES),
    "scaled dot product, scores clipped at 5": (clipped_scores, "scaled_dot_product", f"{SCORES}|clip|clamp"),
    "scaled dot product, normalised queries": (normalised_queries, "scaled_dot_product", SCORES),
    "scaled dot product, keys with keys": (keys_with_keys, "scaled_dot_product", SCORES),
    "scaled dot product, distances": (distances, "scaled_dot_product", SCORES),
    "scaled dot product, last key dropped": (last_key_dropped, "scaled_dot_product", "key|mask|scores|weights|last"),
    "scaled dot product, first key counted twice": (
        first_key_twice,
        "scaled_dot_product",
        "key|scores|softmax|weights|first",
    ),
    "scaled dot product, only sixteen keys": (
        only_sixteen_keys,
        "scaled_dot_product",
        "key|mask|scores|weights|window|length|long",
    ),
    "scaled dot product, window of sixteen": (
        window_of_sixteen,
        "scaled_dot_product",
        "key|mask|scores|weights|window|length|long",
    ),
    "scaled dot product, diagonal removed": (diagonal_removed, "scaled_dot_product", "diagonal|mask|itself|self|key"),
    "scaled dot product, keys of the first example": (
        keys_of_the_first_example,
        "scaled_dot_product",
        "key|scores|batch",
    ),
    "scaled dot product, mean of the values, right weights": (mean_of_values, "scaled_dot_product", CONTEXT),
    "scaled dot product, values shifted by one": (shifted_values, "scaled_dot_product", CONTEXT),
    "scaled dot product, keys as values": (keys_as_values, "scaled_dot_product", CONTEXT),
    "scaled dot product, transposed weights": (
        transposed_weights,
        "scaled_dot_product",
        f"{CONTEXT}|weights|transpos",
    ),
    "scaled dot product, context divided by n": (seeded(AveragedContext), "scaled_dot_product", f"{CONTEXT}|weights"),
    "causal, reversed mask": (causal_reversed, "causal_dot_product", CAUSAL),
    "causal, own token hidden": (causal_without_itself, "causal_dot_product", f"{CAUSAL}|diagonal|itself"),
    "causal, one token ahead, loop": (causal_one_ahead, "causal_dot_product", CAUSAL),
    "causal, mask forgotten": (causal_forgotten, "causal_dot_product", CAUSAL),
    "causal, hidden scores are 0": (causal_zero_scores, "causal_dot_product", CAUSAL),
    "causal, mask after the softmax": (causal_after_softmax, "causal_dot_product", f"{CAUSAL}|{WEIGHTS}"),
    "causal, no scale": (causal_unscaled, "causal_dot_product", SCALE),
    "causal, sixteen tokens back": (causal_sixteen_back, "causal_dot_product", f"{CAUSAL}|window|key|length|long"),
    "causal, softmax over the queries, NumPy": (causal_softmax_down, "causal_dot_product", WEIGHTS),
    "causal, running mean": (causal_running_mean, "causal_dot_product", f"{SCORES}|{WEIGHTS}|values|mean"),
    "Luong dot, scaled": (luong_dot_scaled, "luong_dot", SCALE),
    "Luong dot, softmax over the batch": (luong_dot_over_batch, "luong_dot", f"{WEIGHTS}|batch"),
    "Luong dot, state unused": (luong_dot_last_state, "luong_dot", f"{SCORES}|state|hidden"),
    "Luong dot, tanh of the scores": (luong_dot_tanh, "luong_dot", f"{SCORES}|tanh"),
    "Luong dot, sum in place of product": (luong_dot_plus, "luong_dot", f"{SCORES}|product"),
    "Luong dot, context of the query": (luong_dot_query_context, "luong_dot", CONTEXT),
    "Luong general, both sides projected": (
        seeded(lambda: GeneralBothProjected(16)),
        "luong_general",
        f"{SCORES}|{PROJECTION}",
    ),
    "Luong general, context of projected states": (
        seeded(lambda: GeneralProjectedContext(16)),
        "luong_general",
        f"{CONTEXT}|{PROJECTION}",
    ),
    "Luong general, tanh of the projection": (
        seeded(lambda: GeneralTanh(16)),
        "luong_general",
        f"{SCORES}|{PROJECTION}|{ACTIVATION}",
    ),
    "Luong general, matrix unused": (
        seeded(lambda: GeneralUnusedMatrix(16)),
        "luong_general",
        f"{SCORES}|{PROJECTION}|parameter",
    ),
    "Luong general, state unused": (seeded(lambda: GeneralUnusedState(16)), "luong_general", f"{SCORES}|state|hidden"),
    "Luong general, sigmoid": (seeded(lambda: GeneralSigmoid(16)), "luong_general", f"{WEIGHTS}|sigmoid"),
    "Luong concat, no tanh": (seeded(lambda: ConcatWithoutTanh(16)), "luong_concat", f"{ACTIVATION}|scores"),
    "Luong concat, encoder twice": (
        seeded(lambda: ConcatEncoderTwice(16)),
        "luong_concat",
        f"{SCORES}|{PROJECTION}|concat|state|hidden",
    ),
    "Luong concat, relu": (seeded(lambda: ConcatRelu(16)), "luong_concat", f"{ACTIVATION}|scores"),
    "Luong concat, sum in place of v": (
        seeded(lambda: ConcatSummed(16)),
        "luong_concat",
        f"{SCORES}|{PROJECTION}|vector|parameter",
    ),
    "Luong concat, mean of the encoder outputs": (seeded(lambda: ConcatMeanContext(16)), "luong_concat", CONTEXT),
    "Bahdanau, no tanh": (seeded(lambda: AdditiveWithoutTanh(16)), "bahdanau", f"{ACTIVATION}|scores"),
    "Bahdanau, tanh of each summand": (
        seeded(lambda: AdditiveTanhOfEach(16)),
        "bahdanau",
        f"{ACTIVATION}|scores|sum",
    ),
    "Bahdanau, product in place of sum": (
        seeded(lambda: AdditiveProduct(16, 12)),
        "bahdanau",
        f"{ACTIVATION}|scores|sum|product|add",
    ),
    "Bahdanau, state unused": (
        seeded(lambda: AdditiveUnusedState(16, 16, 8)),
        "bahdanau",
        f"{SCORES}|{PROJECTION}|state|hidden|sum",
    ),
    "Bahdanau, sigmoid in place of softmax": (seeded(lambda: AdditiveSigmoid(16)), "bahdanau", f"{WEIGHTS}|sigmoid"),
    "Bahdanau, context of projected states": (
        seeded(lambda: AdditiveProjectedContext(16)),
        "bahdanau",
        f"{CONTEXT}|{PROJECTION}",
    ),
    "Bahdanau, softmax over an axis of one": (seeded(lambda: AdditiveSoftmaxOfOne(16)), "bahdanau", WEIGHTS),
    "Bahdanau, many queries, softmax over the queries": (
        seeded(lambda: AdditiveManyQueries(16)),
        "bahdanau",
        WEIGHTS,
    ),
    "multi-head, heads by view": (seeded(lambda: HeadsByView(16, 4)), "multi_head", HEADS),
    "multi-head, merged by view": (seeded(lambda: MergedByView(16, 4)), "multi_head", f"{HEADS}|{CONTEXT}|concat"),
    "multi-head, scale by sqrt(d_model)": (seeded(lambda: ScaledByModelWidth(16, 4)), "multi_head", SCALE),
    "multi-head, no scale in a list of heads": (seeded(lambda: UnscaledHeads(16, 4)), "multi_head", SCALE),
    "multi-head, first head zero": (seeded(lambda: ZeroedHead(16, 4)), "multi_head", f"{HEADS}|{CONTEXT}"),
    "multi-head, half of the heads": (seeded(lambda: HalfOfTheHeads(16, 4)), "multi_head", f"{HEADS}|{CONTEXT}"),
    "multi-head, key and value projections swapped": (
        seeded(lambda: SwappedKeyValue(16, 4)),
        "multi_head",
        f"{PROJECTION}|swap|key|value",
    ),
    "multi-head, keys by the query projection": (
        seeded(lambda: KeysByTheQueryProjection(16, 4)),
        "multi_head",
        f"{PROJECTION}|key|scores",
    ),
    "multi-head, no bias of queries, keys and values": (
        seeded(lambda: BiasOfTheOutputAlone(16, 4)),
        "multi_head",
        "bias of each input is missing",
    ),
    "multi-head, output projection unused": (
        seeded(lambda: NoOutputProjection(16, 4)),
        "multi_head",
        f"{PROJECTION}|output",
    ),
    "multi-head, softmax over the heads": (seeded(lambda: SoftmaxAcrossHeads(16, 4)), "multi_head", WEIGHTS),
    "multi-head, mean of the heads": (seeded(lambda: AveragedHeads(16, 4)), "multi_head", f"{HEADS}|{CONTEXT}|concat"),
    "causal multi-head, scale by sqrt(d_model)": (
        seeded(lambda: CausalByModelWidth(16, 4)),
        "causal_multi_head",
        SCALE,
    ),
    "causal multi-head, masked_fill not assigned": (
        seeded(lambda: CausalNotAssigned(16, 4)),
        "causal_multi_head",
        CAUSAL,
    ),
    "causal multi-head, past hidden": (seeded(lambda: FutureHeads(16, 4)), "causal_multi_head", CAUSAL),
    "causal multi-head, own token hidden": (
        seeded(lambda: StrictlyPast(16, 4)),
        "causal_multi_head",
        f"{CAUSAL}|diagonal|itself",
    ),
    "causal multi-head, only the first head masked": (
        seeded(lambda: FirstHeadMasked(16, 4)),
        "causal_multi_head",
        f"{CAUSAL}|head",
    ),
    "causal multi-head, output projection unused": (
        seeded(lambda: CausalWithoutProjection(16, 4)),
        "causal_multi_head",
        f"{PROJECTION}|output",
    ),
    "causal multi-head, heads by reshape": (seeded(lambda: CausalHeadsByView(16, 4)), "causal_multi_head", HEADS),
    "encoder block, no first residual": (
        seeded(lambda: EncoderWithoutResidual(16, 4, 32)),
        "encoder_block",
        "residual|skip",
    ),
    "encoder block, no second residual": (
        seeded(lambda: EncoderWithoutSecondResidual(16, 4)),
        "encoder_block",
        f"residual|skip|{FEED_FORWARD}",
    ),
    "encoder block, residual of the normalised input": (
        seeded(lambda: EncoderResidualOfTheNorm(16, 4)),
        "encoder_block",
        "residual|skip|norm",
    ),
    "encoder block, mean-pooled feed-forward": (
        seeded(lambda: EncoderPooledFeedForward(16, 4, 32)),
        "encoder_block",
        FEED_FORWARD,
    ),
    "encoder block, norm over the tokens": (seeded(lambda: EncoderNormOverTokens(16, 4, 32)), "encoder_block", "norm"),
    "encoder block, no activation": (
        seeded(lambda: EncoderWithoutActivation(16, 4, 32)),
        "encoder_block",
        f"{ACTIVATION}|{FEED_FORWARD}",
    ),
    "encoder block, no last norm": (seeded(lambda: EncoderWithoutLastNorm(16, 4, 32)), "encoder_block", "norm"),
    "encoder block, feed-forward unused": (
        seeded(lambda: EncoderFeedForwardForgotten(16, 4, 32)),
        "encoder_block",
        FEED_FORWARD,
    ),
    "encoder block, no scale": (seeded(lambda: EncoderUnscaled(16, 4)), "encoder_block", f"{SCALE}|attention"),
    "causal block, no mask": (seeded(lambda: BlockWithoutMask(16, 4)), "causal_block", CAUSAL),
    "causal block, reversed mask": (seeded(lambda: BlockWithReversedMask(16, 4)), "causal_block", CAUSAL),
    "causal block, no first residual": (seeded(lambda: BlockWithoutResidual(16, 4)), "causal_block", "residual|skip"),
    "causal block, no activation": (
        seeded(lambda: BlockWithoutActivation(16, 4)),
        "causal_block",
        f"{ACTIVATION}|{FEED_FORWARD}",
    ),
    "causal block, second norm unused": (seeded(lambda: BlockWithOneNorm(16, 4)), "causal_block", "norm"),
    "causal block, feed-forward of the next token": (
        seeded(lambda: BlockFeedForwardOfNeighbours(16, 4)),
        "causal_block",
        f"{FEED_FORWARD}|{CAUSAL}",
    ),
    "decoder block, cross-attention to itself": (
        seeded(lambda: DecoderCrossToItself(16, 4)),
        "decoder_block",
        "cross|memory|encoder",
    ),
    "decoder block, cross-attention to the first token": (
        seeded(lambda: DecoderFirstWord(16, 4, 32)),
        "decoder_block",
        "cross|memory|encoder",
    ),
    "decoder block, no residual of the cross-attention": (
        seeded(lambda: DecoderCrossWithoutResidual(16, 4, 32)),
        "decoder_block",
        "residual|skip|cross",
    ),
    "decoder block, no cross-attention": (
        seeded(lambda: DecoderWithoutCross(16, 4)),
        "decoder_block",
        "cross|memory|encoder",
    ),
    "decoder block, causal cross-attention": (
        seeded(lambda: DecoderCausalCross(16, 4)),
        "decoder_block",
        f"cross|memory|encoder|{CAUSAL}",
    ),
    "decoder block, nn.TransformerDecoderLayer without a mask": (
        seeded(lambda: nn.TransformerDecoderLayer(16, 4, dim_feedforward=32, batch_first=True)),
        "decoder_block",
        CAUSAL,
    ),
    "sinusoidal, max_len in place of d_model": (seeded(lambda: SinusoidsOfMaxLen(16)), "sinusoidal", POSITION),
    "sinusoidal, base 1000": (seeded(lambda: SinusoidsOfBaseThousand(16)), "sinusoidal", POSITION),
    "sinusoidal, sine and cosine swapped": (swapped_sine_cosine, "sinusoidal", POSITION),
    "sinusoidal, positions from 1, loops": (sinusoids_from_one, "sinusoidal", POSITION),
    "sinusoidal, multiplied": (multiplied_sinusoids, "sinusoidal", f"{POSITION}|sum|add|multipl"),
    "sinusoidal, exponent doubled, NumPy": (doubled_exponent, "sinusoidal", POSITION),
    "sinusoidal, only sines": (only_sines, "sinusoidal", POSITION),
    "learned positions, multiplied": (
        seeded(lambda: MultipliedEmbedding(128, 16)),
        "learned_positions",
        f"{POSITION}|embedding|sum|add|multipl",
    ),
    "learned positions, the last position for all": (
        seeded(lambda: SamePosition(128, 16)),
        "learned_positions",
        f"{POSITION}|embedding|table",
    ),
    "learned positions, reversed": (
        seeded(lambda: ReversedPositions(128, 16)),
        "learned_positions",
        f"{POSITION}|embedding|table",
    ),
    "learned positions, the first token alone": (
        seeded(lambda: FirstPositionOnly(128, 16)),
        "learned_positions",
        f"{POSITION}|embedding|table",
    ),
    "learned positions, wrapped after sixteen": (
        seeded(lambda: WrappedPositions(128, 16)),
        "learned_positions",
        f"{POSITION}|embedding|table",
    ),
    "rope, both signs plus": (rope_plus_signs, "rope", ROTATION),
    "rope, angles of pairs for halves": (rope_mixed_pairs, "rope", ROTATION),
    "rope, base 100": (rope_of_base_hundred, "rope", ROTATION),
    "rope, nothing is rotated": (rope_forgotten, "rope", "returned as it is"),
    "rope, no sine": (rope_without_sine, "rope", ROTATION),
    "rope, one angle for all pairs": (rope_one_angle, "rope", ROTATION),
    "rope, exponent doubled": (seeded(lambda: RotaryDoubledExponent(16)), "rope", ROTATION),
    "causal mask, transposed": (mask_transposed, "causal_mask", CAUSAL),
    "causal mask, ones above the diagonal": (mask_upper_ones, "causal_mask", CAUSAL),
    "causal mask, one token ahead": (mask_one_ahead, "causal_mask", CAUSAL),
    "causal mask, own token hidden by -inf": (mask_of_itself, "causal_mask", f"{CAUSAL}|diagonal|itself|own"),
    "causal mask, strict comparison": (mask_without_diagonal, "causal_mask", f"{CAUSAL}|diagonal|itself|own"),
    "causal mask, nothing hidden": (mask_of_nothing, "causal_mask", CAUSAL),
    "causal mask, window of sixteen": (mask_of_sixteen, "causal_mask", f"{CAUSAL}|window|past"),
    "causal mask, first row open": (mask_first_row_open, "causal_mask", CAUSAL),
    "padding mask, hides queries": (padding_queries, "padding_mask", f"{PADDING}|quer"),
    "padding mask, reversed": (padding_reversed, "padding_mask", PADDING),
    "padding mask, pad id 1": (padding_of_id_one, "padding_mask", PADDING),
    "padding mask, of the first sentence": (padding_of_the_first, "padding_mask", f"{PADDING}|batch"),
    "padding mask, only the last token": (padding_last_only, "padding_mask", PADDING),
    "padding mask, one token too many": (padding_one_short, "padding_mask", PADDING),
}
