"""Selected keys: MoBA and DeepSeek sparse attention, with the choice, beside their formulas with dense masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor
from torch.nn import functional as F

import regard as rg
from benchmarks.case import Aim, BenchSettings, Case, Side, random_inputs
from benchmarks.peers import selected
from regard.catalog import mechanism

LENGTH, LONG, HEADS, KEY_HEADS, WIDTH = 4096, 8192, 8, 2, 64
#: Blocks of MoBA, and how many of them a query attends to.
SIZE, BLOCKS = 256, 4
#: Keys that a query of DeepSeek sparse attention attends to, and heads and width of its indexer.
KEYS, INDEX_HEADS, INDEX_WIDTH = 512, 4, 32
#: What the output of a row may differ by if rounding exchanges the last chosen key and the first that is not chosen.
ONE_KEY = 0.05


def cases(setting: BenchSettings) -> Iterator[Case]:
    """One call of each, the choice included: 4,096 tokens, and 8,192 beside causal attention to all keys."""
    if setting.device == "cuda":
        return
    yield from _long(setting)
    shapes = ((1, HEADS, LENGTH, WIDTH), *[(1, KEY_HEADS, LENGTH, WIDTH)] * 2)
    yield Case(
        group="selected",
        work=f"MoBA, {BLOCKS} blocks of {SIZE}, n = {LENGTH:,}, {HEADS} heads of {WIDTH}",
        inputs=setting.inputs(*shapes),
        mechanism="moba",
        ours=blocked,
        peers=(Side("SDPA, dense mask, and its choice", partial(selected.moba, SIZE, BLOCKS), (Aim("faster", 1),)),),
    )
    build = partial(selected.indexer, KEYS)
    index = (1, INDEX_HEADS, LENGTH, INDEX_WIDTH), (1, 1, LENGTH, INDEX_WIDTH), (1, LENGTH, INDEX_HEADS)
    yield Case(
        group="selected",
        work=f"DeepSeek sparse attention, {KEYS} keys, n = {LENGTH:,}, {HEADS} heads of {WIDTH}",
        inputs=partial(_without_ties, (*shapes, *index), setting),
        mechanism="deepseek_sparse",
        ours=indexed,
        peers=(Side("SDPA, dense mask, and its choice", build, (Aim("faster", 1),), tolerance=ONE_KEY),),
    )


def _long(setting: BenchSettings) -> Iterator[Case]:
    q, k = (1, HEADS, LONG, WIDTH), (1, KEY_HEADS, LONG, WIDTH)
    index = (1, INDEX_HEADS, LONG, INDEX_WIDTH), (1, 1, LONG, INDEX_WIDTH), (1, LONG, INDEX_HEADS)
    sizes = f"n = {LONG:,}, {HEADS} heads of {WIDTH} sharing {KEY_HEADS} key heads"
    aims = (Aim("time", 0.35),)
    works = {
        "deepseek_sparse": (f"DeepSeek sparse attention, {KEYS} keys", indexed, index),
        "moba": (f"MoBA, {BLOCKS} blocks of {SIZE}", blocked, ()),
        "nsa": ("nsa", gated, ((1, HEADS, LONG, 3),)),
    }
    for name, (work, ours, more) in works.items():
        for learns in (False, True) if name == "moba" else (False,):
            yield Case(
                group="selected",
                work=f"{work}, {sizes}{', forward + backward' if learns else ''}",
                inputs=setting.inputs(q, k, k, *more),
                mechanism=name,
                ours=ours,
                learns=learns,
                peers=(Side("SDPA, causal", causal, () if learns else aims, differs="it attends to all keys"),),
            )


def causal(*inputs: Tensor) -> Callable[..., Tensor]:
    """Causal attention to all keys."""
    return lambda q, k, v, *others: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def blocked(*inputs: Tensor) -> Callable[..., rg.types.AttentionOutput]:
    """MoBA by `regard.attend`."""
    attention = rg.Attention(mask=rg.causal(), selection=rg.selections.BlockMeans(SIZE, BLOCKS))
    return lambda q, k, v: attention(q, k, v)


def gated(*inputs: Tensor) -> Callable[..., rg.types.AttentionOutput]:
    """Native sparse attention by `regard.attend`, with random gates."""
    attention = mechanism("nsa").build()
    return lambda q, k, v, gates: attention(q, k, v, gates=gates.sigmoid())


def _without_ties(shapes: tuple[tuple[int, ...], ...], setting: BenchSettings) -> tuple[Tensor, ...]:
    """Random tensors, those of the indexer positive, so that relu makes no equal scores: topk of torch takes any."""
    q, k, v, *index = random_inputs(shapes, setting.device, setting.dtype)
    return q, k, v, *(x.abs() for x in index)


def indexed(*inputs: Tensor) -> Callable[..., rg.types.AttentionOutput]:
    """DeepSeek sparse attention by `regard.attend`."""
    attention = rg.Attention(mask=rg.causal(), selection=rg.selections.TokenIndexer(KEYS))
    names = "index_query", "index_key", "index_weights"
    return lambda q, k, v, *index: attention(q, k, v, **dict(zip(names, index, strict=True)))
