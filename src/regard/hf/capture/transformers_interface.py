"""The attention interface of transformers, overheard.

Attention modules of transformers ask `AttentionInterface.get_interface` for their backend at every
call. While a model is watched, that one method hands out the same backend inside a listener. So no
configuration changes, masks are made as ever, and outputs are bit-identical.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol

from regard.context import ContextFlag, ContextItems
from regard.errors import RegardError
from regard.hf.calls import Call


class Listener(Protocol):
    """What is told of every call of a backend."""

    def hear(self, call: Call, output: Any) -> None: ...


class Tap:
    """`AttentionInterface.get_interface`, replaced while any thread listens; `inside` while a backend runs.

    The method belongs to the process. Listeners and `inside` belong to a thread.
    """

    def __init__(self) -> None:
        self.listeners: ContextItems[Listener] = ContextItems("interface")
        self._inside = ContextFlag("inside")
        self._num_open, self._lock = 0, threading.Lock()
        self.ours: Callable[..., Any] | None = None
        self._theirs: Callable[..., Any] | None = None

    @contextmanager
    def to(self, watcher: Listener) -> Iterator[None]:
        if "transformers" not in sys.modules:
            yield
            return
        interface = _interface()
        with self._lock:
            self._num_open += 1
            if self.ours is None:
                self._open(interface)
        try:
            with self.listeners.adding(watcher):
                yield
        finally:
            with self._lock:
                self._num_open -= 1
                if not self._num_open:
                    self._close(interface)

    @property
    def inside(self) -> bool:
        return bool(self._inside)

    def _open(self, interface: Any) -> None:
        original = interface.get_interface

        @wraps(original)
        def get_interface(this: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
            function = original(this, attn_implementation, default)
            hears = self.ours is get_interface and self.listeners
            return self._overheard(function, attn_implementation) if hears else function

        self._theirs = original
        self.ours = interface.get_interface = get_interface

    def _close(self, interface: Any) -> None:
        """Put the method back; if someone else wrapped ours meanwhile, ours stays and only passes on."""
        if interface.get_interface is self.ours:
            interface.get_interface = self._theirs
        self.ours = self._theirs = None

    def _overheard(self, function: Callable[..., Any], backend: str | None) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            with self._inside.on():
                output = function(*args, **options)
            call = _call(backend or "eager", function, args, options)
            for watcher in self.listeners:
                watcher.hear(call, output)
            return output

        return run


tap = Tap()


def _interface() -> Any:
    from transformers import __version__
    from transformers.modeling_utils import AttentionInterface

    if not hasattr(AttentionInterface, "get_interface"):
        raise RegardError(
            f"watch: transformers {__version__} has another attention interface; pip install 'transformers>=5.23,<6'."
        )
    return AttentionInterface


def _call(backend: str, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Call:
    """The arguments by name, however they were passed."""
    names = ("module", "query", "key", "value", "attention_mask")
    given = {**dict(zip(names, args, strict=False)), **options}
    if len(args) > len(names):
        given["a sixth positional argument"] = args[len(names) :]
    module, query, key, value, mask = (given.pop(name, None) for name in names)
    return Call(module, backend, function, query, key, value, mask, given)
