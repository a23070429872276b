"""Rows of results: each is written to a file as soon as it is measured, and is not measured again."""

from __future__ import annotations

import json
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import regard as rg
from benchmarks.gpu.machine import Machine
from regard.base.whole_files import write_whole

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One row: what it is about, and the run that measures it."""

    about: Row
    run: Callable[[], Row]
    #: Whether a `RegardError` is a result.
    may_refuse: bool = False

    @property
    def key(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.about.items())


def read(path: Path) -> list[Row]:
    return json.loads(path.read_text())["rows"] if path.exists() else []


def write(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"rows": rows}, indent=1) + "\n")


def measure(jobs: Iterable[Job], machine: Machine, path: Path, seconds: float) -> int:
    """Measure the jobs that the file has no row of, until the time is over; returns how many are left."""
    rows, end, left = read(path), time.monotonic() + seconds, 0
    known = {row["key"] for row in rows}
    for job in jobs:
        if job.key in known:
            continue
        if time.monotonic() > end:
            left += 1
            continue
        begun = time.monotonic()
        found = attempt(job)
        taken = round(time.monotonic() - begun, 2)
        rows.append({"key": job.key, **job.about, **found, "seconds": taken, **machine.conditions()})
        write(path, rows)
        print(f"{job.key}: {in_words(found)} ({taken} s)", flush=True)
        machine.give_back()
    return left


def attempt(job: Job) -> Row:
    """What a job measures; or `refused`, what Regard or torch say that they do not do; or `error`."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            found = job.run()
        except torch.OutOfMemoryError:
            return {"refused": "out of memory"}
        except Exception as error:  # a row that fails must not end the part
            if job.may_refuse and isinstance(error, rg.RegardError):
                return {"refused": str(error)}
            if is_without_kernel(error):
                return {"refused": f"torch: {str(error).splitlines()[0]}"}
            return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc(limit=-6)}
    ours = sorted({str(one.message) for one in heard if "regard" in str(one.filename) or "Triton" in str(one.message)})
    return found | ({"warnings": ours} if ours else {})


def is_without_kernel(error: Exception) -> bool:
    """Whether torch says that the chosen kernel of SDPA cannot run a call."""
    said = str(error)
    return isinstance(error, RuntimeError) and ("No available kernel" in said or "No viable backend" in said)


def in_words(found: Row) -> str:
    shown = {name: value for name, value in found.items() if name != "traceback"}
    return ", ".join(f"{name} {_short(value)}" for name, value in shown.items())


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
