"""Decoding: one query reads all keys once; with a ring cache every token costs the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import regard as rg
from benchmarks.case import Aim, BenchSettings, Case, Side
from benchmarks.peers import sdpa, transformers
from benchmarks.peers.package import TRANSFORMERS
from regard.catalog import mechanism
from regard.diagnosis.laws import Example

HEADS, KEY_HEADS, WIDTH, KEYS = 32, 8, 128, 8192
#: The ring: heads, width, window, tokens before the run, tokens of one run.
RING = (8, 64, 4096)
SEEN, STEPS = 65_536, 64


def cases(setting: BenchSettings) -> Iterator[Case]:
    """Grouped heads at two batch sizes, then growing caches and ring caches."""
    if setting.device == "cuda":
        return
    for batch in (1, 8):
        yield _grouped(setting, batch, torch.float32)
        yield _grouped(setting, batch, torch.bfloat16)
    yield _through_cache(setting)
    yield from _ring(setting)


def _grouped(setting: BenchSettings, batch: int, dtype: torch.dtype) -> Case:
    shape = (batch, KEY_HEADS, KEYS, WIDTH)
    kernel = partial(sdpa.sdpa, enable_gqa=True)
    return Case(
        group="decoding",
        work=f"one query, {HEADS}:{KEY_HEADS} heads of {WIDTH}, {KEYS:,} keys, batch {batch}"
        + (", bfloat16" if dtype == torch.bfloat16 else ""),
        inputs=setting.inputs((batch, HEADS, 1, WIDTH), shape, shape, dtype=dtype),
        mechanism="grouped_query",
        example=small_decoding,
        attention=rg.Attention(mask=rg.causal()),
        peers=(
            Side(
                "SDPA, enable_gqa",
                kernel,
                setting.aims("faster", 6, 5),
                tolerance=1e-4 if dtype.itemsize == 4 else 3e-2,
            ),
        ),
        aims=setting.aims("reading", 85, 85),
        flops=lambda: 4 * batch * HEADS * WIDTH * KEYS,
        moved=2 * batch * KEY_HEADS * KEYS * WIDTH * dtype.itemsize,
    )


def small_decoding() -> Example:
    """Two queries at the end of 24 keys, with shared heads."""
    return mechanism("grouped_query").example(queries=2, keys=24)


def _through_cache(setting: BenchSettings) -> Case:
    shapes = (1, HEADS, 1, WIDTH), (1, KEY_HEADS, KEYS, WIDTH), (1, KEY_HEADS, KEYS, WIDTH)
    return Case(
        group="decoding",
        work=f"the next token through a growing cache, {HEADS}:{KEY_HEADS} heads of {WIDTH}, {KEYS:,} keys",
        inputs=setting.inputs(*shapes),
        mechanism="grouped_query",
        example=small_decoding,
        ours=grown,
        peers=(Side("transformers' cache and sdpa", transformers.cached, (Aim("faster", 3),), TRANSFORMERS),),
        moved=2 * KEY_HEADS * KEYS * WIDTH * 4,
    )


def grown(query: Tensor, key: Tensor, value: Tensor) -> Callable[..., Tensor]:
    """The last token is new. Each run appends it to the cache of the run before."""
    attention = rg.Attention(mask=rg.causal())
    cache = rg.GrowingCache().extend(key[:, :, :-1], value[:, :, :-1]).cache

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal cache
        seen = attention(q, k[:, :, -1:], v[:, :, -1:], cache=cache)
        assert seen.cache is not None
        cache = seen.cache
        return seen.output

    return run


def _ring(setting: BenchSettings) -> Iterator[Case]:
    heads, width, window = RING
    inputs = setting.inputs(*[(1, heads, window, width)] * 3)
    yield Case(
        group="decoding",
        work=f"{STEPS} tokens through a ring of {window:,} after {SEEN:,}, {heads} heads of {width}",
        inputs=inputs,
        mechanism="sliding_window",
        ours=partial(steps, rg.caches.RingCache(window), SEEN),
        peers=(
            Side(
                f"itself after {window:,} tokens",
                partial(steps, rg.caches.RingCache(window), window),
                (Aim("time", 1.1),),
            ),
            Side(f"a growing cache after {SEEN:,} tokens", partial(steps, rg.GrowingCache(), SEEN)),
        ),
        weighs=False,
    )
    short = Side(
        f"half of them, {SEEN // 2:,}",
        partial(filling, rg.caches.RingCache(window), SEEN // 2),
        (Aim("memory", 1.1),),
        differs="constant memory is 1 x",
    )
    growing = Side(
        "a growing cache", partial(filling, rg.GrowingCache(), SEEN), (Aim("memory", 0.2),), differs="it keeps all"
    )
    yield Case(
        group="decoding",
        work=f"a ring of {window:,} takes in {SEEN:,} tokens, {heads} heads of {width}",
        inputs=inputs,
        mechanism="sliding_window",
        ours=partial(filling, rg.caches.RingCache(window), SEEN),
        peers=(short, growing),
    )


def _filled(cache: rg.caches.Cache, seen: int, key: Tensor, value: Tensor) -> rg.caches.Cache:
    while cache.length < seen:
        cache = cache.extend(key, value).cache
    return cache


def filling(cache: rg.caches.Cache, seen: int, *inputs: Tensor) -> Callable[..., Tensor]:
    """Take in so many tokens, chunk by chunk, without asking."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.tensor(float(_filled(cache, seen, k, v).length))

    return run


@torch.no_grad()
def steps(cache: rg.caches.Cache, seen: int, query: Tensor, key: Tensor, value: Tensor) -> Callable[..., Tensor]:
    """Token by token after `seen` tokens. Each run continues where the run before ended."""
    attention = rg.Attention(mask=rg.causal() & rg.window(RING[2]))
    filled = _filled(cache, seen, key, value)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal filled
        outputs = []
        for step in range(STEPS):
            part = slice(step, step + 1)
            found = attention(q[:, :, part], k[:, :, part], v[:, :, part], cache=filled)
            assert found.cache is not None
            filled = found.cache
            outputs.append(found.output)
        return torch.cat(outputs, 2)

    return run
