"""Measures the limits of this machine, the sides of the roofline: multiply-adds, matrix products and reading."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int64
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.measure import in_turn
from regard.engine.kernel.library import load

#: Rows and columns of the multiplied matrices.
SIDE = {"cpu": 2048, "cuda": 8192}
#: The number of elements that are read once.
READ = {"cpu": 1 << 26, "cuda": 1 << 28}
#: Rounds of multiply-adds in registers of one thread: at most 40 ms.
ROUNDS = 5_000_000


@dataclass(frozen=True)
class Machine:
    """The rate of matrix products in FLOP/s, and the bytes per second of a sum, which only reads.

    Both have the threads, the device and the dtype of the measured cases. `name` is that of the processor or the GPU.
    `kernel` is the vector width of the compiled kernels that run (the environment variable REGARD_KERNEL lowers it),
    and `multiply_adds` its limit in FLOP/s: multiply-adds in registers. Without kernels they are "" and 0.
    """

    name: str
    device: str
    dtype: str
    threads: int
    products: float
    reading: float
    kernel: str = ""
    multiply_adds: float = 0.0

    @property
    def clock(self) -> Callable[[], float]:
        """Processor time for one thread, because other processes do not change it; otherwise wall time."""
        return time.process_time if self.device == "cpu" and self.threads == 1 else time.perf_counter

    def __str__(self) -> str:
        threads = "" if self.device == "cuda" else f", {self.threads} thread{'' if self.threads == 1 else 's'}"
        timed = " timed by the processor's clock" if self.clock is time.process_time else ""
        limit = f"{self.multiply_adds / 1e9:,.0f} GFLOP/s in multiply-adds of {self.kernel}, " if self.kernel else ""
        return (
            f"{self.name}{threads}{timed}, {self.dtype}: {limit}{self.products / 1e9:,.0f} GFLOP/s in matrix products, "
            f"{self.reading / 1e9:,.1f} GB/s in a pass that only reads"
        )


def measured(device: str = "cpu", dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Machine:
    """Measure products and a pass that reads for about a second. `scale` makes both smaller."""
    threads = torch.get_num_threads()
    name = torch.cuda.get_device_name() if device == "cuda" else processor()
    machine = Machine(name, device, str(dtype).removeprefix("torch."), threads, 0.0, 0.0)
    side, count = int(SIDE[device] * scale), int(READ[device] * scale)
    a, b = (torch.rand(side, side, device=device, dtype=dtype) for _ in range(2))
    (product,) = in_turn(waited(lambda: a @ b, device), rounds=5, clock=machine.clock)
    source = torch.rand(count, device=device).to(dtype)
    (passed,) = in_turn(waited(source.sum, device), rounds=5, clock=machine.clock)
    reading = source.numel() * source.element_size() / passed
    machine = replace(machine, products=2 * side**3 / product, reading=reading)
    return _with_limit(machine, int(ROUNDS * scale)) if device == "cpu" else machine


def _with_limit(machine: Machine, rounds: int) -> Machine:
    """The machine with the limit of the compiled kernels, measured on all its threads at once."""
    library = load()
    if library is None:
        return machine
    limit = library.function("limit")
    limit.argtypes, limit.restype = [c_int64], c_int64
    operations = limit(rounds) * machine.threads
    with ThreadPoolExecutor(machine.threads) as pool:  # ctypes releases the interpreter lock
        (seconds,) = in_turn(lambda: list(pool.map(limit, [rounds] * machine.threads)), rounds=5, clock=machine.clock)
    return replace(machine, kernel=library.vectors, multiply_adds=operations / seconds)


def waited(run: Callable[[], object], device: str) -> Callable[[], object]:
    """The same run, finished when it returns: calls on a GPU return earlier."""
    if device != "cuda":
        return run

    def synchronized() -> object:
        result = run()
        torch.cuda.synchronize()
        return result

    return synchronized


def processor() -> str:
    """The name of the processor, and on Linux the family and model, which tell the generations of one name apart."""
    info = Path("/proc/cpuinfo")
    lines = (line.split(":", 1) for line in (info.read_text().splitlines() if info.exists() else ()) if ":" in line)
    known = {name.strip(): value.strip() for name, value in lines}
    if "model name" not in known:
        return platform.processor() or platform.machine()
    numbers = [f"{name} {known[key]}" for name, key in (("family", "cpu family"), ("model", "model")) if key in known]
    return f"{known['model name']} ({', '.join(numbers)})" if numbers else known["model name"]


def free_memory(device: str = "cpu") -> int:
    """The free memory in bytes; a large number if the system does not give it."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    info = Path("/proc/meminfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def commit() -> str:
    """The commit of the working tree of this package, or "" if there is none."""
    try:
        process = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parent,
        )
    except OSError:
        return ""
    return process.stdout.strip()
