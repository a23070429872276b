"""Right solutions of attention exercises, each in its own style, with the reference that it implements."""

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


def attention_matmul(q, k, v):
    d = q.shape[-1]
    scores = q @ k.transpose(-2, -1) / math.sqrt(d)
    weights = torch.softmax(scores, dim=-1)
    return weights @ v


def attention_with_weights(query, key, value, mask=None, dropout=None):
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    p_attn = scores.softmax(dim=-1)
    if dropout is not None:
        p_attn = dropout(p_attn)
    return torch.matmul(p_attn, value), p_attn


def attention_einsum(q, k, v):
    alpha = torch.einsum("...id,...jd->...ij", q * q.shape[-1] ** -0.5, k).softmax(-1)
    return torch.einsum("...ij,...jd->...id", alpha, v)


def attention_fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def attention_loops(q, k, v):
    outputs = []
    for query in q:
        scores = torch.stack([torch.dot(query, key) for key in k]) / q.shape[1] ** 0.5
        exps = torch.exp(scores - scores.max())
        alphas = exps / exps.sum()
        out = torch.zeros_like(v[0])
        for alpha, value in zip(alphas, v, strict=True):
            out = out + alpha * value
        outputs.append(out)
    return torch.stack(outputs)


def attention_bmm(queries, keys, values):
    scores = torch.bmm(queries, keys.permute(0, 2, 1))
    scores = scores * (1.0 / np.sqrt(queries.size(2)))
    return torch.bmm(nn.Softmax(dim=2)(scores), values)


def attention_numpy(Q, K, V):
    S = Q @ np.swapaxes(K, -1, -2) / np.sqrt(Q.shape[-1])
    S = S - S.max(axis=-1, keepdims=True)
    A = np.exp(S)
    A = A / A.sum(axis=-1, keepdims=True)
    return A @ V, A


def attention_shared_scale(q, k, v):
    root = q.size(-1) ** 0.25
    logits = (q / root) @ (k / root).mT
    return torch.exp(logits - torch.logsumexp(logits, dim=-1, keepdim=True)) @ v


def attention_baddbmm(q, k, v):
    b, n, d = q.shape
    empty = torch.zeros(b, n, k.shape[1], dtype=q.dtype, device=q.device)
    scores = torch.baddbmm(empty, q, k.transpose(1, 2), beta=0, alpha=d**-0.5)
    return F.softmax(scores, dim=-1).bmm(v)


class ScaledDotProduct(nn.Module):
    def __init__(self, dropout=0.1):
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, q, k, v):
        attn = torch.matmul(q / q.size(-1) ** 0.5, k.transpose(-1, -2))
        attn = self.dropout(F.softmax(attn, dim=-1))
        return torch.matmul(attn, v), attn


# causal dot-product attention


def causal_masked_fill(q, k, v):
    n = q.shape[-2]
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    mask = torch.tril(torch.ones(n, n, dtype=torch.bool, device=q.device))
    scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ v


def causal_fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def causal_prefixes(q, k, v):
    rows = []
    for t in range(q.shape[-2]):
        past_k, past_v = k[..., : t + 1, :], v[..., : t + 1, :]
        s = (q[..., t : t + 1, :] * past_k).sum(-1) / math.sqrt(q.shape[-1])
        w = torch.softmax(s, -1)
        rows.append((w.unsqueeze(-1) * past_v).sum(-2))
    return torch.stack(rows, dim=-2)


def causal_added(query, key, value):
    t = query.size(-2)
    bias = torch.full((t, t), float("-inf"), dtype=query.dtype, device=query.device).triu(1)
    weights = F.softmax(torch.einsum("...qd,...kd->...qk", query, key) / query.size(-1) ** 0.5 + bias, dim=-1)
    return weights @ value, weights


def causal_numpy(q, k, v):
    scores = np.einsum("...id,...jd->...ij", q, k) / np.sqrt(q.shape[-1])
    i, j = np.indices(scores.shape[-2:])
    scores = np.where(j > i, -1e9, scores)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("...ij,...jd->...id", e / e.sum(-1, keepdims=True), v)


