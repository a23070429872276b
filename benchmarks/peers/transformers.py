"""Peers from transformers: its layers, with given queries, keys and values in place of projections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import regard as rg
from benchmarks.case import Computes


class Given(nn.Module):
    """A projection that returns a given tensor, as (B, n, H D), or (n, B, H D) with `length_first`."""

    def __init__(self, length_first: bool = False) -> None:
        super().__init__()
        self.length_first = length_first
        self.x = torch.empty(0)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.x.transpose(0, 1) if self.length_first else self.x


class GivenGlobals(Given):
    """The projection of Longformer for the queries of global tokens, (count, B, H D)."""

    count = 0

    def forward(self, hidden: Tensor) -> Tensor:
        return self.x.transpose(0, 1)[: self.count].clone()


def flat(x: Tensor) -> Tensor:
    """(B, H, n, D) -> (B, n, H D), the layout of layers."""
    return x.transpose(1, 2).flatten(2)


def heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, n, H D) -> (B, H, n, D)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


class _Module(nn.Module):
    """The attributes that attention functions of transformers read from the calling module."""

    def __init__(self, groups: int, is_causal: bool) -> None:
        super().__init__()
        self.num_key_value_groups, self.is_causal = groups, is_causal
        self.training = False


def sdpa_window(size: int, *inputs: Tensor) -> Callable[..., Tensor]:
    """The mask of Mistral's model, made once, and the function that its layers call."""
    from transformers import MistralConfig
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import create_sliding_window_causal_mask

    B, H, n, _ = inputs[0].shape
    config = MistralConfig(sliding_window=size, num_attention_heads=H)
    config._attn_implementation = "sdpa"
    mask = create_sliding_window_causal_mask(
        config=config, inputs_embeds=inputs[0].new_empty(B, n, 1), attention_mask=None, past_key_values=None
    )
    module = _Module(1, True)
    return lambda q, k, v: sdpa_attention_forward(module, q, k, v, mask)[0].transpose(1, 2)


def eager(is_causal: bool, *inputs: Tensor) -> Callable[..., Tensor]:
    """The function that layers call for `attn_implementation="eager"`."""
    from transformers.models.llama.modeling_llama import eager_attention_forward

    n, D = inputs[0].shape[2:]
    mask = inputs[0].new_full((n, n), -torch.inf).triu(1)[None, None] if is_causal else None
    module = _Module(inputs[0].shape[1] // inputs[1].shape[1], is_causal)
    return lambda q, k, v: eager_attention_forward(module, q, k, v, mask, scaling=D**-0.5)[0].transpose(1, 2)


def softcapped(cap: float, *inputs: Tensor) -> Callable[..., Tensor]:
    """The eager attention of Gemma 2."""
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    n, D = inputs[0].shape[2:]
    mask = inputs[0].new_full((n, n), -torch.inf).triu(1)[None, None]
    module = _Module(1, True)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return eager_attention_forward(module, q, k, v, mask, scaling=D**-0.5, softcap=cap)[0].transpose(1, 2)

    return run


def t5(attention: rg.Attention, *inputs: Tensor) -> Computes:
    """The self-attention of a T5 encoder, with the bias table of Regard."""
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    H, _, D = inputs[0].shape[1:]
    bias: Any = attention.bias[0]
    config = T5Config(
        d_model=H * D,
        d_kv=D,
        num_heads=H,
        relative_attention_num_buckets=bias.num_buckets,
        relative_attention_max_distance=bias.max_distance,
        is_decoder=False,
        dropout_rate=0.0,
    )
    layer: Any = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    layer.q, layer.k, layer.v, layer.o = Given(), Given(), Given(), nn.Identity()
    layer.relative_attention_bias.weight.data = bias.table.detach().clone()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layer.q.x, layer.k.x, layer.v.x = flat(q), flat(k), flat(v)
        return heads(layer(flat(q))[0], H)

    return Computes(run, (layer.relative_attention_bias.weight,))


def longformer(window: int, num_global: int, *inputs: Tensor) -> Callable[..., Tensor]:
    """The self-attention of Longformer; the first tokens are global, with shared projections. `window` is as there."""
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    B, H, n, D = inputs[0].shape
    config = LongformerConfig(
        hidden_size=H * D, num_attention_heads=H, attention_window=[window], attention_probs_dropout_prob=0.0
    )
    layer: Any = LongformerSelfAttention(config, layer_id=0)
    names = ("query", "key", "value", "query_global", "key_global", "value_global")
    for name in names:
        setattr(layer, name, GivenGlobals() if name == "query_global" else Given(length_first=True))
    layer.query_global.count = num_global
    is_global = torch.zeros(B, n, dtype=torch.bool)
    is_global[:, :num_global] = True
    padded = torch.zeros(B, n, dtype=torch.bool)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for name, x in zip(names, (q, k, v, q, k, v), strict=True):
            getattr(layer, name).x = flat(x)
        return heads(layer(flat(q), is_global * 10_000.0, padded, is_global, True)[0], H)

    return run


def bigbird(block: int, table: Tensor, *inputs: Tensor) -> Callable[..., Tensor]:
    """The block-sparse attention of BigBird on the blocks of `table` from `bigbird_table`, the same for all heads."""
    from transformers.models.big_bird.modeling_big_bird import BigBirdModel

    B, H, n, _ = inputs[0].shape
    layer: Any = _bigbird_layer(block, table.shape[1], *inputs[0].shape[1:])
    drawn = table[1:-1].numpy()
    layer._bigbird_block_rand_mask_with_head = lambda **sizes: [drawn] * H
    layer.query, layer.key, layer.value = Given(), Given(), Given()
    blocked, band, rows, columns = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(B, n), block)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layer.query.x, layer.key.x, layer.value.x = flat(q), flat(k), flat(v)
        return heads(layer(flat(q), band, rows, columns, blocked, blocked)[0], H)

    return run


def bigbird_table(block: int, length: int, count: int) -> Tensor:
    """The random blocks of transformers in training, without global and neighboring blocks, (blocks, count)."""
    layer: Any = _bigbird_layer(block, count, 1, length, 8)
    drawn = layer._bigbird_block_rand_mask(length, length, block, block, count, last_idx=-1)
    table = torch.from_numpy(drawn).long()
    return torch.cat((table[:1], table, table[-1:]))


def _bigbird_layer(block: int, count: int, num_heads: int, length: int, width: int) -> Any:
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

    config = BigBirdConfig(
        hidden_size=num_heads * width,
        num_attention_heads=num_heads,
        block_size=block,
        num_random_blocks=count,
        max_position_embeddings=length,
    )
    return BigBirdBlockSparseAttention(config, seed=3).train()  # in eval mode every random block is block 0


def cached(*inputs: Tensor) -> Callable[..., Tensor]:
    """One new token after a prompt, with the growing cache of transformers and the function its layers call."""
    from transformers import DynamicCache
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    cache, module = DynamicCache(), _Module(inputs[0].shape[1] // inputs[1].shape[1], False)
    cache.update(inputs[1][:, :, :-1], inputs[2][:, :, :-1], 0)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = cache.update(k[:, :, -1:], v[:, :, -1:], 0)
        return sdpa_attention_forward(module, q, keys, values, None)[0].transpose(1, 2)

    return run
