"""Peers from the package index, each with settings that compute the same mechanism as Regard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard as rg
from benchmarks.case import Computes


def local_attention(size: int, *inputs: Tensor) -> Callable[..., Tensor]:
    """A causal window of exactly `size` keys before the query, and its own key, over buckets of `size`."""
    from local_attention import LocalAttention

    return LocalAttention(size, causal=True, exact_windowsize=True, autopad=True, use_rotary_pos_emb=False)


def linear_transformer(bucket: int, *inputs: Tensor) -> Callable[..., Tensor]:
    """Causal linear attention of softmax(q) and exp(k) by buckets."""
    from linear_attention_transformer.linear_attention_transformer import causal_linear_attn

    return lambda q, k, v: causal_linear_attn(q, k, v, bucket_size=bucket)


def naive_linear(*inputs: Tensor) -> Callable[..., Tensor]:
    """The reference of flash-linear-attention on CPU, token by token, on elu + 1."""
    from fla.ops.linear_attn.naive import naive_recurrent_linear_attn

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (F.elu(q) + 1, F.elu(k) + 1, v))
        return naive_recurrent_linear_attn(q, k, v, normalize=True)[0].transpose(1, 2)

    return run


def performer(attention: rg.Attention, *inputs: Tensor) -> Callable[..., Tensor]:
    """The causal attention of performer-pytorch, with the random features of Regard."""
    from performer_pytorch import FastAttention

    features: Any = attention.score.features  # type: ignore[attr-defined]
    layer = FastAttention(dim_heads=features.head_dim, nb_features=features.num_features, causal=True)
    layer.projection_matrix.copy_(features.frequencies)
    return layer


def exact_performer(attention: rg.Attention, *inputs: Tensor) -> Callable[..., Tensor]:
    """The same functions of the package, without the 1e-4 that it adds to every feature."""
    from performer_pytorch.performer_pytorch import causal_linear_attention_noncuda, softmax_kernel

    frequencies = attention.score.features.frequencies  # type: ignore[attr-defined]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = softmax_kernel(q, projection_matrix=frequencies, is_query=True, eps=0.0)
        k = softmax_kernel(k, projection_matrix=frequencies, is_query=False, eps=0.0)
        return causal_linear_attention_noncuda(q, k, v, eps=0.0)

    return run


def keras_additive(attention: rg.Attention, *inputs: Tensor) -> Computes:
    """The layer of keras on torch, after the two projections that keras leaves to its users."""
    import keras

    score: Any = attention.score
    layer = keras.layers.AdditiveAttention()
    width = score.direction.shape[0]
    layer.build([(1, None, width), (1, None, width), (1, None, width)])
    layer.scale.assign(score.direction.detach())
    weights = [w.detach().clone().requires_grad_() for w in (score.query.weight, score.key.weight)]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return layer([F.linear(q[:, 0], weights[0]), v[:, 0], F.linear(k[:, 0], weights[1])])[:, None]

    return Computes(run, (layer.scale.value, *weights))


def joey_additive(attention: rg.Attention, *inputs: Tensor) -> Computes:
    """The attention of JoeyNMT, one query after another, as in its decoder."""
    from joeynmt.attention import BahdanauAttention

    score: Any = attention.score
    hidden, width = score.query.weight.shape
    layer = BahdanauAttention(hidden, width, width)
    layer.query_layer.weight.data = score.query.weight.detach().clone()
    layer.key_layer.weight.data = score.key.weight.detach().clone()
    direction = score.direction.detach().clone().requires_grad_()
    del layer.energy_layer.weight  # the parameter has one row; its gradient would have another shape
    mask = torch.ones(1, 1, inputs[1].shape[2], dtype=torch.bool)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layer.energy_layer.weight = direction[None]
        layer.compute_proj_keys(k[:, 0])  # its values have the width of keys
        return torch.cat([layer(query, mask, v[:, 0])[0] for query in q[:, 0].split(1, 1)], 1)[:, None]

    return Computes(run, (direction, layer.query_layer.weight, layer.key_layer.weight))


def direct_additive(attention: rg.Attention, *inputs: Tensor) -> Computes:
    """softmax(v . tanh(W q_i + U k_j)) values by the formula, with all I x J x hidden numbers at once."""
    score: Any = attention.score

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key = score.prepare(q, k)
        hidden = torch.tanh(query[:, :, :, None] + key[:, :, None])
        return (hidden @ score.direction).softmax(-1) @ v

    return Computes(run, tuple(p for p in attention.parameters()))


def x_transformers(module: nn.Module, num_heads: int) -> nn.Module:
    """The attention layer of x-transformers on the fused kernel, with the weights of a module of Regard."""
    from x_transformers.x_transformers import Attention

    ours: Any = module
    width = ours.query.in_features
    layer: Any = Attention(dim=width, heads=num_heads, dim_head=width // num_heads, flash=True)
    with torch.no_grad():
        for theirs, mine in (("to_q", "query"), ("to_k", "key"), ("to_v", "value"), ("to_out", "output")):
            getattr(layer, theirs).weight.copy_(getattr(ours, mine).weight)
    return layer
