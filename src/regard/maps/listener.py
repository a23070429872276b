"""Maps are told to whoever listens; nobody pays where nobody does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import nn

from regard.maps.attention_map import AttentionMap


class Listener(Protocol):
    """What is told of every attention of every module of `regard.nn`, whichever model it is in.

    >>> import torch, regard as rg
    >>> class Counter:
    ...     heads = 0
    ...     def told(self, module, weights):
    ...         self.heads += weights.shape[1]
    >>> counter, attention = Counter(), rg.nn.MultiHeadAttention(8, 2)
    >>> with rg.nn.listeners.to(counter):
    ...     output = attention(torch.randn(1, 5, 8))
    >>> counter.heads
    2
    """

    def told(self, module: nn.Module | None, weights: AttentionMap) -> None: ...


class Listeners:
    """Those who listen now. What listens belongs to the whole process, as the hooks of all modules do."""

    def __init__(self) -> None:
        self._following: list[Listener] = []
        self.busy = 0

    def __bool__(self) -> bool:
        return bool(self._following)

    @contextmanager
    def to(self, listener: Listener) -> Iterator[None]:
        """Tell `listener` while the block runs."""
        self._following.append(listener)
        try:
            yield
        finally:
            self._following.remove(listener)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Be `busy` while the block runs: what it asks of torch is part of an attention that is told as a whole."""
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1

    def tell(self, module: nn.Module | None, weights: Callable[[], AttentionMap]) -> None:
        """Tell all of them; the map is made only if there is someone to tell."""
        if self._following:
            made = weights()
            for listener in tuple(self._following):
                listener.told(module, made)
