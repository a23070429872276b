"""Measures median times of alternating runs, and peak memory in a separate process."""

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
    """A measured number and its limit, an upper (`at_most`) or a lower limit."""

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
    """The median seconds of each run, in the order A B A B ..., after one warm-up run of each."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs if warm_up else ():
        run()
    for _ in range(rounds):
        for run, seconds in zip(runs, times, strict=True):
            start = clock()
            run()
            seconds.append(clock() - start)
    return [statistics.median(seconds) for seconds in times]


def added_memory(prepare: Callable[[], Callable[[], object]], device: str = "cpu", warm_up: bool = False) -> float:
    """The peak memory of a run in a new process, minus its memory after `prepare`, in MiB.

    With `warm_up` the run is called once before, so that permanent allocations, such as compiled code, do not count. On
    "cuda" it is the memory that torch allocates on the device.
    """
    context = multiprocessing.get_context("forkserver")  # imports torch once, not in every process
    context.set_forkserver_preload(["torch", "regard.api", "transformers"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(prepare, device, warm_up, sender), daemon=True)
    process.start()
    sender.close()
    try:
        peak = receiver.recv()
    except EOFError:
        process.join()
        raise MemoryError(f"the measured process ended early (status {process.exitcode})") from None
    finally:
        process.kill()
        process.join()
    return peak


def _measure(prepare: Callable[[], Callable[[], object]], device: str, warm_up: bool, sender) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets the signal, and ends this process
    run = prepare()
    if warm_up:
        run()
    gc.collect()
    sender.send((_peak_on_cuda if device == "cuda" else _peak)(run) / 2**20)


def _peak(run: Callable[[], object]) -> int:
    _give_back_free_memory()
    if _forget_peak():
        before, peak = _status("VmRSS"), partial(_status, "VmHWM")
    else:
        before, peak = _peak_since_start(), _peak_since_start
    run()
    return max(0, peak() - before)


def _peak_on_cuda(run: Callable[[], object]) -> int:
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _give_back_free_memory() -> None:
    """Return free memory of the C library to the system. Otherwise it would hide the next allocations."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _forget_peak() -> bool:
    """Reset the peak of the resident size; return whether the system supports this."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def _peak_since_start() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
