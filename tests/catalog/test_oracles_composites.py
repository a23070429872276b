"""Oracles of composites: transformers' own modules, torch's kernels, and recurrences in plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import DiffLlamaConfig, NystromformerConfig, PerceiverConfig
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention
from transformers.models.perceiver.modeling_perceiver import PerceiverSelfAttention

import regard as rg
from oracles import FLOAT32, ORACLES, Says, by_torch, close, flat, heads, oracle


def diffllama(attention, q, k, v):
    """transformers' module with our queries, keys, values and lambda; its heads are all of map 1, then all of map 2."""
    (_, H, I, _), D = q.shape, q.shape[3] // 2
    sizes = {"hidden_size": 2 * H * D, "num_attention_heads": 2 * H, "num_key_value_heads": 2 * H, "head_dim": D}
    layer = DiffLlamaAttention(DiffLlamaConfig(**sizes, attn_implementation="eager"), layer_idx=2).to(q.dtype)
    layer.q_proj, layer.k_proj, layer.v_proj = (Says(torch.cat(x.chunk(2, -1), 1)) for x in (q, k, v))
    layer.o_proj, layer.lambda_init = nn.Identity(), attention.factors.initial
    names = ("lambda_q1", "lambda_k1"), ("lambda_q2", "lambda_k2")
    for (a, b), vectors in zip(names, (attention.factors.of_first, attention.factors.of_second), strict=True):
        getattr(layer, a).data, getattr(layer, b).data = vectors.data
    future = torch.full((I, I), -torch.inf, dtype=q.dtype).triu(1)[None, None]
    no_turn = torch.ones(1, I, D, dtype=q.dtype), torch.zeros(1, I, D, dtype=q.dtype)

    def run():
        output, weights = layer(flat(q), no_turn, future)
        factor = attention.factors({})[1]
        return heads(output, H), weights[:, :H] + factor * weights[:, H:]

    return layer, run


@oracle("differential", FLOAT32)
def test_differential_is_diffllama_before_its_norm(attention, q, k, v):
    layer, run = diffllama(attention, q, k, v)
    layer.groupnorm = nn.Identity()
    output, weights = run()
    return output / (1 - layer.lambda_init), weights


@torch.no_grad()
def test_differential_with_the_norm_of_heads_is_diffllama():
    attention, q, k, v = rg.mechanism("differential").example(seed=3)
    _, run = diffllama(attention, q, k, v)
    output = attention(q, k, v).output
    close(0.4 * F.rms_norm(output, output.shape[-1:], eps=1e-5), run()[0], FLOAT32)


def memory_of_segments(attention, q, k, v, size):
    """Infini-attention segment by segment with its memory, equations 1 to 10 of the paper, in NumPy."""
    q, k, v = (x.numpy() for x in (q, k, v))
    gates = 1 / (1 + np.exp(-attention.factors.logits.numpy()))
    output = np.zeros((*q.shape[:3], v.shape[3]))
    for b, h in np.ndindex(q.shape[:2]):
        memory, norm = np.zeros((q.shape[3], v.shape[3])), np.zeros(q.shape[3])
        for start in range(0, q.shape[2], size):
            q_s, k_s, v_s = (x[b, h, start : start + size] for x in (q, k, v))
            scores = np.where(np.tri(len(q_s), dtype=bool), q_s @ k_s.T / np.sqrt(q.shape[3]), -np.inf)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            local = weights / weights.sum(1, keepdims=True) @ v_s
            phi_q, phi_k = (np.where(x > 0, x + 1, np.exp(x)) for x in (q_s, k_s))
            recalled = phi_q @ memory / (phi_q @ norm)[:, None] if start else 0.0
            output[b, h, start : start + size] = gates[h] * recalled + (1 - gates[h]) * local
            memory, norm = memory + phi_k.T @ v_s, norm + phi_k.sum(0)
    return output


@oracle("infini")
def test_infini_is_a_memory_of_segments(attention, q, k, v):
    return memory_of_segments(attention, q, k, v, 5)


@torch.no_grad()
def test_infini_mixes_as_infini_transformer_pytorch():
    """Its memory, from the second segment on: in the first, it leaves the gate out."""
    memory_class = pytest.importorskip(
        "infini_transformer_pytorch.infini_transformer", reason="infini-transformer-pytorch is not installed"
    ).FastweightMemory
    attention, q, k, v = rg.mechanism("infini").example(queries=10)
    attention.factors.logits.data.normal_()
    theirs = memory_class(4)
    theirs.head_gates.data = -attention.factors.logits.data
    first, second = slice(0, 5), slice(5, 10)
    local = by_torch(q[:, :, second], k[:, :, second], v[:, :, second], is_causal=True)[0]
    memories = theirs.create_new_memories(k[:, :, first], v[:, :, first])
    output = theirs.retrieve_and_add_to_output(local, q[:, :, second], memories)
    close(attention(q, k, v).output[:, :, second], output, 1e-8)


@oracle("linformer")
def test_linformer_is_torch_attention_to_projected_tokens(attention, q, k, v):
    E, F_ = (matrix[:, : k.shape[2]] for matrix in (attention.groups.of_keys, attention.groups.of_values))
    keys, values = torch.einsum("mj,bhjd->bhmd", E, k), torch.einsum("mj,bhjd->bhmd", F_, v)
    output, weights = by_torch(q, keys, values)
    return output, weights @ F_


