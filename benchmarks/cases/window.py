"""Causal windows: time is linear in the length, at the rate of the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import regard as rg
from benchmarks.case import Aim, BenchSettings, Build, Case, Side, allowed_pairs
from benchmarks.peers import packages, sdpa, transformers
from benchmarks.peers.package import LOCAL, TRANSFORMERS

HEADS, WIDTH = 8, 64


def cases(setting: BenchSettings) -> Iterator[Case]:
    """Windows of 256 and 1,024 against all peers that have them, then growth with the length."""
    gpu = setting.device == "cuda"
    for size in (256, 1024):
        for n in (4096, 16_384, 65_536) if setting.full or gpu else (4096, 16_384):
            yield _case(setting, size, n, _dense_and_compiled(setting, size, n))
        if not gpu:
            yield _grows(setting, size, 65_536 if setting.full else 32_768)
            yield _beside_local_attention(setting, size, learns=False)
            yield _beside_local_attention(setting, size, learns=True)
    if not gpu:
        yield _case(setting, 256, 4096, (Side("SDPA, dense mask", partial(sdpa.dense, _mask(256))),), learns=True)


def _mask(size: int) -> rg.masks.Mask:
    return rg.causal() & rg.window(size)


def _dense_and_compiled(setting: BenchSettings, size: int, n: int) -> tuple[Side, ...]:
    gpu = setting.device == "cuda"
    tolerance = 3e-2 if gpu else 1e-4
    found = []
    if n < 16_384 or (n == 16_384 and (setting.full or gpu)):
        aims = (Aim("faster", 10),) if n == 16_384 else ()
        found.append(Side("SDPA, dense mask", partial(sdpa.dense, _mask(size)), aims, tolerance=tolerance))
        if n == 16_384 and setting.full and not gpu:
            build = partial(transformers.sdpa_window, size)
            found.append(Side("transformers, sdpa", build, aims, TRANSFORMERS))
    if gpu:
        found.append(
            Side(
                "FlexAttention",
                partial(sdpa.flex, _mask(size)),
                (Aim("faster", 0.95),),
                tolerance=tolerance,
                compiles=True,
            )
        )
    elif n >= 16_384:
        needs = n * n * 10  # `create_block_mask` evaluates every pair
        build = partial(sdpa.flex, _mask(size))
        aims = setting.aims("faster", 2.5, 1.6)
        found.append(Side("FlexAttention, compiled", build, aims, needs=needs, compiles=True))
    return tuple(found)


def _case(setting: BenchSettings, size: int, n: int, peers: tuple[Side, ...], learns: bool = False) -> Case:
    backward = 3.5 if learns else 1.0
    mask = _mask(size)
    return Case(
        group="window",
        work=f"causal & window {size:,}, n = {n:,}, {HEADS} heads of {WIDTH}{', forward + backward' if learns else ''}",
        inputs=setting.inputs(*[(1, HEADS, n, WIDTH)] * 3),
        mechanism="sliding_window",
        attention=rg.Attention(mask=mask),
        peers=peers,
        aims=(Aim("products", 60),) if n >= 16_384 and setting.device == "cpu" else (),
        learns=learns,
        flops=lambda: int(backward * 4 * HEADS * WIDTH * allowed_pairs(mask, n, n)),
        series="" if learns else f"causal & window {size:,}",
        length=n,
    )


def _grows(setting: BenchSettings, size: int, n: int) -> Case:
    """Against itself at a fourth or half of the length: `faster` than its share would be quadratic."""
    short = 16_384
    same = Side(
        f"itself at n = {short:,}",
        partial(_shorter, rg.Attention(mask=_mask(size)), short),
        (Aim("time", 1.1 * n / short),),
        differs=f"linear would be {n // short} x",
    )
    case = _case(setting, size, n, (same,))
    return Case(**{**vars(case), "work": f"{case.work}, growth"})


def _shorter(attention: rg.Attention, length: int, *inputs):
    short = [x[:, :, :length].contiguous() for x in inputs]
    return lambda *whole: attention(*short).output


def _beside_local_attention(setting: BenchSettings, size: int, learns: bool) -> Case:
    """local-attention attends to one more key for the same size."""
    build: Build = partial(packages.local_attention, size)
    side = Side("local-attention", build, setting.aims("faster", 6, 4), LOCAL)
    return Case(**{**vars(_case(setting, size + 1, 16_384, (side,), learns)), "series": "", "aims": ()})
