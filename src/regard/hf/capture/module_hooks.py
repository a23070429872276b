"""`module_calls` reports the start and end of every module, and the torch functions that chosen modules call.

The hooks are torch's global ones. A hook on a single module would make `nn.TransformerEncoderLayer` leave its fused
path, which changes the last bits of its output. For the same reason the function mode is off while torch's own
attention modules run.
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

from regard.base.context import ContextItems
from regard.hf.capture.edited_modules import edited_function, edited_multihead
from regard.hf.capture.torch_calls import ObservedCall
from regard.hf.edited_calls import editors

_with_kwargs: dict[int, bool] = getattr(nn.modules.module, "_global_forward_hooks_with_kwargs", {})


class ModuleObserver(Protocol):
    """Is called at the start and the end of every module, and for every torch function inside chosen modules."""

    def observes_functions(self, module: nn.Module) -> bool: ...
    def module_started(self, module: nn.Module) -> None: ...
    def module_ended(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None: ...
    def function_called(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None: ...
    def call_edited(self, observed: ObservedCall) -> None: ...


class _OpenModules(threading.local):
    """The modules with observed functions that run in this thread. Torch's function modes belong to a thread, too."""

    def __init__(self) -> None:
        self.stack: list[nn.Module] = []


class _FunctionCalls(TorchFunctionMode):
    """Runs every torch function, as the open edits change it, and then reports it to the observers."""

    def __init__(self, observers: Iterable[ModuleObserver], open_modules: _OpenModules) -> None:
        super().__init__()
        self.observers, self.open_modules = observers, open_modules

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if editors and (edited := edited_function(self.open_modules.stack[-1], func, args, kwargs)) is not None:
            for observer in self.observers:
                observer.call_edited(edited.observed)
            return edited.returned
        output = func(*args, **kwargs)
        for observer in self.observers:
            observer.function_called(func, args, kwargs, output)
        return output


class _ModuleCalls:
    """The observers of this thread, and a function mode, which is on while a module with observed functions runs.

    The hooks belong to the process, and are registered while any thread watches.
    """

    def __init__(self) -> None:
        self.observers: ContextItems[ModuleObserver] = ContextItems("observers")
        self._open_modules = _OpenModules()
        self._function_calls = _FunctionCalls(self.observers, self._open_modules)
        self._hooks: tuple[RemovableHandle, ...] = ()
        self._num_open, self._lock = 0, threading.Lock()

    @contextmanager
    def observed_by(self, observer: ModuleObserver) -> Iterator[None]:
        self._open()
        try:
            with self.observers.adding(observer):
                yield
        finally:
            if self._open_modules.stack and not self.observers:
                self._open_modules.stack.clear()
                self._function_calls.__exit__(None, None, None)
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
                    _with_kwargs.pop(hook.id, None)  # torch keeps this entry, and compiled models then warn of hooks

    def _start(self, module: nn.Module, _: Any) -> None:
        for observer in self.observers:
            observer.module_started(module)
        if any(observer.observes_functions(module) for observer in self.observers):
            self._open_modules.stack.append(module)
            if len(self._open_modules.stack) == 1:
                self._function_calls.__enter__()

    def _end(self, module: nn.Module, args: tuple[Any, ...], *more: Any) -> Any:
        """Report the end of a module; returns its output if an edit changed it."""
        kwargs, output = more if len(more) == 2 else ({}, None)  # after an exception torch does not pass the kwargs
        if self._open_modules.stack and self._open_modules.stack[-1] is module:
            self._open_modules.stack.pop()
            if not self._open_modules.stack:
                self._function_calls.__exit__(None, None, None)
        edited = edited_multihead(module, args, kwargs, output) if editors else None
        if edited is not None:
            output = edited.returned
            for observer in self.observers:
                observer.call_edited(edited.observed)
        for observer in self.observers:
            observer.module_ended(module, args, kwargs, output)
        return None if edited is None else output


module_calls = _ModuleCalls()


def inside_backward() -> bool:
    """Whether a backward pass runs in this thread. Activation checkpointing runs modules again inside it."""
    return torch._C._current_graph_task_id() != -1
