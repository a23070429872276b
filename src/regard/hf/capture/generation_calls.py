"""`generation_calls` reports the start and end of every `generate()` of transformers, with its prompt and its result.

`generate()` gets its prompt ready, and then calls one of three methods: sampling (also greedy), beam search, assisted
decoding. While a model is watched, wrappers of these methods report the tokens that they get and return. Beam search
also returns, for each token, the row of the cache that it came from; the caller gets what it asked for.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol

from torch import Tensor, nn

from regard.base.context import ContextItems

#: The methods that decode; beam search is the one with rows that continue other rows.
BEAMS = "_beam_search"
METHODS = ("_sample", BEAMS, "_assisted_decoding")


class GenerationObserver(Protocol):
    """Is called before and after each `generate()` decodes."""

    def generation_started(self, model: nn.Module, prompt: Tensor, options: dict[str, Any]) -> None: ...
    def generation_ended(self, model: nn.Module, tokens: Tensor | None, beams: Tensor | None) -> None: ...


class GenerationCalls:
    """Replaces the decoding methods of transformers' `GenerationMixin` while any thread observes.

    The methods belong to the process. Observers belong to a thread.
    """

    def __init__(self) -> None:
        self.observers: ContextItems[GenerationObserver] = ContextItems("generations")
        self._num_open, self._lock = 0, threading.Lock()
        self._originals: dict[str, Callable[..., Any]] = {}
        self._replacements: dict[str, Callable[..., Any]] = {}

    @contextmanager
    def observed_by(self, observer: GenerationObserver) -> Iterator[None]:
        module = sys.modules.get("transformers.generation.utils")
        mixin = getattr(module, "GenerationMixin", None)
        if mixin is None:
            yield
            return
        self._open(mixin)
        try:
            with self.observers.adding(observer):
                yield
        finally:
            self._close(mixin)

    def _open(self, mixin: Any) -> None:
        with self._lock:
            self._num_open += 1
            if self._num_open > 1:
                return
            for name in METHODS:
                if (original := vars(mixin).get(name)) is not None:
                    self._originals[name], self._replacements[name] = original, self._reporting(name, original)
                    setattr(mixin, name, self._replacements[name])

    def _close(self, mixin: Any) -> None:
        """Restore the methods. If another package has wrapped a replacement, it stays and only passes calls on."""
        with self._lock:
            self._num_open -= 1
            if self._num_open:
                return
            for name, original in self._originals.items():
                if vars(mixin).get(name) is self._replacements[name]:
                    setattr(mixin, name, original)
            self._originals.clear()
            self._replacements.clear()

    def _reporting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def run(model: Any, input_ids: Tensor, *args: Any, **options: Any) -> Any:
            if not self.observers:
                return original(model, input_ids, *args, **options)
            given = options.get("generation_config")
            if name == BEAMS and given is not None and not given.return_dict_in_generate:
                options["generation_config"] = _with_details(given)
            for observer in self.observers:
                observer.generation_started(model, input_ids, options)
            output = None
            try:
                output = original(model, input_ids, *args, **options)
            finally:
                tokens = output if output is None or isinstance(output, Tensor) else output.sequences
                for observer in self.observers:
                    observer.generation_ended(model, tokens, getattr(output, "beam_indices", None))
            return output if options.get("generation_config") is given else tokens

        return run


def _with_details(config: Any) -> Any:
    """The same settings, with the rows of the beams in the result."""
    config = copy.copy(config)
    config.return_dict_in_generate = True
    return config


generation_calls = GenerationCalls()