def causal_where(q, k, v):
    i = torch.arange(q.shape[-2], device=q.device)
    logits = torch.where(i[:, None] >= i, q @ k.mT / q.shape[-1] ** 0.5, -torch.inf)
    weights = torch.exp(logits - logits.logsumexp(-1, keepdim=True))
    return weights @ v


# Luong attention


def luong_dot_bmm(decoder_hidden, encoder_outputs):
    scores = torch.bmm(encoder_outputs, decoder_hidden.unsqueeze(2)).squeeze(2)
    weights = F.softmax(scores, dim=1)
    context = torch.bmm(weights.unsqueeze(1), encoder_outputs).squeeze(1)
    return context, weights


def luong_dot_einsum(query, keys):
    a = torch.einsum("bd,bnd->bn", query, keys).softmax(-1)
    return torch.einsum("bn,bnd->bd", a, keys)


def luong_dot_sum(hidden, encoder_outputs):
    energy = torch.sum(hidden[:, None, :] * encoder_outputs, dim=2)
    alpha = torch.softmax(energy, dim=1)
    return (alpha[:, :, None] * encoder_outputs).sum(dim=1), alpha


def luong_dot_one_sentence(state, encoder_states):
    scores = []
    for h in encoder_states:
        scores.append((state * h).sum())
    alphas = torch.softmax(torch.stack(scores), dim=0)
    return sum(a * h for a, h in zip(alphas, encoder_states, strict=True))


class DotAttention(nn.Module):
    def forward(self, decoder_state, encoder_outputs):
        scores = encoder_outputs @ decoder_state.unsqueeze(-1)
        weights = scores.softmax(dim=1)
        return (weights * encoder_outputs).sum(1)


class LuongGeneral(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.attn = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, decoder_hidden, encoder_outputs):
        energy = self.attn(encoder_outputs)
        scores = torch.bmm(energy, decoder_hidden.unsqueeze(2)).squeeze(2)
        weights = F.softmax(scores, dim=-1)
        context = weights.unsqueeze(1) @ encoder_outputs
        return context.squeeze(1), weights


