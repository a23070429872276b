"""Relative biases and soft-capping in O(n) memory, against dense biases."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

import regard as rg
from benchmarks.case import Aim, BenchSettings, Case, Side
from benchmarks.peers import sdpa, transformers
from benchmarks.peers.package import TRANSFORMERS

HEADS, WIDTH, LENGTH = 8, 64, 4096
#: The limit as a share of the memory of one dense bias; O(n) is far below it.
SHARE = 0.1


def attentions() -> dict[str, tuple[str, rg.Attention]]:
    """By mechanism: its description, and an attention with the same random parameters at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {
            "alibi": ("ALiBi, causal", rg.Attention(bias=rg.ALiBi(HEADS), mask=rg.causal())),
            "t5": ("T5", rg.Attention(rg.Dot(scale=1.0), bias=rg.biases.T5Bias(HEADS))),
            "shaw": ("Shaw, reach 16", rg.Attention(bias=rg.biases.ShawBias(WIDTH, 16))),
            "transformer_xl": (
                "Transformer-XL",
                rg.Attention(bias=rg.biases.TransformerXLBias(HEADS, WIDTH), mask=rg.causal()),
            ),
            "softcap": ("softcap 50, causal", rg.Attention(bias=rg.biases.Softcap(50.0), mask=rg.causal())),
        }


def cases(setting: BenchSettings) -> Iterator[Case]:
    """Forward for all biases, backward for T5; with --full backward for all."""
    if setting.device == "cuda":
        return
    for mechanism, (what, attention) in attentions().items():
        for learns in (False, True):
            if not learns or mechanism == "t5" or setting.full:
                yield _case(setting, mechanism, what, attention, learns)


def _case(setting: BenchSettings, mechanism: str, what: str, attention: rg.Attention, learns: bool) -> Case:
    backward = 3.5 if learns else 1.0
    pairs = LENGTH * LENGTH if attention.mask is None else LENGTH * (LENGTH + 1) // 2
    return Case(
        group="bias",
        work=f"{what}, n = {LENGTH:,}, {HEADS} heads of {WIDTH}, {'forward + backward' if learns else 'forward'}",
        inputs=setting.inputs(*[(1, HEADS, LENGTH, WIDTH)] * 3),
        mechanism=mechanism,
        attention=attention,
        peers=tuple(_peers(setting, mechanism, attention, learns)),
        learns=learns,
        flops=lambda: int(backward * 4 * HEADS * WIDTH * pairs),
        weighs=not learns or setting.full,
    )


def _peers(setting: BenchSettings, mechanism: str, attention: rg.Attention, learns: bool) -> Iterator[Side]:
    one = HEADS * LENGTH * LENGTH * 4
    by_distance = mechanism in ("alibi", "t5", "softcap")
    if mechanism == "t5":
        needs = one * (6 if learns else 4)
        yield Side(
            "transformers' T5",
            partial(transformers.t5, attention),
            (Aim("faster", 1.5),) if learns else (),
            TRANSFORMERS,
            needs=needs,
        )
    if not learns and mechanism in ("alibi", "t5"):
        aims = setting.aims("faster", 2, 1.3)
        yield Side("SDPA, dense bias made before", partial(sdpa.with_bias, attention), aims, needs=2 * one)
    elif not learns and mechanism != "softcap":
        aims = Aim("time", 1.0), Aim("memory", SHARE)
        yield Side("SDPA, dense bias of each call", partial(sdpa.with_bias_each_time, attention), aims, needs=4 * one)
    if mechanism == "softcap" and not learns:
        build = partial(transformers.softcapped, 50.0)
        yield Side("transformers' Gemma 2", build, (Aim("faster", 2),), TRANSFORMERS, needs=4 * one)
    aims = setting.aims("faster", 2, 1.5) if by_distance else (Aim("faster", 2),)
    aims = aims if learns else (*aims, Aim("memory", SHARE))
    yield Side("eager", partial(sdpa.eager, attention), aims, needs=one * (8 if learns else 4))
