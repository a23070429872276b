"""What a watch costs beside the model alone: milliseconds and GiB."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

import regard as rg
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.models import SMALL, STACK, llama, text
from benchmarks.gpu.rows import Job, Row

FIELDS = {"plain_ms", "watched_ms", "times", "plain_gib", "watched_gib", "profile_ms"}


def jobs(machine: Machine) -> Iterator[Job]:
    """Prefill of one text, in bfloat16, with torch's own choice of a kernel."""
    for shape, lengths in ((SMALL, (512, 2048, 8192)), (STACK, (1024, 8192, 32_768))):
        for length in machine.size(lengths, (24,)):
            yield Job({"model": shape, "tokens": length, "dtype": "bfloat16"}, partial(cost, machine, shape, length))


def profile(seen: rg.hf.WatchedAttention) -> None:
    for weights in seen.maps.values():
        weights.summarize(rg.maps.Entropy(), rg.maps.TopLinks(4))


@torch.no_grad()
def cost(machine: Machine, shape: str, length: int) -> Row:
    """Forward with and without a watch; entropy and strongest links of all weights afterwards."""
    model = llama(machine, shape, "bfloat16")
    ids = text(machine, model, length)

    def watched() -> rg.hf.WatchedAttention:
        with rg.watch(model) as seen:
            model(ids)
        return seen

    seen = watched()
    plain_ms, watched_ms = machine.medians(partial(model, ids), watched)
    (profile_ms,) = machine.medians(partial(profile, seen), rounds=3)
    del seen
    plain_gib, watched_gib = machine.peak(partial(model, ids)), machine.peak(watched)
    return {
        "plain_ms": plain_ms,
        "watched_ms": watched_ms,
        "times": watched_ms / plain_ms,
        "plain_gib": plain_gib,
        "watched_gib": watched_gib,
        "profile_ms": profile_ms,
    }
