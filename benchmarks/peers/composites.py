"""Peers of composites: modules of transformers with given tensors, and the same formulas on torch's fused kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard as rg
from benchmarks.peers.transformers import Given, flat, heads

sdpa = F.scaled_dot_product_attention


def _given(layer: Any, names: tuple[str, str, str]) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Replace three projections of a layer; the function sets what they return."""
    projections = [Given() for _ in names]
    for name, projection in zip(names, projections, strict=True):
        setattr(layer, name, projection)

    def give(*tensors: Tensor) -> None:
        for projection, x in zip(projections, tensors, strict=True):
            projection.x = flat(x)

    return give


def diffllama(attention: rg.composites.Sum, *inputs: Tensor) -> Callable[..., Tensor]:
    """The layer of DiffLlama without its norm; its heads are all of map 1, then all of map 2."""
    from transformers import DiffLlamaConfig
    from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention

    _, H, n, width = inputs[0].shape
    sizes: Any = {"hidden_size": H * width, "num_attention_heads": 2 * H, "num_key_value_heads": 2 * H}
    sizes |= {"head_dim": width // 2, "attn_implementation": "sdpa"}
    config = DiffLlamaConfig(**sizes)
    layer: Any = DiffLlamaAttention(config, 0).eval()
    give = _given(layer, ("q_proj", "k_proj", "v_proj"))
    layer.groupnorm, layer.o_proj, factors = nn.Identity(), nn.Identity(), attention.factors
    assert isinstance(factors, rg.composites.DifferenceFactors)
    layer.lambda_init = factors.initial
    layer.lambda_q1.data, layer.lambda_k1.data = factors.of_first.data
    layer.lambda_q2.data, layer.lambda_k2.data = factors.of_second.data
    no_turn = inputs[0].new_ones(1, n, width // 2), inputs[0].new_zeros(1, n, width // 2)

    def run(*tensors: Tensor) -> Tensor:
        give(*(torch.cat(x.chunk(2, -1), 1) for x in tensors))
        output = layer(flat(tensors[0]), no_turn, None)[0]
        return heads(output, H) / (1 - layer.lambda_init)

    return run


def segments(attention: rg.composites.Sum, size: int, *inputs: Tensor) -> Callable[..., Tensor]:
    """Infini-attention segment by segment: SDPA in each, and the memory of the paper."""
    factors: Any = attention.factors
    gate = factors.logits.sigmoid()[:, None, None]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outputs, memory, norm = [], 0.0, 0.0
        for q_s, k_s, v_s in zip(q.split(size, 2), k.split(size, 2), v.split(size, 2), strict=True):
            phi_q, phi_k = F.elu(q_s) + 1, F.elu(k_s) + 1
            local = (1 - gate) * sdpa(q_s, k_s, v_s, is_causal=True)
            outputs.append(local if not outputs else local + gate * (phi_q @ memory) / (phi_q @ norm))
            memory, norm = memory + phi_k.mT @ v_s, norm + phi_k.sum(2)[..., None]
        return torch.cat(outputs, 2)

    return run


def projected(attention: rg.composites.Grouped, *inputs: Tensor) -> Callable[..., Tensor]:
    """SDPA to projected keys and values."""
    groups: Any = attention.groups
    return lambda q, k, v: sdpa(q, groups.of_keys @ k, groups.of_values @ v)


def through_latents(attention: rg.composites.ThroughLatents, *inputs: Tensor) -> Callable[..., Tensor]:
    """SDPA from the latents, and SDPA to the latents."""
    return lambda q, k, v: sdpa(q, latents := attention.latents.expand(len(q), -1, -1, -1), sdpa(latents, k, v))


def nystromformer(attention: rg.composites.Nystrom, *inputs: Tensor) -> Callable[..., Tensor]:
    """The layer of Nystromformer without its convolution; each head starts its inverse by itself."""
    from transformers import NystromformerConfig
    from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

    _, H, n, width = inputs[0].shape
    sizes: Any = {"hidden_size": H * width, "num_attention_heads": H, "num_landmarks": attention.num_landmarks}
    layer: Any = NystromformerSelfAttention(NystromformerConfig(**sizes, segment_means_seq_len=n)).eval()
    layer.init_option, layer.conv_kernel_size = "exact", None
    give = _given(layer, ("query", "key", "value"))

    def run(*tensors: Tensor) -> Tensor:
        give(*tensors)
        return heads(layer(flat(tensors[0]))[0], H)

    return run


def nsa(attention: rg.composites.Sum, *inputs: Tensor) -> Callable[..., Tensor]:
    """The three branches with dense masks in SDPA; the selection itself is that of Regard, made beforehand."""
    q, k = inputs[:2]
    grouped, selected, near = attention.parts
    positions = rg.types.Positions.aligned_to_end(q.shape[2], k.shape[2])
    selection: Any = selected.selection
    chosen = selection.choose(q, k, positions, rg.causal()) & rg.causal()
    grid = rg.types.Grid.whole(positions, q.shape[0], q.shape[1], q.shape[2])
    masks = [mask.allowed(grid) for mask in (chosen, near.mask)]  # type: ignore[union-attr]
    groups: Any = grouped.groups
    ends = torch.arange(groups.count(k.shape[2])) * groups.step + groups.size - 1
    ended = ends <= torch.arange(q.shape[2])[:, None]

    def run(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        options: Any = {"enable_gqa": True}
        branches = [sdpa(q, groups.keys(k), groups.keys(v), attn_mask=ended, **options).nan_to_num()]
        branches += [sdpa(q, k, v, attn_mask=mask, **options) for mask in masks]
        return sum(gate * branch for gate, branch in zip(gates.split(1, -1), branches, strict=True))  # type: ignore[return-value]

    return run


def deepseek(ours: Any, length: int, *inputs: Tensor) -> Callable[..., Tensor]:
    """One token of DeepSeek-V3's layer, after a cache of `length` latents."""
    from transformers import DeepseekV3Config, DynamicCache
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    (_, D, C), E, R = ours.attention.score.weight.shape, ours.value.shape[-1], ours.rotary_dim
    widths = {"kv_lora_rank": C, "qk_rope_head_dim": R, "qk_nope_head_dim": D, "v_head_dim": E, "q_lora_rank": None}
    sizes: Any = {"hidden_size": ours.latent.in_features, "num_attention_heads": ours.num_heads, **widths}
    sizes |= {"num_key_value_heads": ours.num_heads, "rope_interleave": False, "attn_implementation": "sdpa"}
    config = DeepseekV3Config(**sizes)
    layer: Any = DeepseekV3Attention(config, 0).eval()
    layer.q_proj, layer.kv_a_proj_with_mqa, layer.kv_a_layernorm = ours.query, ours.latent, ours.latent_norm
    layer.kv_b_proj.weight.data = torch.cat((ours.attention.score.weight, ours.value.mT), 1).flatten(0, 1).detach()
    layer.o_proj, cache = ours.output, DynamicCache()
    prompt, _ = inputs

    def angles(start: int, count: int) -> tuple[Tensor, Tensor]:
        turns = torch.arange(start, start + count)[:, None] * ours.position.frequencies().float()
        return torch.cat((turns.cos(), turns.cos()), -1)[None], torch.cat((turns.sin(), turns.sin()), -1)[None]

    layer(prompt, angles(0, length), None, past_key_values=cache)

    def run(_: Tensor, token: Tensor) -> Tensor:
        output = layer(token, angles(length, 1), None, past_key_values=cache)[0]
        cache.crop(-1)
        return output

    return run


def qwen3_next(ours: Any, *inputs: Tensor) -> Callable[..., Tensor]:
    """The attention layer of Qwen3-Next with the weights of ours, without its norms of queries and keys."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

    n, H, D = inputs[0].shape[1], ours.num_heads, ours.head_dim
    sizes: Any = {"hidden_size": H * D, "num_attention_heads": H, "num_key_value_heads": H, "head_dim": D}
    sizes |= {"attn_implementation": "sdpa"}
    layer: Any = Qwen3NextAttention(Qwen3NextConfig(**sizes), 0).eval()
    both = [p.weight.detach().unflatten(0, (H, D)) for p in (ours.query, ours.gate)]
    layer.q_proj.weight.data = torch.cat(both, 1).flatten(0, 1)
    layer.k_proj, layer.v_proj, layer.o_proj = ours.key, ours.value, ours.output
    layer.q_norm = layer.k_norm = nn.Identity()
    no_turn = inputs[0].new_ones(1, n, D), inputs[0].new_zeros(1, n, D)
    return lambda x: layer(x, no_turn, None)[0]
