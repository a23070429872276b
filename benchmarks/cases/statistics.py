"""Statistics of all weights in one pass over tiles, against the kernel and against dense weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

import regard as rg
from benchmarks.case import BenchSettings, Case, Side
from benchmarks.peers import sdpa

HEADS, WIDTH, TOP, CELLS = 2, 64, 8, 512


def cases(setting: BenchSettings) -> Iterator[Case]:
    """At 8,192 tokens, with --full also at 32,768."""
    for n in (8192, 32_768) if setting.full else (8192,):
        for name, mask in (("plain", None), ("causal", rg.causal())):
            yield _case(setting, name, mask, n)


def _case(setting: BenchSettings, name: str, mask: rg.masks.Mask | None, n: int) -> Case:
    kernel = sdpa.sdpa if mask is None else sdpa.causal
    no_statistics = "it computes no statistics"
    flex = Side("FlexAttention, only forward", partial(sdpa.flex, mask), differs=no_statistics, compiles=True)
    dense = partial(eagerly, mask is not None)
    needs = 5 * HEADS * n * n * 4
    return Case(
        group="statistics",
        work=f"entropy, top {TOP}, received, {CELLS} x {CELLS} cells, {name}, n = {n:,}, {HEADS} heads of {WIDTH}",
        inputs=setting.inputs(*[(1, HEADS, n, WIDTH)] * 3),
        mechanism="multi_head" if mask is None else "masked",
        ours=partial(streaming, rg.Attention(mask=mask)),
        peers=(
            Side("SDPA, only forward", kernel, setting.aims("time", 0.7, 1.0), differs=no_statistics),
            *((flex,) if setting.device == "cuda" else ()),
            Side("eager, dense weights", dense, setting.aims("faster", 8, 5), needs=needs, tolerance=1e-3),
        ),
        series=f"statistics, {name}",
        length=n,
    )


@torch.no_grad()
def streaming(attention: rg.Attention, *inputs: Tensor) -> Callable[..., tuple[Tensor, ...]]:
    """One pass over the map. The forward pass before it is not counted, for both sides."""
    weights = attention(*inputs).weights

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        entropy, top, received, cells = weights.summarize(
            rg.maps.Entropy(), rg.maps.TopLinks(TOP), rg.maps.KeyTotals(), rg.maps.Pool(CELLS, CELLS)
        )
        return entropy, top.weights, received, cells

    return run


def eagerly(is_causal: bool, *inputs: Tensor) -> Callable[..., tuple[Tensor, ...]]:
    """All weights in one float32 tensor, and the plain formulas."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        n, q, k = k.shape[2], q.float(), k.float()
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        if is_causal:
            scores.masked_fill_(torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
        w = scores.softmax(-1)
        del scores
        cells = F.adaptive_avg_pool2d(w, (CELLS, CELLS)) * (n / CELLS)  # sums over keys, means over queries
        return -torch.xlogy(w, w).sum(-1), w.topk(TOP).values, w.sum(-2), cells

    return run
