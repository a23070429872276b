"""`backend_calls` reports every call of an attention backend of transformers.

Attention modules of transformers get their backend from a method of `AttentionInterface` at every call. While a model
is watched, this method returns a wrapper, which calls the same backend and reports the call. The configuration and the
masks stay the same, and outputs are bit-identical.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

from regard.base.context import ContextFlag, ContextItems
from regard.base.versions import backend_lookup
from regard.hf.calls import AttentionCall
from regard.hf.capture.kernel_statistic import observing
from regard.hf.edited_calls import edited_call, editors, patched_output, run_edited
from regard.hf.operator_calls import BackendObserver


class BackendCalls:
    """Replaces the lookup of a backend while any thread observes; `inside` is True while a backend runs.

    The method belongs to the process. Observers and `inside` belong to a thread.
    """

    def __init__(self) -> None:
        self.observers: ContextItems[BackendObserver] = ContextItems("interface")
        self._inside = ContextFlag("inside")
        self._num_open, self._lock = 0, threading.Lock()
        self.replacement: Callable[..., Any] | None = None
        self._original: Callable[..., Any] | None = None

    @contextmanager
    def observed_by(self, observer: BackendObserver) -> Iterator[None]:
        with self.replaced(), self.observers.adding(observer):
            yield

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """A block in which calls are reported to observers, and changed by the open edits."""
        lookup = backend_lookup()
        if lookup is None:
            yield
            return
        with self._lock:
            self._num_open += 1
            if self.replacement is None:
                self._open(*lookup)
        try:
            yield
        finally:
            with self._lock:
                self._num_open -= 1
                if not self._num_open:
                    self._close(*lookup)

    @property
    def inside(self) -> bool:
        return bool(self._inside)

    def _open(self, interface: Any, method: str) -> None:
        original = getattr(interface, method)

        @wraps(original)
        def find(this: Any, attn_implementation: str, *default: Any, **options: Any) -> Callable[..., Any]:
            function = original(this, attn_implementation, *default, **options)
            observed = self.replacement is find and (self.observers or editors)
            return self._reporting(function, attn_implementation) if observed else function

        self._original, self.replacement = original, find
        setattr(interface, method, find)

    def _close(self, interface: Any, method: str) -> None:
        """Restore the method. If another package has wrapped the replacement, it stays and only passes calls on."""
        if getattr(interface, method) is self.replacement:
            setattr(interface, method, self._original)
        self.replacement = self._original = None

    def _reporting(self, function: Callable[..., Any], backend: str | None) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            call = _call(backend or "eager", function, args, options)
            edited = edited_call(call)
            with self._inside.on(), observing(edited) as statistic:
                output = function(*args, **options) if edited is call else run_edited(edited, edited.run)
            call = edited
            if statistic is not None and len(statistic.logsumexps) == 1:
                call = replace(call, logsumexp=statistic.logsumexps[0])
            call, patched = patched_output(call, output)
            for observer in self.observers:
                observer.backend_called(call, output)
            return patched

        return run


backend_calls = BackendCalls()


def _call(backend: str, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> AttentionCall:
    """The call with its arguments by name, whether they were passed by position or by name."""
    names = ("module", "query", "key", "value", "attention_mask")
    given = {**dict(zip(names, args, strict=False)), **options}
    if len(args) > len(names):
        given["a sixth positional argument"] = args[len(names) :]
    module, query, key, value, mask = (given.pop(name, None) for name in names)
    return AttentionCall(module, backend, function, query, key, value, mask, given)
