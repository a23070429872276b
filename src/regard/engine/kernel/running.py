"""Runs a function of the kernels on all threads of torch.

Each thread calls the same function and takes units of work from shared counters until none is left, so the result does
not depend on the number of threads. ctypes releases the interpreter lock during a call.

On Linux the threads are those of torch itself: its OpenMP runtime (libgomp) starts the function (kernels/team.c).
A pool of Python does so where torch has another runtime, and in a forked process, where libgomp cannot start threads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ctypes import CDLL, Structure, addressof, byref, c_int64, c_uint, c_void_p, cast
from functools import cache

import torch
from torch import Tensor

from regard.engine.kernel.library import Library
from regard.engine.kernel.structures import Pointers

#: Multiply-adds that a thread should have to do: waking one takes about 50 microseconds.
WORTH_A_THREAD = 1 << 22

_pools: dict[int, ThreadPoolExecutor] = {}
_is_forked = False


class Team(Structure):
    """`Team` of kernels/regard.h: what each thread of a team calls."""

    _fields_ = (
        *((name, c_void_p) for name in ("function", "call", "fields", "scratch")),
        ("scratch_bytes", c_int64),
        ("thread_number", c_void_p),
    )


def _begin_forked() -> None:
    """The threads of the parent do not exist in a forked process, and its OpenMP runtime would wait for them."""
    global _is_forked
    _is_forked = True
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_forked)


def empty(*shape: int) -> Tensor:
    """A buffer of the kernels, whatever torch's default dtype and device are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def zeros(*shape: int) -> Tensor:
    """Sums of the kernels, 0 at the start."""
    return torch.zeros(shape, dtype=torch.float32, device="cpu")


def counters(count: int) -> Tensor:
    """Counters of units of work, 0 at the start."""
    return torch.zeros(count, dtype=torch.int64, device="cpu")


def run(library: Library, name: str, call: Pointers, multiply_adds: int, fields: Pointers | None = None) -> None:
    """Call `regard_NAME` on as many threads as the work is worth, at most those of torch.

    `call` is its first argument, and `fields` the one after the scratch memory, if it has one.
    """
    num_threads = max(1, min(torch.get_num_threads(), multiply_adds // WORTH_A_THREAD))
    memory = workspace(library, name, call, num_threads)
    function = library.function(name)
    more = () if fields is None else (fields,)
    runtime = None if _is_forked else _openmp()
    if num_threads == 1:
        _share(function, call, memory, more)
    elif runtime is not None:
        _in_team(
            runtime, library, Team(cast(function, c_void_p), addressof(call), fields and addressof(fields)), memory
        )
    else:
        _in_pool(num_threads, function, call, memory, more)


def _in_pool(num_threads: int, function: object, call: Pointers, memory: Tensor, more: tuple[Pointers, ...]) -> None:
    """This thread and those of a pool of Python compute the shares."""
    others = []
    for part in memory[1:]:
        with suppress(RuntimeError):  # Python starts no thread at its end, or for lack of memory: others do its share
            others.append(_pool(num_threads).submit(_share, function, call, part, more))
    _share(function, call, memory[0], more)
    for other in others:
        other.result()


def _in_team(runtime: tuple[Callable[..., None], int], library: Library, team: Team, memory: Tensor) -> None:
    """The threads of torch's OpenMP runtime compute the shares, this thread among them."""
    start, team.thread_number = runtime
    team.scratch, team.scratch_bytes = memory.data_ptr(), memory.stride(0) * memory.element_size()
    start(library.run_member, byref(team), len(memory), 0)


@cache
def _openmp() -> tuple[Callable[..., None], int] | None:
    """`GOMP_parallel` and the address of `omp_get_thread_num`; None if torch does not run on libgomp.

    https://gcc.gnu.org/onlinedocs/libgomp/Implementing-PARALLEL-construct.html
    """
    if sys.platform != "linux" or "OpenMP" not in torch.__config__.parallel_info():
        return None
    try:
        loaded = CDLL(None)  # torch loads its runtime for everybody
        start, thread_number = loaded.GOMP_parallel, loaded.omp_get_thread_num
    except (OSError, AttributeError):
        return None
    start.argtypes, start.restype = (c_void_p, c_void_p, c_uint, c_uint), None
    return start, cast(thread_number, c_void_p).value or 0


def workspace(library: Library, name: str, call: Pointers, num_threads: int = 1) -> Tensor:
    """The scratch memory of each thread."""
    size = library.function(f"{name}_workspace")
    size.restype = c_int64
    return empty(num_threads, size(byref(call)))


def _share(function: object, call: Pointers, memory: Tensor, more: tuple[Pointers, ...]) -> None:
    function(byref(call), c_void_p(memory.data_ptr()), *map(byref, more))  # type: ignore[operator]


def _pool(num_threads: int) -> ThreadPoolExecutor:
    """The waiting threads; one pool for each number, because a pool does not grow."""
    if num_threads not in _pools:
        _pools[num_threads] = ThreadPoolExecutor(num_threads - 1, "regard-kernel")
    return _pools[num_threads]
