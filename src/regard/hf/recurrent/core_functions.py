"""`core_functions` reports every call of the functions that compute recurrent layers in transformers.

Model files call them by a global name, such as `torch_chunk_gated_delta_rule`. While a model is watched or edited,
these names hold wrappers, which call the same function and report the call. Results that no edit changes are
bit-identical.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol

from torch import Tensor, nn

from regard.base.context import ContextItems
from regard.edits.layer_edits import LayerEdits
from regard.hf.recurrent.core_calls import READERS, state_copies

#: Names of the argument that holds the state before the call. Caches and some functions write it in place.
STATES = ("initial_state", "initial_states", "state")


class CoreObserver(Protocol):
    """Is called after every call of the core function `name`, with its arguments, its result and the edits of it.

    `given` has the arguments by name, and copies of the state before the call under the name "before".
    """

    def core_called(self, name: str, given: dict[str, Any], result: Any, edits: LayerEdits | None) -> None: ...


#: Called with the name of a function, its arguments by name and its result. Returns the result and what edited
#: it; None if another model runs.
ChangeCore = Callable[[str, dict[str, Any], Any], tuple[Any, "LayerEdits | None"] | None]


@dataclass(eq=False)
class _Replacement:
    """A global name that holds a wrapper, and the number of open watches that need it."""

    original: Callable[..., Any]
    wrapper: Callable[..., Any]
    num_open: int = 0


class _CoreFunctions:
    """Replaces functions in the globals of model files while any thread observes them.

    The globals belong to the process, and observers to a thread.
    """

    def __init__(self) -> None:
        self.observers: ContextItems[CoreObserver] = ContextItems("core")
        self.changes: ContextItems[ChangeCore] = ContextItems("changes of cores")
        self._replaced: dict[tuple[int, str], _Replacement] = {}
        self._lock = threading.Lock()

    @contextmanager
    def observed_by(self, observer: CoreObserver, modules: Iterable[nn.Module]) -> Iterator[None]:
        """A block in which calls of the functions that these modules name are reported to an observer."""
        with self._wrapped(modules), self.observers.adding(observer):
            yield

    @contextmanager
    def changed_by(self, change: ChangeCore, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Let `change` replace results while the block runs. The innermost block knows the edits of all."""
        with self._wrapped(modules), self.changes.adding(change):
            yield

    @contextmanager
    def _wrapped(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """A block in which the functions that these modules name are replaced; a file is the globals of a module file.

        Modules of one file share its names, so each name of a file is opened once.
        """
        places = {}
        for module in modules:
            file = getattr(inspect.unwrap(type(module).forward), "__globals__", {})
            places |= {(id(file), name): file for name in core_names(module)}
        with self._lock:
            for (_, name), file in places.items():
                self._open(file, name)
        try:
            yield
        finally:
            with self._lock:
                for (_, name), file in places.items():
                    self._close(file, name)

    def _open(self, file: dict[str, Any], name: str) -> None:
        """Put a wrapper in the place of the function `name` in the globals `file`, if no other block has."""
        replacement = self._replaced.get((id(file), name))
        if replacement is None:
            replacement = _Replacement(file[name], self._reporting(name, file[name]))
            self._replaced[id(file), name] = replacement
            file[name] = replacement.wrapper
        replacement.num_open += 1

    def _close(self, file: dict[str, Any], name: str) -> None:
        """Restore the function `name` of the globals `file`.

        If another package has wrapped the wrapper, it stays and only passes calls on.
        """
        replacement = self._replaced[id(file), name]
        replacement.num_open -= 1
        if not replacement.num_open:
            del self._replaced[id(file), name]
            if file[name] is replacement.wrapper:
                file[name] = replacement.original

    def _reporting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which has this name, with changes and reports.

        The first change that is not None counts, from the innermost block.
        """
        names = list(inspect.signature(function).parameters)

        @wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            if not (self.observers or self.changes):
                return function(*args, **options)
            given = {**dict(zip(names, args, strict=False)), **options}
            state = next((given[name] for name in STATES if given.get(name) is not None), ())
            given["before"] = state_copies(*([state] if isinstance(state, Tensor) else state))
            result, edits = function(*args, **options), None
            changed = (change(name, given, result) for change in reversed(list(self.changes)))
            result, edits = next((one for one in changed if one is not None), (result, None))
            for observer in self.observers:
                observer.core_called(name, given, result, edits)
            return result

        return run


core_functions = _CoreFunctions()


def core_names(module: nn.Module) -> set[str]:
    """The core functions that the forward of a module calls."""
    function = inspect.unwrap(type(module).forward)
    code, file = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    return {name for name in READERS if code is not None and name in code.co_names and callable(file.get(name))}
