"""Recurrent layers: Gated DeltaNet and Mamba-2 beside the torch code of transformers, and linear growth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

import regard as rg
from benchmarks.case import Aim, BenchSettings, Case, Side, random_inputs
from benchmarks.peers import recurrent
from benchmarks.peers.package import TRANSFORMERS

#: Heads and width of Gated DeltaNet, as in Qwen3-Next, with half its heads.
HEADS, WIDTH = 16, 128
#: Heads, width of their values and of the state, as in the Mamba-2 of 130 million parameters.
SSM = (24, 64, 128)
FORWARD, LEARNING = (Aim("faster", 3),), (Aim("faster", 2),)


def cases(setting: BenchSettings) -> Iterator[Case]:
    """A prompt of 4,096 tokens, training on 2,048, one token, and longer prompts."""
    if setting.device == "cuda":
        return
    yield _delta(setting, 4096, (Side("transformers, chunks", recurrent.chunked_delta, FORWARD, TRANSFORMERS),))
    yield _delta(setting, 1024, (Side("transformers, token by token", recurrent.delta_by_token, (), TRANSFORMERS),))
    learning = Side("transformers, chunks", recurrent.chunked_delta, LEARNING, TRANSFORMERS, tolerance=1e-3)
    yield _delta(setting, 2048, (learning,), learns=True)
    yield _next_delta(setting)
    yield _state_space(setting, 4096, (Side("transformers, chunks", recurrent.chunked_scan, FORWARD, TRANSFORMERS),))
    for n in (16_384, 65_536):
        yield _delta(setting, n, ())


def _delta(setting: BenchSettings, n: int, peers: tuple[Side, ...], learns: bool = False) -> Case:
    what = "Gated DeltaNet" + (", forward and backward" if learns else "")
    heads = HEADS if n <= 4096 else 2
    return Case(
        group="recurrent",
        work=f"{what}, n = {n:,}, {heads} heads of {WIDTH}",
        inputs=partial(delta_inputs, setting, n, heads),
        mechanism="gated_deltanet",
        ours=delta,
        peers=peers,
        learns=learns,
        series="Gated DeltaNet, 2 heads" if n > 4096 else "",
        length=n,
    )


def delta_inputs(setting: BenchSettings, n: int, heads: int = HEADS) -> tuple[Tensor, ...]:
    """Queries, keys, values, log-decays of about -0.1, and betas."""
    shapes = ((1, heads, n, WIDTH),) * 3 + ((1, heads, n),) * 2
    q, k, v, decay, beta = random_inputs(shapes, setting.device, setting.dtype)
    return q, k, v, -0.1 * F.softplus(decay), beta.sigmoid()


def delta(*inputs: Tensor) -> Callable[..., rg.types.AttentionOutput]:
    """Gated DeltaNet by `regard.attend`."""
    attention = rg.Attention(transition=rg.transitions.GatedDelta())
    return lambda q, k, v, decay, beta: attention(q, k, v, log_decay=decay, beta=beta)


def _next_delta(setting: BenchSettings) -> Case:
    return Case(
        group="recurrent",
        work=f"Gated DeltaNet, the next token, {HEADS} heads of {WIDTH}",
        inputs=partial(delta_inputs, setting, 1),
        mechanism="gated_deltanet",
        ours=next_delta,
        peers=(Side("transformers", recurrent.next_delta, FORWARD, TRANSFORMERS),),
    )


def next_delta(*inputs: Tensor) -> Callable[..., Tensor]:
    """One token after many, from a state of ones."""
    attention = rg.Attention(transition=rg.transitions.GatedDelta())
    cache = rg.caches.RecurrentCache(torch.ones(1, HEADS, WIDTH, WIDTH), 100)

    def run(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        return attention(q, k, v, log_decay=decay, beta=beta, cache=cache).output

    return run


def _state_space(setting: BenchSettings, n: int, peers: tuple[Side, ...]) -> Case:
    heads, width, state = SSM
    return Case(
        group="recurrent",
        work=f"Mamba-2, n = {n:,}, {heads} heads of {width}, states of {state}",
        inputs=partial(state_space_inputs, setting, n),
        mechanism="mamba_2",
        ours=state_space,
        peers=peers,
        length=n,
    )


def state_space_inputs(setting: BenchSettings, n: int) -> tuple[Tensor, ...]:
    """C and B, the same for all heads, x, and steps of about 0.1."""
    heads, width, state = SSM
    shapes = ((1, 1, n, state),) * 2 + ((1, heads, n, width), (1, heads, n))
    c, b, x, step = random_inputs(shapes, setting.device, setting.dtype)
    return c, b, x, 0.1 * F.softplus(step)


def state_space(*inputs: Tensor) -> Callable[..., Tensor]:
    """Mamba-2 by `regard.attend`, with one B and C for all heads."""
    attention = rg.Attention(rg.Dot(1.0), transition=rg.transitions.StateSpace(-torch.ones(SSM[0])))

    def run(c: Tensor, b: Tensor, x: Tensor, step: Tensor) -> Tensor:
        c, b = (t.expand(-1, SSM[0], -1, -1) for t in (c, b))
        return attention(c, b, x, step=step).output

    return run
