"""A ring on the device: one rank with NCCL, and two ranks with gloo, which carries no tensors of a device.

`python -m benchmarks.gpu.ring DEVICE LENGTH` is a rank, and prints what it found as JSON.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import regard as rg
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.rows import Job, Row

FIELDS = {"output", "gradients", "limit", "holds", "ms"}
HEADS, SHARED, WIDTH = 8, 2, 64
SECONDS = 180


def jobs(machine: Machine) -> Iterator[Job]:
    """Forward and backward of causal attention."""
    for ranks, backend in ((1, "nccl" if machine.is_cuda else "gloo"), (2, "gloo")):
        length = machine.size(8192, 32)
        kind = machine.host if ranks == 1 else machine.device
        about = {"ranks": ranks, "backend": backend, "tokens": length, "dtype": machine.size("bfloat16", "float32")}
        yield Job(about, partial(around, ranks, backend, kind.type, length), may_refuse=ranks == 2)


def around(ranks: int, backend: str, kind: str, length: int) -> Row:
    """What rank 0 says; every rank is a process on this device."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-m", "benchmarks.gpu.ring", backend, kind, str(length)]
    processes = [
        subprocess.Popen(
            command, env=os.environ | told | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise RuntimeError(said[0][1].decode()[-2000:])
    found = json.loads(said[0][0].splitlines()[-1])
    if "refused" in found:
        raise rg.RegardError(found["refused"])
    return found


def a_rank(backend: str, kind: str, length: int) -> Row:
    """Output and gradients of this rank's share beside dense attention in float64."""
    if kind == "pretend":
        from benchmarks.gpu import pretend

        pretend.prepare()
    machine = Machine(torch.device(kind, 0) if kind != "cpu" else torch.device(kind), small=kind != "cuda")
    if machine.is_cuda:
        torch.cuda.set_device(machine.device)
    dist.init_process_group(backend)
    ring, dtype = rg.Ring(), machine.size(torch.bfloat16, torch.float32)
    whole = [machine.draw(1, heads, length, WIDTH, dtype=dtype, seed=heads) for heads in (HEADS, SHARED, SHARED + 1)]
    whole[2] = whole[2][:, :SHARED]
    try:
        ours = learned(partial(attend, ring), [ring.share(x) for x in whole])
        (milliseconds,) = machine.medians(lambda: learned(partial(attend, ring), [ring.share(x) for x in whole]))
        exact = [ring.share(x) for x in learned(dense, [x.double() for x in whole])]
    except rg.RegardError as refusal:
        return {"refused": str(refusal)}
    off = [float((x.double() - y).abs().max() / y.abs().max()) for x, y in zip(ours, exact, strict=True)]
    limit = max(8 * torch.finfo(dtype).eps, 1e-5)
    found = {"output": off[0], "gradients": max(off[1:]), "limit": limit, "holds": max(off) <= limit}
    return found | {"ms": milliseconds}


def attend(ring: rg.Ring, *inputs: Tensor) -> Tensor:
    return rg.Attention(mask=rg.causal())(*inputs, engine=ring).output


def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """SDPA's math, one head of queries at a time."""
    groups, outputs = query.shape[1] // key.shape[1], []
    for head in range(query.shape[1]):
        mine = query[:, head : head + 1], key[:, head // groups, None], value[:, head // groups, None]
        outputs.append(F.scaled_dot_product_attention(*mine, is_causal=True))
    return torch.cat(outputs, 1)


def learned(run: partial[Tensor] | object, inputs: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of the sum of its squares."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = run(*leaves)  # type: ignore[operator]
    return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]


if __name__ == "__main__":
    print(json.dumps(a_rank(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
    if dist.is_initialized():
        dist.destroy_process_group()
