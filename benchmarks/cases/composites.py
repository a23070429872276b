"""Sums, groups of keys and latents beside transformers' modules, and modules with a latent cache or an output gate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import regard as rg
from benchmarks.case import Aim, BenchSettings, Case, Side, random_inputs
from benchmarks.peers import composites as peers
from benchmarks.peers.package import TRANSFORMERS

HEADS, WIDTH, LENGTH = 8, 64, 4096
#: Tokens of a segment of Infini-attention.
SEGMENT = 512
SAME = (Aim("time", 1.1),)


def cases(setting: BenchSettings) -> Iterator[Case]:
    """One row for each mechanism; transformers' module, or its formula on torch's fused kernel."""
    if setting.device == "cuda":
        return
    yield _differential(setting)
    infini = _built("infini", num_heads=HEADS, size=SEGMENT)
    loop = Side("segments in a loop", partial(peers.segments, infini, SEGMENT), SAME)
    yield _case(setting, "infini", infini, loop)
    linformer = _built("linformer", length=LENGTH, num_groups=256)
    yield _case(
        setting, "linformer", linformer, Side("projections and SDPA", partial(peers.projected, linformer), SAME)
    )
    latents = _built("perceiver", head_dim=WIDTH, num_heads=HEADS, num_latents=256)
    yield _case(setting, "perceiver", latents, Side("SDPA twice", partial(peers.through_latents, latents), SAME))
    nystrom = _built("nystrom", num_landmarks=64)
    theirs = Side("Nystromformer", partial(peers.nystromformer, nystrom), SAME, TRANSFORMERS, tolerance=1e-3)
    yield _case(setting, "nystrom", nystrom, theirs)
    yield _nsa(setting)
    yield _latent_cache(setting)
    yield _output_gate(setting)


def _built(name: str, **arguments: Any) -> Any:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        return rg.mechanism(name).build(**arguments).eval()


def _case(setting: BenchSettings, name: str, attention: Any, side: Side) -> Case:
    return Case(
        group="composites",
        work=f"{name}, n = {LENGTH:,}, {HEADS} heads of {WIDTH}",
        inputs=setting.inputs(*[(1, HEADS, LENGTH, WIDTH)] * 3),
        mechanism=name,
        attention=attention,
        peers=(side,),
    )


def _differential(setting: BenchSettings) -> Case:
    attention = _built("differential", head_dim=WIDTH // 2)
    return _case(
        setting, "differential", attention, Side("DiffLlama", partial(peers.diffllama, attention), SAME, TRANSFORMERS)
    )


def _nsa(setting: BenchSettings) -> Case:
    attention = _built("nsa")
    side = Side(
        "SDPA with dense masks",
        partial(peers.nsa, attention),
        differs="its masks are made beforehand, with the blocks that Regard selects",
        witness=partial(peers.nsa, attention),
    )
    return Case(
        group="composites",
        work=f"nsa, n = {LENGTH:,}, {HEADS} heads of {WIDTH} sharing 2 key heads",
        inputs=partial(nsa_inputs, setting),
        mechanism="nsa",
        ours=partial(gated, attention),
        peers=(side,),
    )


def nsa_inputs(setting: BenchSettings) -> tuple[Tensor, ...]:
    """Queries, keys and values, and three gates in (0, 1)."""
    shapes = (1, HEADS, LENGTH, WIDTH), (1, 2, LENGTH, WIDTH), (1, 2, LENGTH, WIDTH), (1, HEADS, LENGTH, 3)
    *tensors, gates = random_inputs(shapes, setting.device, setting.dtype)
    return *tensors, gates.sigmoid()


def gated(attention: Any, *inputs: Tensor) -> Callable[..., rg.types.AttentionOutput]:
    """`regard.attend` with the gates of the call."""
    return lambda q, k, v, gates: attention(q, k, v, gates=gates)


def _latent_cache(setting: BenchSettings) -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes: Any = {"latent_dim": 256, "head_dim": 64, "rotary_dim": 32}
        layer = rg.nn.MultiHeadLatentAttention(1024, 16, **sizes).eval()
    return Case(
        group="composites",
        work=f"mla, the next token after {LENGTH:,}, 16 heads, latents of 256",
        inputs=setting.inputs((1, LENGTH, 1024), (1, 1, 1024)),
        mechanism="mla",
        ours=partial(next_token, layer),
        peers=(Side("DeepSeek-V3", partial(peers.deepseek, layer, LENGTH), (Aim("faster", 3),), TRANSFORMERS),),
    )


def next_token(layer: Any, *inputs: Tensor) -> Callable[..., Tensor]:
    """One token with a latent cache of the prompt."""
    with torch.no_grad():
        cache = layer.advance(inputs[0])[1]
    return lambda prompt, token: layer.advance(token, cache)[0]


def _output_gate(setting: BenchSettings) -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = rg.nn.MultiHeadAttention(512, HEADS, bias=False, is_causal=True, output_gate=True).eval()
    return Case(
        group="composites",
        work=f"gated output, n = 2,048, {HEADS} heads of {WIDTH}",
        inputs=setting.inputs((1, 2048, 512)),
        mechanism="gated_output",
        ours=partial(module, layer),
        peers=(Side("Qwen3-Next", partial(peers.qwen3_next, layer), SAME, TRANSFORMERS),),
    )


def module(layer: Any, *inputs: Tensor) -> Callable[..., Tensor]:
    """The output of a module."""
    return lambda *inputs: layer(*inputs).output
