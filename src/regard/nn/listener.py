"""Modules that attend tell their maps to whoever listens; nobody pays where nobody does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import nn

from regard.maps import AttentionMap


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

    def told(self, module: nn.Module, weights: AttentionMap) -> None: ...


class Listeners:
    """Those who listen now. What listens belongs to the whole process, as the hooks of all modules do."""

    def __init__(self) -> None:
        self._following: list[Listener] = []

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

    def tell(self, module: nn.Module, weights: Callable[[], AttentionMap]) -> None:
        """Tell all of them; the map is made only if there is someone to tell."""
        if self._following:
            made = weights()
            for listener in tuple(self._following):
                listener.told(module, made)


listeners = Listeners()


class Attends(nn.Module):
    """Base of modules that attend and tell: `regard.watch` finds them by it.

    `is_cross_attention` and `is_causal` say which part of a model the attention is.

    >>> import regard as rg
    >>> model = rg.nn.Blueprint(8, num_heads=2).decoder(layers=1)
    >>> [(each.is_cross_attention, each.is_causal) for each in model.modules() if isinstance(each, rg.nn.Attends)]
    [(False, True), (True, False)]
    """

    is_cross_attention: bool = False
    is_causal: bool = False
