"""The device that is measured: its sizes, its clock and its memory."""

from __future__ import annotations

import gc
import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import in_turn
from benchmarks.roofline import commit

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """A device. A `small` one is a dry run: tiny sizes, and what only a GPU can do runs on the `host`."""

    device: torch.device
    small: bool = False

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def host(self) -> torch.device:
        """Where FlexAttention, Triton and process groups run: on the GPU, or on the CPU in a dry run."""
        return self.device if self.is_cuda else torch.device("cpu")

    def size(self, large: Any, small: Any) -> Any:
        return small if self.small else large

    def place(self, value: Any) -> Any:
        """A module or a tensor on the device."""
        if isinstance(value, nn.Module) and self.device.type == "pretend":
            from accelerator import moved

            return moved(value)
        return value.to(self.device)

    def draw(self, *shape: int, dtype: torch.dtype, seed: int = 0, host: bool = False) -> Tensor:
        """Normal numbers, the same on every device."""
        numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        return numbers.to(self.host if host else self.device)

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def medians(self, *runs: Callable[[], object], rounds: int = 7) -> list[float]:
        """The median milliseconds of each run, in the order A B A B ..., after two runs of each."""
        for run in runs * 2:
            run()
        rounds = self.size(rounds, 1)
        if not self.is_cuda:
            return [1000 * seconds for seconds in in_turn(*runs, rounds=rounds, warm_up=False)]
        times: list[list[float]] = [[] for _ in runs]
        for _ in range(rounds):
            for run, taken in zip(runs, times, strict=True):
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self.wait()
                start.record()
                run()
                stop.record()
                self.wait()
                taken.append(start.elapsed_time(stop))
        return [statistics.median(taken) for taken in times]

    def peak(self, run: Callable[[], object]) -> float | None:
        """GiB that a run adds on the device at most, its result included; None in a dry run."""
        if not self.is_cuda:
            run()
            return None
        self.give_back()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kept = run()
        self.wait()
        added = torch.cuda.max_memory_allocated() - before
        del kept
        return added / GIB

    def give_back(self) -> None:
        """Free what earlier rows left."""
        gc.collect()
        if self.is_cuda:
            self.wait()
            torch.cuda.empty_cache()

    def conditions(self) -> dict[str, str]:
        """What a row was measured with."""
        names = {"transformers", "triton"}
        name = torch.cuda.get_device_name() if self.is_cuda else f"dry run ({self.device.type})"
        found = {"device": name, "commit": commit() or "unknown", "torch": torch.__version__}
        found |= {"cuda": str(torch.version.cuda), "python": platform.python_version()}
        return found | {name: version for name in sorted(names) if (version := _version(name))}


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""
