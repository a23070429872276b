"""What this machine can do at most, measured in the same run: the two ends of the roofline."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from regard.bench.measure import in_turn

#: Rows and columns of the matrices that are multiplied.
SIDE = {"cpu": 2048, "cuda": 8192}
#: Numbers that are copied.
COPIED = {"cpu": 1 << 26, "cuda": 1 << 28}


@dataclass(frozen=True)
class Machine:
    """The rate of matrix products in FLOP/s, and bytes read and written by a copy, a second.

    Both with the threads, the device and the dtype of the measurements they stand beside. `name` is
    that of the processor or card.
    """

    name: str
    device: str
    dtype: str
    threads: int
    products: float
    copying: float

    @property
    def clock(self) -> Callable[[], float]:
        """One thread is timed by its processor time, which other work beside it does not change; more by the wall."""
        return time.process_time if self.device == "cpu" and self.threads == 1 else time.perf_counter

    def __str__(self) -> str:
        threads = "" if self.device == "cuda" else f", {self.threads} thread{'' if self.threads == 1 else 's'}"
        timed = " timed by the processor's clock" if self.clock is time.process_time else ""
        return (
            f"{self.name}{threads}{timed}, {self.dtype}: {self.products / 1e9:,.0f} GFLOP/s in matrix products, "
            f"{self.copying / 1e9:,.1f} GB/s read and written by a copy"
        )


def measured(device: str = "cpu", dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Machine:
    """Multiply and copy for about a second; `scale` makes matrices and copies smaller."""
    threads = torch.get_num_threads()
    name = torch.cuda.get_device_name() if device == "cuda" else processor()
    found = Machine(name, device, str(dtype).removeprefix("torch."), threads, 0.0, 0.0)
    side, count = int(SIDE[device] * scale), int(COPIED[device] * scale)
    a, b = (torch.rand(side, side, device=device, dtype=dtype) for _ in range(2))
    (product,) = in_turn(waited(lambda: a @ b, device), rounds=5, clock=found.clock)
    source = torch.rand(count, device=device).to(dtype)
    target = torch.empty_like(source)
    (copy,) = in_turn(waited(lambda: target.copy_(source), device), rounds=5, clock=found.clock)
    moved = 2 * source.numel() * source.element_size()
    return replace(found, products=2 * side**3 / product, copying=moved / copy)


def waited(run: Callable[[], object], device: str) -> Callable[[], object]:
    """The same work, done when the call returns: a card computes on while Python goes ahead."""
    if device != "cuda":
        return run

    def synchronized() -> object:
        result = run()
        torch.cuda.synchronize()
        return result

    return synchronized


def processor() -> str:
    """What the system calls its processor."""
    told = Path("/proc/cpuinfo")
    for line in told.read_text().splitlines() if told.exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def free_memory(device: str = "cpu") -> int:
    """Bytes that can be taken now; a great number where the system does not tell."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    told = Path("/proc/meminfo")
    for line in told.read_text().splitlines() if told.exists() else ():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def commit() -> str:
    """The commit of the working tree around this package, or "" where there is none."""
    try:
        told = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parent,
        )
    except OSError:
        return ""
    return told.stdout.strip()