class GeneralScore(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.W = nn.Parameter(torch.empty(dim, dim))
        nn.init.xavier_uniform_(self.W)

    def forward(self, query, keys):
        a = torch.softmax(torch.einsum("bi,ij,bnj->bn", query, self.W, keys), dim=-1)
        return torch.einsum("bn,bnd->bd", a, keys)


class BilinearAttention(nn.Module):
    def __init__(self, query_dim, key_dim):
        super().__init__()
        self.score = nn.Bilinear(query_dim, key_dim, 1, bias=False)

    def forward(self, query, keys):
        q = query.unsqueeze(1).expand(-1, keys.size(1), -1).contiguous()
        weights = self.score(q, keys).squeeze(-1).softmax(dim=-1)
        return torch.bmm(weights[:, None], keys)[:, 0], weights


class LuongConcat(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.attn = nn.Linear(hidden_size * 2, hidden_size)
        self.v = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, decoder_hidden, encoder_outputs):
        n = encoder_outputs.size(1)
        repeated = decoder_hidden.unsqueeze(1).repeat(1, n, 1)
        energy = torch.tanh(self.attn(torch.cat((repeated, encoder_outputs), dim=2)))
        weights = F.softmax(self.v(energy).squeeze(2), dim=1)
        return torch.bmm(weights.unsqueeze(1), encoder_outputs).squeeze(1), weights


class ConcatParameters(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.W = nn.Parameter(torch.randn(2 * d, d) * 0.2)
        self.v = nn.Parameter(torch.randn(d))

    def forward(self, query, keys):
        pairs = torch.cat([query[:, None].expand_as(keys), keys], -1)
        scores = (pairs @ self.W).tanh() @ self.v
        alpha = scores.softmax(-1)
        return (alpha.unsqueeze(-1) * keys).sum(1)


class ConcatOneByOne(nn.Module):
    def __init__(self, units):
        super().__init__()
        self.score_net = nn.Sequential(
            nn.Linear(2 * units, units, bias=False), nn.Tanh(), nn.Linear(units, 1, bias=False)
        )

    def forward(self, hidden, encoder_outputs):
        scores = []
        for t in range(encoder_outputs.shape[1]):
            scores.append(self.score_net(torch.cat([encoder_outputs[:, t], hidden], dim=1)))
        weights = torch.softmax(torch.cat(scores, dim=1), dim=1)
        context = torch.einsum("bt,bth->bh", weights, encoder_outputs)
        return context, weights


# Bahdanau attention


class BahdanauAttention(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.Wa = nn.Linear(hidden_size, hidden_size)
        self.Ua = nn.Linear(hidden_size, hidden_size)
        self.Va = nn.Linear(hidden_size, 1)

    def forward(self, query, keys):
        scores = self.Va(torch.tanh(self.Wa(query.unsqueeze(1)) + self.Ua(keys)))
        weights = F.softmax(scores.squeeze(2), dim=-1)
        context = torch.bmm(weights.unsqueeze(1), keys).squeeze(1)
        return context, weights


class AdditiveParameters(nn.Module):
    def __init__(self, d, units):
        super().__init__()
        self.W1 = nn.Parameter(torch.randn(d, units) / d**0.5)
        self.W2 = nn.Parameter(torch.randn(d, units) / d**0.5)
        self.v = nn.Parameter(torch.randn(units))

    def forward(self, decoder_hidden, encoder_outputs):
        h = torch.einsum("bd,du->bu", decoder_hidden, self.W1)
        s = torch.einsum("bnd,du->bnu", encoder_outputs, self.W2)
        e = torch.einsum("bnu,u->bn", torch.tanh(h[:, None] + s), self.v)
        return torch.einsum("bn,bnd->bd", e.softmax(1), encoder_outputs)


class AdditiveQueries(nn.Module):
    def __init__(self, num_hiddens, dropout=0.1):
        super().__init__()
        self.W_k = nn.Linear(num_hiddens, num_hiddens, bias=False)
        self.W_q = nn.Linear(num_hiddens, num_hiddens, bias=False)
        self.w_v = nn.Linear(num_hiddens, 1, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, queries, keys, values):
        queries, keys = self.W_q(queries), self.W_k(keys)
        features = torch.tanh(queries.unsqueeze(2) + keys.unsqueeze(1))
        scores = self.w_v(features).squeeze(-1)
        self.attention_weights = F.softmax(scores, dim=-1)
        return torch.bmm(self.dropout(self.attention_weights), values)


class AlignmentModel(nn.Module):
    def __init__(self, dec_dim, enc_dim, attn_dim):
        super().__init__()
        self.dec_proj = nn.Linear(dec_dim, attn_dim, bias=False)
        self.enc_proj = nn.Linear(enc_dim, attn_dim)
        self.energy = nn.Linear(attn_dim, 1, bias=False)

    def forward(self, state, annotations):
        projected = self.enc_proj(annotations)
        e = [self.energy(torch.tanh(self.dec_proj(state) + projected[:, j])) for j in range(annotations.size(1))]
        alpha = torch.softmax(torch.stack(e, dim=1), dim=1)
        return (alpha * annotations).sum(dim=1), alpha.squeeze(-1)


# multi-head attention


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def split_heads(self, x):
        return x.view(x.size(0), x.size(1), self.num_heads, self.d_k).transpose(1, 2)

    def forward(self, Q, K, V, mask=None):
        Q, K, V = self.split_heads(self.W_q(Q)), self.split_heads(self.W_k(K)), self.split_heads(self.W_v(V))
        scores = torch.matmul(Q, K.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        x = torch.matmul(torch.softmax(scores, dim=-1), V)
        x = x.transpose(1, 2).contiguous().view(x.size(0), -1, self.num_heads * self.d_k)
        return self.W_o(x)


class SingleHead(nn.Module):
    def __init__(self, d_in, d_head):
        super().__init__()
        self.query = nn.Linear(d_in, d_head, bias=False)
        self.key = nn.Linear(d_in, d_head, bias=False)
        self.value = nn.Linear(d_in, d_head, bias=False)

    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        weights = F.softmax(q @ k.transpose(1, 2) * q.shape[-1] ** -0.5, dim=-1)
        return weights @ v


class HeadsInAList(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.heads = nn.ModuleList([SingleHead(d_model, d_model // n_heads) for _ in range(n_heads)])
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


class FusedSelfAttention(nn.Module):
    def __init__(self, dim, num_heads=4, qkv_bias=True):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.softmax(dim=-1)
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class EinsumHeads(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        d_head = d_model // heads
        self.wq = nn.Parameter(torch.randn(heads, d_model, d_head) * d_model**-0.5)
        self.wk = nn.Parameter(torch.randn(heads, d_model, d_head) * d_model**-0.5)
        self.wv = nn.Parameter(torch.randn(heads, d_model, d_head) * d_model**-0.5)
        self.wo = nn.Parameter(torch.randn(heads, d_head, d_model) * d_model**-0.5)

    def forward(self, x):
        q = torch.einsum("bnd,hde->bhne", x, self.wq)
        k = torch.einsum("bnd,hde->bhne", x, self.wk)
        v = torch.einsum("bnd,hde->bhne", x, self.wv)
        a = torch.softmax(torch.einsum("bhie,bhje->bhij", q, k) / q.size(-1) ** 0.5, dim=-1)
        return torch.einsum("bhij,bhje,hed->bid", a, v, self.wo)


class SequenceFirstHeads(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.h = num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        n, b, d = x.shape
        q = self.q_proj(x).view(n, b * self.h, d // self.h).transpose(0, 1)
        k = self.k_proj(x).view(n, b * self.h, d // self.h).transpose(0, 1)
        v = self.v_proj(x).view(n, b * self.h, d // self.h).transpose(0, 1)
        attn = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(d // self.h)
        out = torch.bmm(F.softmax(attn, dim=2), v)
        return self.out_proj(out.transpose(0, 1).reshape(n, b, d))


class TorchSelfAttention(nn.Module):
    def __init__(self, d_model, nhead, dropout=0.1):
        super().__init__()
        self.mha = nn.MultiheadAttention(d_model, nhead, dropout=dropout, batch_first=True)

    def forward(self, x):
        out, _ = self.mha(x, x, x, need_weights=False)
        return out


# causal multi-head attention


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head, block_size=128, dropout=0.1):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.attn_dropout = nn.Dropout(dropout)
        self.resid_dropout = nn.Dropout(dropout)
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class CausalHead(nn.Module):
    def __init__(self, n_embd, head_size, block_size=128):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))

    def forward(self, x):
        T = x.shape[1]
        k, q = self.key(x), self.query(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        return F.softmax(wei, dim=-1) @ self.value(x)


class CausalHeadsInAList(nn.Module):
    def __init__(self, n_embd, num_heads):
        super().__init__()
        self.heads = nn.ModuleList([CausalHead(n_embd, n_embd // num_heads) for _ in range(num_heads)])
        self.proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        return self.proj(torch.cat([h(x) for h in self.heads], dim=-1))


class CausalFused(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(dim, 2 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        q, (k, v) = self.to_q(x), self.to_kv(x).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.to_out(out.transpose(1, 2).flatten(2))


class MaskedTorchAttention(nn.Module):
    def __init__(self, d_model, nhead):
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, nhead, batch_first=True)

    def forward(self, x):
        n = x.size(1)
        mask = torch.triu(torch.ones(n, n, dtype=torch.bool, device=x.device), diagonal=1)
        return self.attn(x, x, x, attn_mask=mask)


# encoder block


class PostNormEncoderLayer(nn.Module):
    def __init__(self, d_model, num_heads, d_ff, dropout=0.1):
        super().__init__()
        self.self_attn = MultiHeadAttention(d_model, num_heads)
        self.fc1 = nn.Linear(d_model, d_ff)
        self.fc2 = nn.Linear(d_ff, d_model)
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = self.norm1(x + self.dropout(self.self_attn(x, x, x)))
        ff = self.fc2(torch.relu(self.fc1(x)))
        return self.norm2(x + self.dropout(ff))


class ViTBlock(nn.Module):
    def __init__(self, dim, num_heads, mlp_ratio=4):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = FusedSelfAttention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim * mlp_ratio), nn.GELU(), nn.Linear(dim * mlp_ratio, dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PreNormEncoder(nn.Module):
    def __init__(self, size, heads, hidden):
        super().__init__()
        self.attention_norm = nn.LayerNorm(size)
        self.attention = nn.MultiheadAttention(size, heads, batch_first=True)
        self.ffn_norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, hidden)
        self.down = nn.Linear(hidden, size)

    def forward(self, x):
        y = self.attention_norm(x)
        a, _ = self.attention(y, y, y)
        h = x + a
        return h + self.down(F.relu(self.up(self.ffn_norm(h))))


# causal block


class GPT2Block(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.c_fc = nn.Linear(n_embd, 4 * n_embd)
        self.c_proj = nn.Linear(4 * n_embd, n_embd)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.c_proj(self.act(self.c_fc(self.ln_2(x))))
        return x


class TinyGPTBlock(nn.Module):
    def __init__(self, n_embd, n_head, dropout=0.1):
        super().__init__()
        self.sa = CausalHeadsInAList(n_embd, n_head)
        self.ffwd = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.ReLU(), nn.Linear(4 * n_embd, n_embd), nn.Dropout(dropout)
        )
        self.ln1 = nn.LayerNorm(n_embd)
        self.ln2 = nn.LayerNorm(n_embd)

    def forward(self, x):
        x = x + self.sa(self.ln1(x))
        x = x + self.ffwd(self.ln2(x))
        return x


class MaskedEncoderLayer(nn.Module):
    def __init__(self, d_model, nhead):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(d_model, nhead, 32, dropout=0.1, batch_first=True)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1)).to(x)
        return self.layer(x, src_mask=mask, is_causal=True)


# decoder block


class PostNormDecoderLayer(nn.Module):
    def __init__(self, d_model, num_heads, d_ff):
        super().__init__()
        self.self_attn = MultiHeadAttention(d_model, num_heads)
        self.cross_attn = MultiHeadAttention(d_model, num_heads)
        self.ff = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
        self.norms = nn.ModuleList([nn.LayerNorm(d_model) for _ in range(3)])

    def forward(self, x, memory):
        n = x.size(1)
        mask = torch.tril(torch.ones(n, n, device=x.device))
        x = self.norms[0](x + self.self_attn(x, x, x, mask))
        x = self.norms[1](x + self.cross_attn(x, memory, memory))
        return self.norms[2](x + self.ff(x))


class PreNormDecoderBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln1, self.ln2, self.ln3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.masked = nn.MultiheadAttention(dim, heads, dropout=0.1, batch_first=True)
        self.cross = nn.MultiheadAttention(dim, heads, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, memory):
        future = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).triu(1)
        h = self.ln1(x)
        x = x + self.masked(h, h, h, attn_mask=future, need_weights=False)[0]
        x = x + self.cross(self.ln2(x), memory, memory, need_weights=False)[0]
        return x + self.mlp(self.ln3(x))


class TorchDecoder(nn.Module):
    def __init__(self, d_model, nhead):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(d_model, nhead, dim_feedforward=32, batch_first=True)

    def forward(self, tgt, memory):
        n = tgt.shape[1]
        tgt_mask = torch.full((n, n), float("-inf"), dtype=tgt.dtype, device=tgt.device).triu(1)
        return self.layer(tgt, memory, tgt_mask=tgt_mask)


# positions


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, dropout=0.1, max_len=512):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(1, max_len, d_model)
        pe[0, :, 0::2] = torch.sin(position * div_term)
        pe[0, :, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe)

    def forward(self, x):
        x = x + self.pe[:, : x.size(1)]
        return self.dropout(x)


def add_sinusoids(x):
    n, d = x.shape[-2:]
    angle = torch.arange(n, dtype=x.dtype)[:, None] / 10000 ** (torch.arange(0, d, 2, dtype=x.dtype) / d)
    return x + torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)


def add_sinusoids_loops(x):
    seq_len, d_model = x.shape[1], x.shape[2]
    pe = np.zeros((seq_len, d_model))
    for pos in range(seq_len):
        for i in range(d_model):
            angle = pos / np.power(10000, 2 * (i // 2) / d_model)
            pe[pos, i] = np.sin(angle) if i % 2 == 0 else np.cos(angle)
    return x + torch.tensor(pe, dtype=x.dtype)


def add_sinusoids_numpy(x):
    pos = np.arange(x.shape[-2])[:, np.newaxis]
    i = np.arange(x.shape[-1])[np.newaxis, :]
    angles = pos * 10000.0 ** (-(2 * (i // 2)) / x.shape[-1])
    return x + np.where(i % 2 == 0, np.sin(angles), np.cos(angles))


class LearnedPositions(nn.Module):
    def __init__(self, max_len, d_model):
        super().__init__()
        self.position_embeddings = nn.Embedding(max_len, d_model)

    def forward(self, x):
        positions = torch.arange(x.size(1), device=x.device)
        return x + self.position_embeddings(positions).unsqueeze(0)


class PositionTable(nn.Module):
    def __init__(self, n_positions, dim, dropout=0.1):
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.randn(1, n_positions, dim))
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return self.drop(x + self.pos_embedding[:, : x.shape[1]])


class OneHotPositions(nn.Module):
    def __init__(self, n_positions, dim):
        super().__init__()
        self.n_positions = n_positions
        self.table = nn.Linear(n_positions, dim, bias=False)

    def forward(self, x):
        one_hot = torch.eye(self.n_positions, dtype=x.dtype, device=x.device)[: x.shape[-2]]
        return x + self.table(one_hot)


def rope_halves(x):
    n, d = x.shape[-2:]
    inv_freq = 1.0 / 10000 ** (torch.arange(0, d, 2).float() / d)
    emb = torch.outer(torch.arange(n).float(), inv_freq)
    emb = torch.cat([emb, emb], dim=-1)
    x1, x2 = x.chunk(2, dim=-1)
    return x * emb.cos() + torch.cat([-x2, x1], dim=-1) * emb.sin()


def rope_pairs(x):
    n, d = x.shape[-2:]
    theta = 10000.0 ** (-torch.arange(0, d, 2) / d)
    m = torch.arange(n)[:, None] * theta
    even, odd = x[..., 0::2], x[..., 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = even * m.cos() - odd * m.sin()
    out[..., 1::2] = even * m.sin() + odd * m.cos()
    return out


def rope_complex(x):
    n, d = x.shape[-2:]
    freqs = torch.outer(torch.arange(n), 1.0 / 10000 ** (torch.arange(0, d, 2) / d))
    rotations = torch.polar(torch.ones_like(freqs), freqs)
    as_complex = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(as_complex * rotations).flatten(-2)


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, max_len=256, base=10000):
        super().__init__()
        angles = torch.arange(max_len)[:, None] * base ** (-torch.arange(0, dim, 2) / dim)
        self.register_buffer("cos", angles.cos().repeat_interleave(2, dim=-1))
        self.register_buffer("sin", angles.sin().repeat_interleave(2, dim=-1))

    def forward(self, x):
        n = x.size(-2)
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).reshape(x.shape)
        return x * self.cos[:n] + turned * self.sin[:n]


# masks


def causal_tril(n):
    return torch.tril(torch.ones(n, n)).bool()


def causal_hidden_triu(size):
    return torch.triu(torch.ones(size, size, dtype=torch.bool), diagonal=1)


def causal_negative_infinity(sz):
    return torch.triu(torch.full((sz, sz), float("-inf")), diagonal=1)


def causal_compared(n):
    i = torch.arange(n)
    return i[:, None] >= i[None, :]


def causal_ints(n):
    return [[1 if key <= query else 0 for key in range(n)] for query in range(n)]


def causal_numpy_four_axes(seq_len):
    return np.tril(np.ones((1, 1, seq_len, seq_len), dtype=np.int64))


def causal_rectangular(n_queries, n_keys):
    return torch.ones(n_queries, n_keys, dtype=torch.bool).tril(diagonal=n_keys - n_queries)


def padding_kept(token_ids):
    return token_ids != 0


def padding_four_axes(ids, pad_id=0):
    return (ids != pad_id).unsqueeze(1).unsqueeze(2)


def padding_hidden(src):
    return src.eq(0)


def padding_negative_infinity(tokens):
    mask = torch.zeros(tokens.shape)
    return mask.masked_fill(tokens == 0, float("-inf"))[:, None, :]


def padding_expanded(seq):
    b, n = seq.shape
    return (seq > 0).long()[:, None, :].expand(b, n, n)


RIGHT = {
    "scaled dot product, matmul and softmax in four lines": (attention_matmul, "scaled_dot_product"),
    "scaled dot product, mask and dropout arguments, returns the weights": (
        attention_with_weights,
        "scaled_dot_product",
    ),
    "scaled dot product, einsum with a scaled query": (attention_einsum, "scaled_dot_product"),
    "scaled dot product, F.scaled_dot_product_attention": (attention_fused, "scaled_dot_product"),
    "scaled dot product, loops over queries and keys of one sequence": (attention_loops, "scaled_dot_product"),
    "scaled dot product, bmm over batches": (attention_bmm, "scaled_dot_product"),
    "scaled dot product, NumPy": (attention_numpy, "scaled_dot_product"),
    "scaled dot product, scale shared by queries and keys, logsumexp": (attention_shared_scale, "scaled_dot_product"),
    "scaled dot product, baddbmm": (attention_baddbmm, "scaled_dot_product"),
    "scaled dot product, module with dropout": (seeded(ScaledDotProduct), "scaled_dot_product"),
    "causal, masked_fill of a triangle": (causal_masked_fill, "causal_dot_product"),
    "causal, F.scaled_dot_product_attention": (causal_fused, "causal_dot_product"),
    "causal, loop over prefixes": (causal_prefixes, "causal_dot_product"),
    "causal, added -inf, returns the weights": (causal_added, "causal_dot_product"),
    "causal, NumPy where": (causal_numpy, "causal_dot_product"),
    "causal, torch.where and logsumexp": (causal_where, "causal_dot_product"),
    "Luong dot, bmm": (luong_dot_bmm, "luong_dot"),
    "Luong dot, einsum, context only": (luong_dot_einsum, "luong_dot"),
    "Luong dot, product and sum": (luong_dot_sum, "luong_dot"),
    "Luong dot, loop over one sentence": (luong_dot_one_sentence, "luong_dot"),
    "Luong dot, module": (seeded(DotAttention), "luong_dot"),
    "Luong general, nn.Linear of the encoder": (seeded(lambda: LuongGeneral(16)), "luong_general"),
    "Luong general, nn.Parameter and einsum": (seeded(lambda: GeneralScore(16)), "luong_general"),
    "Luong general, nn.Bilinear": (seeded(lambda: BilinearAttention(16, 16)), "luong_general"),
    "Luong concat, repeated state": (seeded(lambda: LuongConcat(16)), "luong_concat"),
    "Luong concat, nn.Parameter": (seeded(lambda: ConcatParameters(16)), "luong_concat"),
    "Luong concat, nn.Sequential position by position": (seeded(lambda: ConcatOneByOne(16)), "luong_concat"),
    "Bahdanau, three nn.Linear": (seeded(lambda: BahdanauAttention(16)), "bahdanau"),
    "Bahdanau, nn.Parameter and einsum": (seeded(lambda: AdditiveParameters(16, 12)), "bahdanau"),
    "Bahdanau, many queries, separate values": (seeded(lambda: AdditiveQueries(16)), "bahdanau"),
    "Bahdanau, list of energies": (seeded(lambda: AlignmentModel(16, 16, 8)), "bahdanau"),
    "multi-head, split_heads, of Q, K and V": (seeded(lambda: MultiHeadAttention(16, 4)), "multi_head"),
    "multi-head, heads in a ModuleList": (seeded(lambda: HeadsInAList(16, 4)), "multi_head"),
    "multi-head, fused qkv": (seeded(lambda: FusedSelfAttention(16, 4)), "multi_head"),
    "multi-head, einsum with a parameter a head": (seeded(lambda: EinsumHeads(16, 4)), "multi_head"),
    "multi-head, sequence first, heads folded in the batch": (seeded(lambda: SequenceFirstHeads(16, 4)), "multi_head"),
    "multi-head, nn.MultiheadAttention inside": (seeded(lambda: TorchSelfAttention(16, 4)), "multi_head"),
    "multi-head, nn.MultiheadAttention itself": (
        seeded(lambda: nn.MultiheadAttention(16, 4, batch_first=True)),
        "multi_head",
    ),
    "causal multi-head, fused c_attn and dropout": (seeded(lambda: CausalSelfAttention(16, 4)), "causal_multi_head"),
    "causal multi-head, heads in a ModuleList": (seeded(lambda: CausalHeadsInAList(16, 4)), "causal_multi_head"),
    "causal multi-head, F.scaled_dot_product_attention": (seeded(lambda: CausalFused(16, 4)), "causal_multi_head"),
    "causal multi-head, nn.MultiheadAttention with a mask": (
        seeded(lambda: MaskedTorchAttention(16, 4)),
        "causal_multi_head",
    ),
    "encoder block, post-norm with dropout": (seeded(lambda: PostNormEncoderLayer(16, 4, 32)), "encoder_block"),
    "encoder block, pre-norm ViT with GELU": (seeded(lambda: ViTBlock(16, 4)), "encoder_block"),
    "encoder block, pre-norm with nn.MultiheadAttention": (
        seeded(lambda: PreNormEncoder(16, 4, 32)),
        "encoder_block",
    ),
    "encoder block, nn.TransformerEncoderLayer": (
        seeded(lambda: nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)),
        "encoder_block",
    ),
    "causal block, GPT-2": (seeded(lambda: GPT2Block(16, 4)), "causal_block"),
    "causal block, heads in a ModuleList and ReLU": (seeded(lambda: TinyGPTBlock(16, 4)), "causal_block"),
    "causal block, nn.TransformerEncoderLayer with a mask": (seeded(lambda: MaskedEncoderLayer(16, 4)), "causal_block"),
    "decoder block, post-norm": (seeded(lambda: PostNormDecoderLayer(16, 4, 32)), "decoder_block"),
    "decoder block, pre-norm with nn.MultiheadAttention": (seeded(lambda: PreNormDecoderBlock(16, 4)), "decoder_block"),
    "decoder block, nn.TransformerDecoderLayer with a mask": (seeded(lambda: TorchDecoder(16, 4)), "decoder_block"),
    "sinusoidal, buffer and dropout": (seeded(lambda: PositionalEncoding(16)), "sinusoidal"),
    "sinusoidal, stacked sines and cosines": (add_sinusoids, "sinusoidal"),
    "sinusoidal, loops": (add_sinusoids_loops, "sinusoidal"),
    "sinusoidal, NumPy": (add_sinusoids_numpy, "sinusoidal"),
    "learned positions, nn.Embedding": (seeded(lambda: LearnedPositions(128, 16)), "learned_positions"),
    "learned positions, nn.Parameter and dropout": (seeded(lambda: PositionTable(128, 16)), "learned_positions"),
    "learned positions, one-hot positions": (seeded(lambda: OneHotPositions(128, 16)), "learned_positions"),
    "rope, halves": (rope_halves, "rope"),
    "rope, neighbouring pairs": (rope_pairs, "rope"),
    "rope, complex numbers": (rope_complex, "rope"),
    "rope, module with cached cosines": (seeded(lambda: RotaryEmbedding(16)), "rope"),
    "causal mask, boolean triangle": (causal_tril, "causal_mask"),
    "causal mask, True hides": (causal_hidden_triu, "causal_mask"),
    "causal mask, -inf above the diagonal": (causal_negative_infinity, "causal_mask"),
    "causal mask, compared indices": (causal_compared, "causal_mask"),
    "causal mask, nested lists of ones": (causal_ints, "causal_mask"),
    "causal mask, NumPy with four axes": (causal_numpy_four_axes, "causal_mask"),
    "causal mask, queries at the end of the keys": (causal_rectangular, "causal_mask"),
    "padding mask, True keeps": (padding_kept, "padding_mask"),
    "padding mask, four axes": (padding_four_axes, "padding_mask"),
    "padding mask, True hides": (padding_hidden, "padding_mask"),
    "padding mask, -inf at the keys": (padding_negative_infinity, "padding_mask"),
    "padding mask, one row a query": (padding_expanded, "padding_mask"),
}
