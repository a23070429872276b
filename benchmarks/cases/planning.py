"""Planning a mask from its spans, against evaluating every pair."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import regard as rg
from benchmarks.case import Aim, BenchSettings, Case, Side, random_inputs
from benchmarks.cases.packed import document_lengths, small_packed
from benchmarks.cases.sparse import small_prefix
from benchmarks.peers import sdpa

HEADS, WIDTH, LENGTH = 8, 64, 65_536
#: The tokens of the peer: at 65,536 its block mask would need tens of GiB.
THEIRS = 16_384


def cases(setting: BenchSettings) -> Iterator[Case]:
    """Every mask of the other groups at 65,536 tokens."""
    if setting.device == "cuda":
        return
    lengths = document_lengths(63)
    packed = (*lengths, LENGTH - sum(lengths)) if sum(lengths) < LENGTH else _cut(lengths)
    masks: dict[str, tuple[str, rg.masks.Mask, Callable[[], Any] | None]] = {
        "causal & window 256": ("sliding_window", rg.causal() & rg.window(256), None),
        "causal & window 1,024": ("sliding_window", rg.causal() & rg.window(1024), None),
        "packed documents": ("masked, packed", rg.causal() & rg.documents(packed), small_packed),
        "Longformer": ("longformer", rg.window(257) | rg.masks.global_tokens(range(16)), None),
        "BigBird": ("bigbird", rg.masks.bigbird(LENGTH), None),
        "dilated": ("dilated", rg.masks.dilated(64, 2), None),
        "block-local": ("block_local", rg.masks.block_local(256), None),
        "prefix": ("prefix", rg.causal() | rg.masks.prefix(512), small_prefix),
    }
    for name, (mechanism, mask, example) in masks.items():
        peers = ()
        if name == "causal & window 256":
            build = partial(_block_mask, mask)
            differs = f"at n = {THEIRS:,}, a sixteenth of the pairs"
            peers = (Side("FlexAttention's create_block_mask", build, differs=differs, needs=3 << 30),)
        yield Case(
            group="planning",
            work=f"plan of {name}, n = {LENGTH:,}",
            inputs=partial(random_inputs, ((1, 1, 1, WIDTH),), "cpu", torch.float32),
            mechanism=mechanism,
            example=example,
            ours=partial(planned, rg.Attention(mask=mask)),
            peers=peers,
            aims=(Aim("milliseconds", 50), Aim("mebibytes", 20)),
        )


def _cut(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Whole documents, and one shorter document at the end."""
    found: list[int] = []
    for length in lengths:
        if sum(found) + length >= LENGTH:
            break
        found.append(length)
    return (*found, LENGTH - sum(found))


def planned(attention: rg.Attention, row: Tensor) -> Callable[[Tensor], tuple[()]]:
    """Choose an engine and cut the blocks. The values of q, k and v do not matter, so one row is expanded."""
    x = row.expand(1, HEADS, LENGTH, WIDTH)

    def run(row: Tensor) -> tuple[()]:
        assert rg.plan(x, x, x, attention=attention).cost.pairs
        return ()

    return run


def _block_mask(mask: rg.masks.Mask, row: Tensor) -> Callable[[Tensor], tuple[()]]:
    def run(row: Tensor) -> tuple[()]:
        sdpa.block_mask(mask, THEIRS, "cpu")
        return ()

    return run
