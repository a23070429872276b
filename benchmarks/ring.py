"""The goals of the ring engine: the time and memory of a rank, and the bytes that travel."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist

import regard as rg
from benchmarks import measure
from benchmarks.measure import Goal

RANKS, HEADS, WIDTH = 4, 4, 64
LENGTHS = (8_192, 16_384, 32_768)
MIB = 2**20


def goals() -> Iterator[Goal]:
    """Every goal, measured as it is asked for: memory in processes that are there, bytes as planned (and as tested)."""
    alone, shared = measured(1, "time")[0]["one process"], max(said["a rank"] for said in measured(2, "time"))
    what = (
        f"forward and backward, causal, n = 8,192, 8 heads sharing 2, on 1 and on 2 ranks of one thread: {alone:.2f} s"
    )
    yield Goal(what, alone / shared, 1.7, "x faster", at_most=False)
    added = measured(RANKS, "memory")[-1]
    for n in LENGTHS:
        ring, gathered = (added[f"{how.__name__} {n}"] for how in (around, gather_all))
        what = f"memory that the last of {RANKS} ranks adds, causal, n = {n}: {ring:.1f} MiB"
        yield Goal(what, ring / planned(n), 1.25, f"x the {planned(n):.1f} MiB planned")
        yield Goal("that of an all-gather over it", gathered / ring, 1.5, "x", at_most=False)
    for name, (mask, share) in masks(1_048_576).items():
        yield Goal(
            f"bytes of keys sent, {name}, n = 1,048,576, {RANKS} ranks", 100 * sent(mask), share, "% of all-gather"
        )


def masks(n: int) -> dict[str, tuple[rg.masks.Mask, float]]:
    """Masks, and what share of an all-gather they may send at most."""
    return {
        "causal": (rg.causal(), 50),
        "causal, window of 4,096": (rg.causal() & rg.window(4096), 0.5),
        "128 packed documents": (rg.causal() & rg.documents([n // 128] * 128), 0.5),
        "96 packed documents": (rg.causal() & rg.documents([n // 96] * 95 + [n - n // 96 * 95]), 1),
    }


def sent(mask: rg.masks.Mask, n: int = 1_048_576) -> float:
    """The share of the bytes of an all-gather that all ranks send."""
    x = torch.zeros(()).expand(1, HEADS, n, WIDTH)
    plan = rg.plan(x, x, x, attention=rg.Attention(mask=mask), engine=rg.Ring(ranks=RANKS))
    ranks = range(RANKS)
    return sum(map(plan.sent, ranks)) / sum(map(plan.gathered, ranks))


def planned(n: int) -> float:
    """MiB that the last rank holds besides its queries, keys and values."""
    x = torch.zeros(()).expand(1, HEADS, n, WIDTH)
    plan = rg.plan(x, x, x, attention=rg.Attention(mask=rg.causal()), engine=rg.Ring(ranks=RANKS))
    return (plan.memory(RANKS - 1) - 3 * HEADS * (n // RANKS) * WIDTH * 4) / MIB


def measured(ranks: int, what: str) -> list[dict[str, float]]:
    """The result of `time_as_a_rank` or `memory_as_a_rank` of each rank, in processes of one thread."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    command, threads = [sys.executable, "-m", "benchmarks.ring", what], {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(command, env=os.environ | told | threads | {"RANK": str(rank)}, stdout=subprocess.PIPE)
        for rank in range(ranks)
    ]
    return [json.loads(process.communicate()[0]) for process in processes]


def memory_as_a_rank() -> dict[str, float]:
    """MiB that a rank adds to what it holds already, by way and length."""
    found = {}
    for n in (512, *LENGTHS):  # at the first, connections and code are loaded, which does not count
        q, k, v = (torch.randn(1, HEADS, n // RANKS, WIDTH) for _ in range(3))
        for how in (around, gather_all):
            dist.barrier()
            found[f"{how.__name__} {n}"] = measure._peak(partial(how, q, k, v)) / MIB
    return found


def time_as_a_rank() -> dict[str, float]:
    """Processor seconds of forward and backward, the least of three: of a rank, and on one rank also without a ring."""
    ring, whole = rg.Ring(layout="zigzag"), [torch.randn(1, heads, 8192, 64) for heads in (8, 2, 2)]
    found = {"a rank": seconds([ring.share(t) for t in whole], ring)}
    return found if dist.get_world_size() > 1 else found | {"one process": seconds(whole, "auto")}


def seconds(inputs: list[torch.Tensor], engine: rg.Ring | str) -> float:
    taken = []
    for _ in range(3):
        leaves = [t.clone().requires_grad_() for t in inputs]
        dist.barrier()
        start = time.process_time()
        output = rg.Attention(mask=rg.causal())(*leaves, engine=engine).output
        output.backward(output.detach())
        taken.append(time.process_time() - start)
    return min(taken)


@torch.no_grad()
def around(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
    return rg.Attention(mask=rg.causal())(q, k, v, engine=rg.Ring()).output


@torch.no_grad()
def gather_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
    """What is done without a ring: everybody gets all keys, and attends with its own queries."""
    whole = []
    for x in (k, v):
        parts = [torch.empty_like(x) for _ in range(RANKS)]
        dist.all_gather(parts, x)
        whole.append(torch.cat(parts, 2))
    n = q.shape[2]
    positions = rg.types.Positions(dist.get_rank() * n, rg.types.Spans(((0, RANKS * n),)))
    return rg.Attention(mask=rg.causal())(q, *whole, positions=positions, engine="blocked").output


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    print(json.dumps({"time": time_as_a_rank, "memory": memory_as_a_rank}[sys.argv[1]]()))
    dist.destroy_process_group()
