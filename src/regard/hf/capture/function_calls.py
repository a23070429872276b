"""`function_calls` reports every call of torch's attention functions in a thread, inside and outside of modules.

A function mode sees the calls. An open mode takes torch's own attention modules off their fused paths, which changes
the last bits of their outputs, so the mode is removed from the stack while one of them runs, and while `attend` runs.
Compiled code calls no function of Python, so it runs eagerly while a block is open.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch._C import _len_torch_function_stack
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from regard.base.context import ContextItems
from regard.engine.transforms import uncompiled
from regard.hf.attention_modules import names_called

#: Attention as Python calls it, and as the graphs of torch.export do.
SDPA = (
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)
#: Modules that leave their fused path if a function mode is open.
FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
COMPILED = (
    "regard.watch() does not see attention inside of a graph of torch.compile. Leave fullgraph=True out, or call the "
    "function before torch.compile"
)


def may_fuse(module: nn.Module) -> bool:
    """Whether torch's own forward may run in this module, by itself or called by the forward of a subclass."""
    kind = next((kind for kind in FUSED if isinstance(module, kind)), None)
    if kind is None or type(module).forward is kind.forward or "forward" in vars(module):
        return kind is not None
    return bool({"super", kind.__name__} & names_called(type(module)))


class CallObserver(Protocol):
    """Is called after every call of torch's attention functions."""

    def function_called(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None: ...


class _Mode(TorchFunctionMode):
    def __init__(self, observers: ContextItems[CallObserver]) -> None:
        super().__init__()
        self.observers = observers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **kwargs or {})
        if func is F.multi_head_attention_forward or any(func is known for known in SDPA):
            self._report(func, args, kwargs or {}, output)
        return output

    @partial(uncompiled, reason=COMPILED)  # code that is compiled while the block is open
    def _report(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        for observer in self.observers:
            observer.function_called(func, args, kwargs, output)

    def remove(self) -> bool:
        """Take the mode off the stack; returns whether it was there. torch itself removes a mode that runs."""
        above, was_there = [], False
        while not was_there and _len_torch_function_stack():
            above.append(_pop_mode())
            was_there = above[-1] is self
        for other in reversed(above[:-1] if was_there else above):
            _push_mode(other)
        return was_there


class _EagerCode:
    """Lets compiled functions and modules of the process run eagerly while a block is open in any thread."""

    def __init__(self) -> None:
        self._stance: Any = None
        self._num_open, self._lock = 0, threading.Lock()

    @contextmanager
    def on(self) -> Iterator[None]:
        with self._lock:
            self._num_open += 1
        self.set()
        try:
            yield
        finally:
            with self._lock:
                self._num_open -= 1
                if not self._num_open and self._stance is not None:
                    self._stance.__exit__(None, None, None)
                    self._stance = None

    def set(self) -> None:
        """Set the stance of torch's compiler, once it is loaded: that takes seconds."""
        if self._stance is not None or "torch._dynamo" not in sys.modules or torch.compiler.is_dynamo_compiling():
            return
        with self._lock:
            try:
                self._stance = self._stance or torch.compiler.set_stance("force_eager")
            except RuntimeError:  # inside of compiled code, which began before
                return

    @contextmanager
    def off(self) -> Iterator[None]:
        stance = self._stance
        if stance is not None:
            stance.__exit__(None, None, None)
        try:
            yield
        finally:
            if stance is not None:
                stance.__enter__()


class _ThreadState(threading.local):
    """The open blocks of a thread, its running modules, and whether the mode is removed."""

    def __init__(self) -> None:
        self.num_open = 0
        #: Each running module, and whether the mode was removed before; None if the module changed nothing.
        self.modules: list[tuple[nn.Module, bool | None]] = []
        self.is_removed = False


class FunctionCalls:
    """The observers of this thread, and the mode that serves them all."""

    def __init__(self) -> None:
        self.observers: ContextItems[CallObserver] = ContextItems("function calls")
        self._mode, self._eager, self._here = _Mode(self.observers), _EagerCode(), _ThreadState()

    @contextmanager
    def observed_by(self, observer: CallObserver) -> Iterator[None]:
        here = self._here
        here.num_open += 1
        if here.num_open == 1:
            _push_mode(self._mode)
        try:
            with self.observers.adding(observer), self._eager.on():
                yield
        finally:
            here.num_open -= 1
            if not here.num_open:
                self._mode.remove()
                here.modules.clear()
                here.is_removed = False

    def is_first(self, observer: CallObserver) -> bool:
        """Whether this is the observer that reports modules: one of all is enough."""
        return next(iter(self.observers), None) is observer

    def module_started(self, module: nn.Module) -> None:
        """Remove the mode for a module with a fused path; restore it for a module of the user inside of that."""
        here, before = self._here, None
        self._eager.set()
        if may_fuse(module):
            if self._mode.remove():
                before, here.is_removed = False, True
        elif here.is_removed and not (getattr(module.forward, "__module__", None) or "").startswith("torch."):
            before, here.is_removed = True, False
            _push_mode(self._mode)
        here.modules.append((module, before))

    def module_ended(self, module: nn.Module) -> None:
        here = self._here
        if not any(running is module for running, _ in here.modules):
            return
        ended = None
        while ended is not module:
            ended, before = here.modules.pop()
            if before is not None:
                here.is_removed = before
                _ = self._mode.remove() if before else _push_mode(self._mode)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block of Regard's own computations: without the mode, and compiled code runs as compiled."""
        was_there = self._mode.remove()
        try:
            with self._eager.off():
                yield
        finally:
            if was_there:
                _push_mode(self._mode)


function_calls = FunctionCalls()
