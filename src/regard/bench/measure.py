"""Medians of peers in turn, and peak memory in a process of its own."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path


@dataclass(frozen=True)
class Goal:
    """A number that was measured, beside what it should be: at most, or at least."""

    work: str
    measured: float
    limit: float
    unit: str
    at_most: bool = True

    @property
    def holds(self) -> bool:
        return self.measured <= self.limit if self.at_most else self.measured >= self.limit

    @property
    def wanted(self) -> str:
        """The limit in words.

        >>> Goal("planning", 4.6, 50, "ms").wanted
        'at most 50 ms'
        """
        return f"{'at most' if self.at_most else 'at least'} {self.limit:g} {self.unit}"

    def __str__(self) -> str:
        sign = "<=" if self.at_most else ">="
        verdict = "holds" if self.holds else "MISSED"
        return f"{self.work:<74} {self.measured:9.2f} {sign} {self.limit:g} {self.unit:<14} {verdict}"


def in_turn(
    *runs: Callable[[], object],
    rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
    warm_up: bool = True,
) -> list[float]:
    """Median seconds of each, run A B A B ... after one warm-up of each."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs if warm_up else ():
        run()
    for _ in range(rounds):
        for run, mine in zip(runs, times, strict=True):
            start = clock()
            run()
            mine.append(clock() - start)
    return [statistics.median(mine) for mine in times]


def added_memory(prepare: Callable[[], Callable[[], object]], device: str = "cpu", warm_up: bool = False) -> float:
    """MiB by which the memory of a fresh process peaks over what it held once prepared.

    With `warm_up` the work runs once before, so that what it allocates for good, such as compiled code, does not
    count. On "cuda" it is the memory that torch allocates on the device.
    """
    context = multiprocessing.get_context("forkserver")  # torch is imported once, not by every process
    context.set_forkserver_preload(["torch", "regard.api", "transformers"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(prepare, device, warm_up, sender), daemon=True)
    process.start()
    sender.close()
    try:
        peak = receiver.recv()
    except EOFError:
        process.join()
        raise MemoryError(f"the process that was measured ended early (status {process.exitcode})") from None
    finally:
        process.kill()
        process.join()
    return peak


def _measure(prepare: Callable[[], Callable[[], object]], device: str, warm_up: bool, sender) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who measures is told, and ends this process
    run = prepare()
    if warm_up:
        run()
    gc.collect()
    sender.send((_peak_on_cuda if device == "cuda" else _peak)(run) / 2**20)


def _peak(run: Callable[[], object]) -> int:
    _give_back_free_memory()
    if _forget_peak():
        before, tell = _status("VmRSS"), partial(_status, "VmHWM")
    else:
        before, tell = _most_so_far(), _most_so_far
    run()
    return max(0, tell() - before)


def _peak_on_cuda(run: Callable[[], object]) -> int:
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _give_back_free_memory() -> None:
    """Free memory that the C library keeps would hide what is allocated next."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _forget_peak() -> bool:
    """Whether the system could be told to count the greatest resident size anew."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status does not tell {name}")


def _most_so_far() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