@oracle("pooled_keys")
def test_pooled_keys_are_those_of_torch_average_pooling(attention, q, k, v):
    return by_pooling(q, k, v, 4, 4)


@oracle("pooled_keys", arguments={"size": 6, "stride": 2})
def test_overlapping_pooled_keys_are_those_of_torch_average_pooling(attention, q, k, v):
    return by_pooling(q, k, v, 6, 2)


@oracle("pooled_keys", arguments={"size": 5, "stride": 2})
def test_pooled_keys_of_unequal_overlap_are_those_of_torch_average_pooling(attention, q, k, v):
    return by_pooling(q, k, v, 5, 2)


@oracle("pooled_keys", arguments={"size": 3, "stride": 4})
def test_pooled_keys_with_gaps_are_those_of_torch_average_pooling(attention, q, k, v):
    return by_pooling(q, k, v, 3, 4)


def by_pooling(q, k, v, size, stride):
    """Causal attention to blocks that have ended; the first queries have none and get zeros."""
    pooled = [F.avg_pool1d(x.flatten(0, 1).mT, size, stride).mT.unflatten(0, x.shape[:2]) for x in (k, v)]
    ends = torch.arange(pooled[0].shape[2]) * stride + size - 1
    allowed = ends <= torch.arange(q.shape[2])[:, None]
    output, weights = by_torch(q, *pooled, mask=allowed)
    spread = F.avg_pool1d(torch.eye(k.shape[2], dtype=k.dtype), size, stride).T
    return output.nan_to_num(), weights.nan_to_num() @ spread


@oracle("nystrom", FLOAT32)
def test_nystrom_is_the_module_of_transformers(attention, q, k, v):
    (_, H, I, D), M = q.shape, attention.num_landmarks
    sizes = {"hidden_size": H * D, "num_attention_heads": H, "num_landmarks": M, "segment_means_seq_len": I}
    layer = NystromformerSelfAttention(NystromformerConfig(**sizes)).eval().to(q.dtype)
    nn.init.zeros_(layer.conv.weight)  # its convolution of the values is no attention
    layer.init_option = "exact"  # each head by itself; its config cannot be told so
    layer.query, layer.key, layer.value = (Says(x) for x in (q, k, v))
    one_hot = torch.eye(I, dtype=q.dtype).expand(*q.shape[:2], I, I)
    output = heads(layer(flat(q))[0], H)
    columns = []
    for part in one_hot.split(D, -1):  # the weights are its outputs for one-hot values
        layer.value = Says(part)
        columns.append(heads(layer(flat(q))[0], H))
    return output, torch.cat(columns, -1)


@oracle("perceiver", FLOAT32)
def test_perceiver_is_two_cross_attentions_of_transformers(attention, q, k, v):
    (_, H, _, D), latents = q.shape, attention.latents.expand(len(q), -1, -1, -1)

    def cross(query, key, value):
        layer = PerceiverSelfAttention(PerceiverConfig(), True, H * D, H * D, H, H * D, H * D).eval().to(q.dtype)
        layer.query, layer.key, layer.value = Says(query), Says(key), Says(value)
        output, weights = layer(flat(query), inputs=flat(key), output_attentions=True)
        return heads(output, H), weights

    read, read_weights = cross(latents, k, v)
    output, write_weights = cross(q, latents, read)
    return output, write_weights @ read_weights


def nsa_row(q, k, i, size, count, near, local):
    """Native sparse attention of one query of a group, step by step as in flash-linear-attention: three rows of W.

    `q` are the queries (heads of the group, D) at position i, and `k` all keys.
    """

    def softmax(keys, allowed):
        weights = np.where(allowed, np.exp(q @ keys.T / np.sqrt(q.shape[1])), 0.0)
        return weights / np.maximum(weights.sum(1, keepdims=True), 1e-300)

    n, own = len(k), i // size
    means = np.stack([k[m * size : (m + 1) * size].mean(0) for m in range(n // size)])
    has_ended = (np.arange(len(means)) + 1) * size <= i + 1
    compressed = softmax(means, has_ended)
    importance = {m: compressed[:, m].sum() if m < len(means) else 0.0 for m in range(own + 1)}
    forced = {0, *range(max(0, own - local + 1), own + 1)}
    ranked = sorted(importance, key=lambda m: (m not in forced, -importance[m]))[:count]
    j = np.arange(n)
    selected = softmax(k, np.isin(j // size, ranked) & (j <= i))
    window = softmax(k, (j <= i) & (j > i - near))
    return np.repeat(compressed, size, 1) / size, selected, window


@torch.no_grad()
def test_nsa_is_the_three_branches_row_by_row():
    entry = rg.mechanism("nsa")
    attention, q, k, v = entry.example()
    gates = entry.tensors(attention, q, k, v)["gates"]
    seen = attention(q, k, v, gates=gates)
    expected = np.zeros(seen.weights.shape)
    for b, g, i in np.ndindex(2, 2, 24):
        own = slice(2 * g, 2 * g + 2)
        rows = nsa_row(q[b, own, i].numpy(), k[b, g].numpy(), i, 4, 3, 5, 1)
        expected[b, own, i] = sum(gates[b, own, i, n, None].numpy() * row for n, row in enumerate(rows))
    close(seen.weights.dense(), expected)
    close(seen.output, expected @ v.repeat_interleave(2, 1).numpy())


ORACLES["nsa"] = [nsa_row]
