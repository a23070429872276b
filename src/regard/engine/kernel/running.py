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
from ctypes import CDLL, Structure, addressof, byref, c_int, c_int64, c_size_t, c_uint, c_void_p, cast
from functools import cache
from mmap import PAGESIZE
from threading import local
from typing import NamedTuple

import torch
from torch import Tensor

from regard.engine.kernel.library import Library
from regard.engine.kernel.structures import Pointers

#: Multiply-adds that a thread should have to do: waking one takes about 50 microseconds.
WORTH_A_THREAD = 1 << 22

#: Fewest bytes of a block that the C library takes anew from the system. It keeps smaller blocks for later use.
FRESH_BYTES = 32 << 20
#: The advice of Linux's `madvise` that asks for large pages.
MADV_HUGEPAGE = 14

#: Most floats of scratch memory that a thread keeps.
MOST_KEPT_FLOATS = 1 << 20

#: Each thread's `scratch`.
_kept = local()
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
    """Forget the threads of the parent, which do not exist in a forked process.

    The OpenMP runtime would wait for its own, so a pool of Python runs in its place.
    """
    global _is_forked
    _is_forked = True
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_forked)


def empty(*shape: int) -> Tensor:
    """A buffer of the kernels, whatever torch's default dtype and device are."""
    return on_large_pages(torch.empty(shape, dtype=torch.float32, device="cpu"))


def on_large_pages(memory: Tensor) -> Tensor:
    """The same new tensor. If it is large, Linux is asked to use pages of 2 MiB, where its settings allow that.

    The first write to a page interrupts the program. With pages of 4 KiB, this took a tenth of the time of a call with
    a window over a long text.
    """
    if memory.nbytes >= FRESH_BYTES and (advise := _madvise()) is not None:
        first = -(-memory.data_ptr() // PAGESIZE) * PAGESIZE  # only whole pages can be advised
        advise(first, memory.data_ptr() + memory.nbytes - first, MADV_HUGEPAGE)
    return memory


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """`madvise` of the C library of Linux; None on other systems."""
    function = getattr(CDLL(None), "madvise", None) if sys.platform == "linux" else None
    if function is not None:
        function.argtypes = (c_void_p, c_size_t, c_int)
    return function


def zeros(*shape: int) -> Tensor:
    """Sums of the kernels, 0 at the start."""
    return torch.zeros(shape, dtype=torch.float32, device="cpu")


def scratch(num_floats: int) -> Tensor:
    """Memory of floats for a call that this thread computes alone; the next such call gets the same memory.

    To give a few hundred kilobytes back to the system and to get them again takes longer than a short call.
    """
    if num_floats > MOST_KEPT_FLOATS:
        return empty(num_floats)
    memory = getattr(_kept, "scratch", None)
    if memory is None or memory.numel() < num_floats:
        memory = _kept.scratch = empty(num_floats)
    return memory


class Workspace(NamedTuple):
    """The scratch memory of `num_threads` threads, `num_bytes` each. The call keeps it alive."""

    address: int
    num_bytes: int
    num_threads: int


def threads_for(multiply_adds: int) -> int:
    """The threads that the work is worth, at most those of torch."""
    return max(1, min(torch.get_num_threads(), multiply_adds // WORTH_A_THREAD))


def run(library: Library, name: str, call: Pointers, multiply_adds: int, fields: Pointers | None = None) -> None:
    """Call `regard_NAME` on as many threads as the work is worth.

    `call` is its first argument, which has counters of work at 0, and `fields` the one after the scratch memory, if it
    has one. Returns when all work is done.
    """
    num_threads, num_floats = threads_for(multiply_adds), workspace_floats(library, name, call)
    memory = scratch(num_floats) if num_threads == 1 else empty(num_threads, num_floats)
    call.tensors.append(memory)
    run_in(Workspace(memory.data_ptr(), 4 * num_floats, num_threads), library, name, call, fields)


def run_in(workspace: Workspace, library: Library, name: str, call: Pointers, fields: Pointers | None = None) -> None:
    """`run` of the function `name` with the scratch memory and the number of threads that the caller chose."""
    function, more = library.function(name), () if fields is None else (fields,)
    if workspace.num_threads == 1:
        _share(function, call, workspace.address, more)
    elif (runtime := None if _is_forked else _openmp()) is not None:
        team = Team(cast(function, c_void_p), addressof(call), fields and addressof(fields))
        _in_team(runtime, library, team, workspace)
    else:
        _in_pool(workspace, function, call, more)


def _in_pool(workspace: Workspace, function: object, call: Pointers, more: tuple[Pointers, ...]) -> None:
    """This thread and those of a pool of Python compute the shares, each in scratch memory of its own."""
    others, num_threads = [], workspace.num_threads
    for number in range(1, num_threads):
        address = workspace.address + number * workspace.num_bytes
        with suppress(RuntimeError):  # Python starts no thread at its end, or for lack of memory: others do its share
            others.append(_pool(num_threads).submit(_share, function, call, address, more))
    _share(function, call, workspace.address, more)
    for other in others:
        other.result()


def _in_team(runtime: tuple[Callable[..., None], int], library: Library, team: Team, workspace: Workspace) -> None:
    """The threads of torch's OpenMP runtime compute the shares, this thread among them.

    `runtime` is the result of `_openmp`. The number of a thread in its team says which scratch memory is its own.
    """
    start, team.thread_number = runtime
    team.scratch, team.scratch_bytes = workspace.address, workspace.num_bytes
    start(library.run_member, byref(team), workspace.num_threads, 0)


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


def workspace_floats(library: Library, name: str, call: Pointers) -> int:
    """The floats of scratch memory that each thread needs."""
    size = library.function(f"{name}_workspace")
    size.restype = c_int64
    return size(byref(call))


def _share(function: object, call: Pointers, scratch_address: int, more: tuple[Pointers, ...]) -> None:
    """Let this thread take units of work from the counters of the call until none is left."""
    function(byref(call), c_void_p(scratch_address), *map(byref, more))  # type: ignore[operator]


def _pool(num_threads: int) -> ThreadPoolExecutor:
    """The waiting threads; one pool for each number, because a pool does not grow."""
    if num_threads not in _pools:
        _pools[num_threads] = ThreadPoolExecutor(num_threads - 1, "regard-kernel")
    return _pools[num_threads]
