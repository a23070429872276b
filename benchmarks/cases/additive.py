"""Additive and concat scores, without a tensor of I x J x hidden elements."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

import regard as rg
from benchmarks.case import Aim, BenchSettings, Case, Side
from benchmarks.peers import packages
from benchmarks.peers.package import JOEY, KERAS

WIDTH = 256
#: A tenth of the memory of a peer that holds all tangents.
SMALL = Aim("memory", 0.1)


def cases(setting: BenchSettings) -> Iterator[Case]:
    """Forward at 2,048 x 2,048; with backward at 1,024 x 1,024, or larger with --full."""
    if setting.device == "cuda":
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        additive = rg.Attention(rg.scores.Additive(WIDTH, WIDTH, WIDTH))
        concat = rg.Attention(rg.scores.Concat(WIDTH, WIDTH, WIDTH))
    yield _case(setting, "bahdanau", additive, 2048, learns=False)
    yield _case(setting, "bahdanau", additive, 1024, learns=True)
    yield _case(setting, "luong_concat", concat, 1024, learns=True)
    if setting.full:
        yield _case(setting, "bahdanau", additive, 2048, learns=True)
        yield _case(setting, "luong_concat", concat, 2048, learns=True)


def _case(setting: BenchSettings, mechanism: str, attention: rg.Attention, n: int, learns: bool) -> Case:
    cube = n * n * WIDTH * 4
    needs = cube * (5 if learns else 3)
    aims = (*setting.aims("faster", 6, 4), SMALL)
    peers = [Side("the formula", partial(packages.direct_additive, attention), aims, needs=needs)]
    if mechanism == "bahdanau":
        peers.append(Side("keras", partial(packages.keras_additive, attention), aims, KERAS, needs=needs))
        # it needs memory for one query at a time, so only its time is a goal
        joey = partial(packages.joey_additive, attention)
        aims = setting.aims("faster", 3, 2)
        peers.append(Side("JoeyNMT, a query at a time", joey, aims, JOEY, needs=needs))
    return Case(
        group="additive",
        work=f"{'additive' if mechanism == 'bahdanau' else 'concat'}, {n:,} x {n:,}, hidden {WIDTH}, 1 head, "
        f"{'forward + backward' if learns else 'forward'}",
        inputs=setting.inputs(*[(1, 1, n, WIDTH)] * 3),
        mechanism=mechanism,
        attention=attention,
        peers=tuple(peers),
        learns=learns,
    )
