"""Medians of peers in turn, and peak memory in a process of its own."""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
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

    def __str__(self) -> str:
        sign = "<=" if self.at_most else ">="
        verdict = "holds" if self.holds else "MISSED"
        return f"{self.work:<74} {self.measured:9.2f} {sign} {self.limit:g} {self.unit:<14} {verdict}"


def in_turn(
    *runs: Callable[[], object], rounds: int = 5, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Median seconds of each, run A B A B ... after one warm-up of each."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    for _ in range(rounds):
        for run, mine in zip(runs, times, strict=True):
            start = clock()
            run()
            mine.append(clock() - start)
    return [statistics.median(mine) for mine in times]


def added_memory(prepare: Callable[[], Callable[[], object]]) -> float:
    """MiB by which the resident memory of a fresh process peaks over what it held once prepared."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(prepare, sender))
    process.start()
    peak = receiver.recv()
    process.join()
    return peak


def _measure(prepare: Callable[[], Callable[[], object]], sender) -> None:
    run = prepare()
    before = _resident()
    peak, done = [before], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], _resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    run()
    done.set()
    watcher.join()
    sender.send((max(peak[0], _resident()) - before) / 2**20)


def _resident() -> int:
    """Resident bytes now, where the system tells; else the most so far."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
