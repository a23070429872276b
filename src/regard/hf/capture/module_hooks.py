"""Which module of a model runs, and what it asks torch for meanwhile.

Hooks are those of all modules, not of one: `nn.TransformerEncoderLayer` leaves its fused path, and
changes its last bits, once one of its modules has a hook of its own. For the same reason the function
mode is never active while one of torch's own attention modules runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from regard.context import ContextItems

_with_kwargs: dict[int, bool] = getattr(nn.modules.module, "_global_forward_hooks_with_kwargs", {})


class Follower(Protocol):
    """What is told of every module that starts and ends, and of what loud modules ask torch for."""

    def is_loud(self, module: nn.Module) -> bool: ...
    def started(self, module: nn.Module) -> None: ...
    def ended(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None: ...
    def asked(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None: ...


class _Ear(TorchFunctionMode):
    """Runs every function, and tells its followers of it."""

    def __init__(self, followers: Iterable[Follower]) -> None:
        super().__init__()
        self.followers = followers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        for follower in self.followers:
            follower.asked(func, args, kwargs, output)
        return output


class _LoudModules(threading.local):
    """The loud modules that run in this thread. Function modes of torch belong to a thread, too."""

    def __init__(self) -> None:
        self.stack: list[nn.Module] = []


class _Running:
    """The followers of all watched models, and one ear for them, on while a loud module runs.

    The hooks belong to the process, and are there while any thread watches. Followers belong to a thread.
    """

    def __init__(self) -> None:
        self.followers: ContextItems[Follower] = ContextItems("followers")
        self._loud = _LoudModules()
        self._ear = _Ear(self.followers)
        self._hooks: tuple[RemovableHandle, ...] = ()
        self._num_open, self._lock = 0, threading.Lock()

    @contextmanager
    def followed_by(self, follower: Follower) -> Iterator[None]:
        self._open()
        try:
            with self.followers.adding(follower):
                yield
        finally:
            if self._loud.stack and not self.followers:
                self._loud.stack.clear()
                self._ear.__exit__(None, None, None)
            self._close()

    def _open(self) -> None:
        with self._lock:
            self._num_open += 1
            if self._num_open == 1:
                self._hooks = (
                    register_module_forward_pre_hook(self._start),
                    register_module_forward_hook(self._end, with_kwargs=True, always_call=True),
                )

    def _close(self) -> None:
        with self._lock:
            self._num_open -= 1
            if not self._num_open:
                for hook in self._hooks:
                    hook.remove()
                    _with_kwargs.pop(hook.id, None)  # torch leaves it behind, and compiled models then warn of hooks

    def _start(self, module: nn.Module, _: Any) -> None:
        for follower in self.followers:
            follower.started(module)
        if any(follower.is_loud(module) for follower in self.followers):
            self._loud.stack.append(module)
            if len(self._loud.stack) == 1:
                self._ear.__enter__()

    def _end(self, module: nn.Module, args: tuple[Any, ...], *more: Any) -> None:
        kwargs, output = more if len(more) == 2 else ({}, None)  # after an exception torch leaves the kwargs out
        if self._loud.stack and self._loud.stack[-1] is module:
            self._loud.stack.pop()
            if not self._loud.stack:
                self._ear.__exit__(None, None, None)
        for follower in self.followers:
            follower.ended(module, args, kwargs, output)


running = _Running()


def inside_backward() -> bool:
    """Whether a backward pass runs in this thread. Modules that run in it are recomputed (activation checkpointing)."""
    return torch._C._current_graph_task_id() != -1
