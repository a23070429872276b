"""Runs a function of the kernels on all threads of torch.

Each thread calls the same function and takes units of work from shared counters until none is left, so the result does
not depend on the number of threads. ctypes releases the interpreter lock during a call.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import byref, c_int64, c_void_p

import torch
from torch import Tensor

from regard.engine.kernel.library import Library
from regard.engine.kernel.structures import Pointers

#: Multiply-adds that a thread should have to do: waking one takes about 50 microseconds.
WORTH_A_THREAD = 1 << 22

_pools: dict[int, ThreadPoolExecutor] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)  # the threads of a pool do not exist in a forked process


def empty(*shape: int) -> Tensor:
    """A buffer of the kernels, whatever torch's default dtype and device are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def zeros(*shape: int) -> Tensor:
    """Sums of the kernels, 0 at the start."""
    return torch.zeros(shape, dtype=torch.float32, device="cpu")


def counters(count: int) -> Tensor:
    """Counters of units of work, 0 at the start."""
    return torch.zeros(count, dtype=torch.int64, device="cpu")


def run(library: Library, name: str, call: Pointers, multiply_adds: int, *more: Pointers) -> None:
    """Call `regard_NAME` on as many threads as the work is worth, at most those of torch.

    `call` is its first argument, and `more` are those after the call and the scratch memory.
    """
    num_threads = max(1, min(torch.get_num_threads(), multiply_adds // WORTH_A_THREAD))
    memory = workspace(library, name, call, num_threads)
    function = library.function(name)
    if num_threads == 1:
        _share(function, call, memory, more)
        return
    others = [_started(num_threads, function, call, part, more) for part in memory[1:]]
    _share(function, call, memory[0], more)
    for other in others:
        if other is not None:
            other.result()


def workspace(library: Library, name: str, call: Pointers, num_threads: int = 1) -> Tensor:
    """The scratch memory of each thread."""
    size = library.function(f"{name}_workspace")
    size.restype = c_int64
    return empty(num_threads, size(byref(call)))


def _started(
    num_threads: int, function: object, call: Pointers, memory: Tensor, more: tuple[Pointers, ...]
) -> Future[None] | None:
    """A share on another thread; None if Python starts none, at its end or for lack of memory: others do this share."""
    try:
        return _pool(num_threads).submit(_share, function, call, memory, more)
    except RuntimeError:
        return None


def _share(function: object, call: Pointers, memory: Tensor, more: tuple[Pointers, ...]) -> None:
    function(byref(call), c_void_p(memory.data_ptr()), *map(byref, more))  # type: ignore[operator]


def _pool(num_threads: int) -> ThreadPoolExecutor:
    """The waiting threads; one pool for each number, because a pool does not grow."""
    if num_threads not in _pools:
        _pools[num_threads] = ThreadPoolExecutor(num_threads - 1, "regard-kernel")
    return _pools[num_threads]
