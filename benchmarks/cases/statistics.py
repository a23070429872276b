"""Statistics of all weights: in one pass, with the output of a call, and the entropy as a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

import regard as rg
from benchmarks.case import Aim, BenchSettings, Case, Side
from benchmarks.peers import sdpa

HEADS, WIDTH, TOP, CELLS = 2, 64, 8, 512
#: Heads of the cases in which a call computes statistics.
CALL_HEADS = 8


def cases(setting: BenchSettings) -> Iterator[Case]:
    """One pass at 8,192 tokens, with --full also at 32,768; with a call at 2,048, with --full also at 8,192."""
    masks = ("plain", None), ("causal", rg.causal())
    for n in (8192, 32_768) if setting.full else (8192,):
        for name, mask in masks:
            yield _case(setting, name, mask, n)
    if setting.device != "cpu":
        return  # these are computed by the kernels of the processor
    for n in (2048, 8192) if setting.full else (2048,):
        for name, mask in masks:
            yield _with_the_call(setting, name, mask, n)
    yield _loss(setting, 4096)
    yield from _million(setting)


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


def _with_the_call(setting: BenchSettings, name: str, mask: rg.masks.Mask | None, n: int) -> Case:
    attention = rg.Attention(mask=mask)
    alone = Side(
        "Regard, only the output",
        partial(calling, attention, ()),
        setting.aims("time", 1.08, 1.08),
        differs="it computes no statistics",
    )
    return Case(
        group="statistics",
        work=f"output with entropy, distance and strongest link, {name}, n = {n:,}, {CALL_HEADS} heads of {WIDTH}",
        inputs=setting.inputs(*[(1, CALL_HEADS, n, WIDTH)] * 3),
        mechanism="multi_head" if mask is None else "masked",
        ours=partial(calling, attention, (rg.maps.Entropy(), rg.maps.Distance(), rg.maps.TopLinks(1))),
        peers=(alone,),
    )


def calling(
    attention: rg.Attention, statistics: tuple[rg.maps.Reduction, ...], *_: Tensor
) -> Callable[..., tuple[Tensor, ...]]:
    """A call with statistics; the strongest link by its weight."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        seen = attention(q, k, v, statistics=statistics)
        return seen.output, *(x.weights if isinstance(x, rg.maps.RowLinks) else x for x in seen.statistics)

    return run


def _million(setting: BenchSettings) -> Iterator[Case]:
    """A window over a text that no dense formula can hold: the output, and with it the entropy of every row."""
    n, heads, size = 1 << 20, 4, 256
    attention = rg.Attention(mask=rg.causal() & rg.window(size))
    for work, statistics in (("output", ()), ("output and entropy of every row", (rg.maps.Entropy(),))):
        yield Case(
            group="statistics",
            work=f"{work}, causal & window {size}, n = {n:,}, {heads} heads of {WIDTH}",
            inputs=setting.inputs(*[(1, heads, n, WIDTH)] * 3),
            mechanism="sliding_window",
            ours=partial(calling, attention, statistics),
            aims=(Aim("milliseconds", 5000), Aim("mebibytes", 4096)),
        )


def _loss(setting: BenchSettings, n: int) -> Case:
    dense = Side(
        "eager, dense weights", partial(given, dense_entropy), needs=8 * CALL_HEADS * n * n * 4, tolerance=1e-3
    )
    return Case(
        group="statistics",
        work=f"entropy as a loss, n = {n:,}, {CALL_HEADS} heads of {WIDTH}, forward + backward",
        inputs=setting.inputs(*[(1, CALL_HEADS, n, WIDTH)] * 2),
        mechanism="multi_head",
        ours=partial(given, entropy_of_call),
        peers=(dense,),
        aims=setting.aims("milliseconds", 1500, 3000),
        learns=True,
    )


def given(function: Callable[..., Tensor], *_: Tensor) -> Callable[..., Tensor]:
    """A function that needs no preparation."""
    return function


def entropy_of_call(q: Tensor, k: Tensor) -> Tensor:
    return rg.attend(q, k, k, statistics=(rg.maps.Entropy(),)).statistics[0]


def dense_entropy(q: Tensor, k: Tensor) -> Tensor:
    logs = ((q.float() * q.shape[-1] ** -0.5) @ k.float().mT).log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)


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
