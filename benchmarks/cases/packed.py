"""Packed documents and padding: the time of one call per document."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

import regard as rg
from benchmarks.case import Aim, BenchSettings, Case, Side
from benchmarks.peers import sdpa
from regard.diagnosis.laws import Example

HEADS, WIDTH = 8, 64


def cases(setting: BenchSettings) -> Iterator[Case]:
    """32 documents beside one call each; beside a dense mask a dozen, unless all is asked for; a padded batch."""
    gpu = setting.device == "cuda"
    lengths = document_lengths(32)
    each = Side("SDPA, one call a document", partial(sdpa.one_call_each, lengths), (Aim("time", 1.1),))
    faster = replace(each, aims=setting.aims("faster", 1.8, 1.1))
    few = document_lengths(32 if setting.full or gpu else 12)
    mask = rg.causal() & rg.documents(few)
    # torch converts the boolean mask to floats
    dense = Side("SDPA, dense mask", partial(sdpa.dense, mask), (Aim("faster", 5),), needs=6 * sum(few) ** 2)
    flex = Side(
        "FlexAttention, compiled", partial(sdpa.flex, mask), (Aim("faster", 0.95 if gpu else 1.2),), compiles=True
    )
    if gpu:
        yield _packed(setting, lengths, (replace(flex, tolerance=3e-2),))
        return
    yield _packed(setting, lengths, (faster, dense, flex) if setting.full else (faster,))
    yield _packed(setting, lengths, (each,), learns=True)
    if not setting.full:
        yield _packed(setting, few, (dense,))
    yield _padded(setting)


def document_lengths(count: int) -> tuple[int, ...]:
    """The same lengths from 100 to 2,000 at every call."""
    drawn = random.Random(0)
    return tuple(drawn.randint(100, 2000) for _ in range(count))


def _packed(setting: BenchSettings, lengths: tuple[int, ...], peers: tuple[Side, ...], learns: bool = False) -> Case:
    n, backward = sum(lengths), 3.5 if learns else 1.0
    return Case(
        group="packed",
        work=f"{len(lengths)} documents of 100 to 2,000, {n:,} tokens, causal, {HEADS} heads of {WIDTH}"
        f"{', forward + backward' if learns else ''}",
        inputs=setting.inputs(*[(1, HEADS, n, WIDTH)] * 3),
        mechanism="masked, packed",
        example=small_packed,
        attention=rg.Attention(mask=rg.causal() & rg.documents(lengths)),
        peers=peers,
        learns=learns,
        flops=lambda: int(backward * 4 * HEADS * WIDTH * sum(m * (m + 1) // 2 for m in lengths)),
    )


def _padded(setting: BenchSettings) -> Case:
    lengths = document_lengths(8)
    n = max(lengths)
    mask = rg.padding(lengths)
    each = Side("SDPA, one call an entry", partial(sdpa.one_call_an_entry, lengths), (Aim("time", 1.1),))
    return Case(
        group="packed",
        work=f"padding, {len(lengths)} texts of 100 to 2,000 in a batch of n = {n:,}, {HEADS} heads of {WIDTH}",
        inputs=setting.inputs(*[(len(lengths), HEADS, n, WIDTH)] * 3),
        mechanism="multi_head, padded",
        example=small_padded,
        attention=rg.Attention(mask=mask),
        peers=(Side("SDPA, dense mask", partial(sdpa.dense, mask)), each),
        flops=lambda: 4 * HEADS * WIDTH * n * sum(lengths),
    )


def small(mask: rg.masks.Mask) -> Example:
    """A mask on 24 tokens, two entries and four heads."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 24, 8, dtype=torch.float64, generator=generator) for _ in range(3))
    return rg.Attention(mask=mask), q, k, v


def small_packed() -> Example:
    """Three documents."""
    return small(rg.causal() & rg.documents([5, 12, 7]))


def small_padded() -> Example:
    """Two texts, one of them padded."""
    return small(rg.padding([24, 9]))
