"""`RecurrentLayers` reports each call of the recurrent layers of a model, as a `CoreCall`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.hf.calls import Untranslatable
from regard.hf.recurrent.core_calls import READERS, CoreCall, heads_of
from regard.hf.recurrent.core_functions import core_functions, core_names
from regard.hf.recurrent.inline_layers import InlineReader, Seen, inline_reader, named_arguments

#: Called with a module, and a function that returns its call or raises the reason why there is none.
OnCall = Callable[[nn.Module, Callable[[], CoreCall]], None]


class _Running(threading.local):
    """The layers that run in one thread: core calls of the innermost module, and what inline layers have seen."""

    def __init__(self) -> None:
        self.cores: dict[nn.Module, list[Callable[[], CoreCall]]] = {}
        self.seen: dict[nn.Module, Seen] = {}


def is_recurrent(module: nn.Module) -> bool:
    """Whether a module computes a recurrent layer, by what it calls or its learned decay; older code is not read."""
    has_decay = hasattr(module, "A_log") and (hasattr(module, "out_proj") or hasattr(module, "o_proj"))
    return has_decay or bool(core_names(module)) or inline_reader(module) is not None


class RecurrentLayers:
    """Observes core functions through their names, and inline layers through hooks, in the watching thread."""

    def __init__(self, innermost: Callable[[], nn.Module | None], is_own: Callable[[], bool], on_call: OnCall) -> None:
        self._innermost, self._is_own, self._on_call = innermost, is_own, on_call
        self._running = _Running()

    @contextmanager
    def observing(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Observe these modules while the block runs."""
        modules = list(modules)
        with ExitStack() as stack:
            stack.enter_context(core_functions.observed_by(self, [m for m in modules if core_names(m)]))
            for module in modules:
                reader = inline_reader(module)
                if reader is not None:
                    self._hook(stack, module, reader)
            yield

    # Core functions

    def core_called(self, name: str, given: dict[str, Any], result: Any) -> None:
        module = self._innermost()
        if module is not None and result is not None:
            given, result = _detached(given), _detached(result)
            self._running.cores.setdefault(module, []).append(lambda: READERS[name](given, result))

    def module_started(self, module: nn.Module) -> None:
        """Forget the core calls of a run that raised an error."""
        self._running.cores.pop(module, None)

    def module_ended(self, module: nn.Module) -> None:
        """Report the core calls of a module that ended; those of its heads are one call."""
        readers = self._running.cores.pop(module, None)
        if readers is not None:
            self._on_call(module, lambda: _read(module, lambda: heads_of([read() for read in readers])))

    # Inline layers

    def _hook(self, stack: ExitStack, module: nn.Module, reader: InlineReader) -> None:
        def start(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._is_own():
                given = named_arguments(module, args, kwargs)
                self._running.seen[module] = Seen(_detached(given), reader.state_before(module, given))

        def end(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            seen = self._running.seen.pop(module, None)
            if seen is not None:
                self._on_call(module, lambda: _read(module, lambda: reader.read(module, seen, _detached(output))))

        stack.callback(module.register_forward_pre_hook(start, with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(end, with_kwargs=True).remove)
        for part in reader.parts:
            self._hook_part(stack, module, part)

    def _hook_part(self, stack: ExitStack, module: nn.Module, part: str) -> None:
        def end(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            seen = self._running.seen.get(module)
            if seen is not None and isinstance(output, Tensor):
                seen.inputs[part], seen.outputs[part] = args[0].detach(), output.detach()

        child = getattr(module, part, None)
        if isinstance(child, nn.Module):
            stack.callback(child.register_forward_hook(end).remove)


def _read(module: nn.Module, read: Callable[[], CoreCall]) -> CoreCall:
    """The call; in another version of a model, whose tensors are not as expected, the reason why there is none."""
    try:
        return read()
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        raise Untranslatable(
            f"the tensors of {type(module).__name__} are not as in transformers 5.23 ({type(error).__name__}: {error})"
        ) from error


@torch.no_grad()
def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, tuple | list):
        return type(value)(_detached(part) for part in value) if type(value) in (tuple, list) else value
    return {name: _detached(part) for name, part in value.items()} if type(value) is dict else value
