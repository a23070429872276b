"""Which module of a model runs, and what it asks torch for meanwhile.

Hooks are those of all modules, not of one: `nn.TransformerEncoderLayer` leaves its fused path, and
changes its last bits, once one of its modules has a hook of its own. For the same reason the function
mode is never active while one of torch's own attention modules runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

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

    def __init__(self, followers: list[Follower]) -> None:
        super().__init__()
        self.followers = followers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        for follower in tuple(self.followers):
            follower.asked(func, args, kwargs, output)
        return output


class _Running:
    """The followers of all watched models, and one ear for them, on while a loud module runs."""

    def __init__(self) -> None:
        self.followers: list[Follower] = []
        self._loud: list[nn.Module] = []
        self._hooks: tuple[RemovableHandle, ...] = ()
        self._ear = _Ear(self.followers)

    @contextmanager
    def followed_by(self, follower: Follower) -> Iterator[None]:
        if not self.followers:
            self._hooks = (
                register_module_forward_pre_hook(self._start),
                register_module_forward_hook(self._end, with_kwargs=True, always_call=True),
            )
        self.followers.append(follower)
        try:
            yield
        finally:
            self.followers.remove(follower)
            if not self.followers:
                self._stop()

    def _start(self, module: nn.Module, _: Any) -> None:
        for follower in self.followers:
            follower.started(module)
        if any(follower.is_loud(module) for follower in self.followers):
            self._loud.append(module)
            if len(self._loud) == 1:
                self._ear.__enter__()

    def _end(self, module: nn.Module, args: tuple[Any, ...], *more: Any) -> None:
        kwargs, output = more if len(more) == 2 else ({}, None)  # after an exception torch leaves the kwargs out
        if self._loud and self._loud[-1] is module:
            self._loud.pop()
            if not self._loud:
                self._ear.__exit__(None, None, None)
        for follower in tuple(self.followers):
            follower.ended(module, args, kwargs, output)

    def _stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
            _with_kwargs.pop(hook.id, None)  # torch leaves this entry behind, and compiled models then warn of hooks
        if self._loud:
            self._ear.__exit__(None, None, None)
            self._loud.clear()


running = _Running()
