"""Runs the kernels of a call in another process: of another processor, or with the checks of a sanitizer."""

from __future__ import annotations

import ctypes
import gc
import struct
import subprocess
from bisect import bisect_right
from collections.abc import Callable, Iterator

import pytest
import torch

from regard.engine.kernel import attention
from regard.engine.kernel.structures import Pointers

#: The order of `functions` in kernels/harness.c.
FUNCTIONS = (
    *("forward", "backward", "decode", "rotate", "sums", "statistics", "similarity"),
    *("recurrence_forward", "recurrence_backward", "transport"),
    *("chosen", "chosen_backward", "index", "greatest"),
)


def pointer_offsets(kind: type[ctypes.Structure], start: int = 0) -> Iterator[int]:
    """Where a structure holds pointers, in bytes."""
    for name, field in kind._fields_:
        place = start + getattr(kind, name).offset
        if field is ctypes.c_void_p:
            yield place
        elif issubclass(field, ctypes.Structure):
            yield from pointer_offsets(field, place)


def memory_of_tensors() -> list[tuple[int, int]]:
    """The (address, number of bytes) of the memory of every tensor, in the order of addresses."""
    kinds = (torch.Tensor, torch.nn.Parameter)
    tensors = [t for t in gc.get_objects() if type(t) in kinds and t.device.type == "cpu" and t.layout == torch.strided]
    storages = [t.untyped_storage() for t in tensors]
    return sorted({(s.data_ptr(), s.nbytes()) for s in storages if s.data_ptr()})


def counters_of(structures: tuple[Pointers, ...]) -> Iterator[tuple[int, int]]:
    """The same of the counters of calls, which are no tensors."""
    for units in (structure.units for structure in structures if hasattr(structure, "units")):
        yield ctypes.addressof(units), ctypes.sizeof(units)


def stand_in(monkeypatch: pytest.MonkeyPatch, harness: Callable[..., None]) -> None:
    """Let `harness` compute the forward and backward calls of the kernel engine, in place of `run`."""
    monkeypatch.setattr(attention, "run", harness)
    monkeypatch.setattr(attention, "run_in", lambda workspace, *call: harness(*call[:3], 0, *call[3:]))


class Harness:
    """Stands in for `run` of the kernel engine: sends the call to kernels/harness.c, and writes back what it wrote."""

    def __init__(self, *command: str) -> None:
        self.command = command
        self.num_calls = 0

    def __call__(self, library: object, name: str, call: Pointers, multiply_adds: int, *more: Pointers) -> None:
        self.num_calls += 1
        structures = call, *more
        memory = sorted({*memory_of_tensors(), *counters_of(structures)})
        starts = [address for address, _ in memory]
        used, pointers = [], []
        for number, structure in enumerate(structures):
            for offset in pointer_offsets(type(structure)):
                address = ctypes.c_void_p.from_buffer(structure, offset).value
                if address:
                    start, size = memory[bisect_right(starts, address) - 1]
                    assert address <= start + size, "the pointer leads to a tensor"
                    if (start, size) not in used:
                        used.append((start, size))
                    place = len(structures) + used.index((start, size))
                    pointers += [number, offset, place, address - start]
        answer = self._answer(name, [bytes(x) for x in structures], used, pointers)
        at = sum(map(ctypes.sizeof, structures))
        for start, size in used:
            ctypes.memmove(start, answer[at : at + size], size)
            at += size

    def _answer(self, name: str, structures: list[bytes], used: list[tuple[int, int]], pointers: list[int]) -> bytes:
        sizes = [*map(len, structures), *(size for _, size in used)]
        numbers = [FUNCTIONS.index(name), len(sizes), len(pointers) // 4, *sizes, *pointers]
        sent = [struct.pack(f"<{len(numbers)}q", *numbers), *structures, *(ctypes.string_at(*place) for place in used)]
        done = subprocess.run(self.command, input=b"".join(sent), capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        assert len(done.stdout) == sum(sizes)
        return done.stdout
