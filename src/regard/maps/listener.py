"""Listeners of attention maps. Without a listener no map is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from regard.base.context import ContextFlag, ContextItems
from regard.maps.attention_map import AttentionMap
from regard.maps.reductions import Reduction


class Listener(Protocol):
    """An object that receives every attention map: `on_attention` gets the module, or None, and the map.

    >>> import torch, regard as rg
    >>> class Counter:
    ...     heads = 0
    ...     def on_attention(self, module, weights):
    ...         self.heads += weights.shape[1]
    >>> counter, attention = Counter(), rg.nn.MultiHeadAttention(8, 2)
    >>> with rg.nn.listeners.to(counter):
    ...     output = attention(torch.randn(1, 5, 8))
    >>> counter.heads
    2
    """

    def on_attention(self, module: nn.Module | None, weights: AttentionMap) -> None: ...


#: Computes the values (B, G, J, E) of a call; None if no rank has all of them.
Values = Callable[[], Tensor] | None


@runtime_checkable
class ValueListener(Protocol):
    """A listener that receives each map together with a function that returns the values of the call."""

    def on_attention_with_values(self, module: nn.Module | None, weights: AttentionMap, values: Values) -> None: ...


@runtime_checkable
class PausingListener(Protocol):
    """A listener that observes other calls too, and stops while an attention computes."""

    def paused(self) -> AbstractContextManager[None]: ...


@runtime_checkable
class ReducingListener(Protocol):
    """A listener that asks every map for these reductions. Some are computed with the output of the call."""

    reductions: tuple[Reduction, ...]


class _Following(NamedTuple):
    """What a listener does: its protocols are asked once, because `isinstance` takes longer than many a call."""

    receive: Callable[[nn.Module | None, AttentionMap, Values], None]
    paused: Callable[[], AbstractContextManager[None]] | None
    reductions: tuple[Reduction, ...]

    @staticmethod
    def of(listener: Listener | ValueListener) -> _Following:
        paused = listener.paused if isinstance(listener, PausingListener) else None
        reductions = listener.reductions if isinstance(listener, ReducingListener) else ()
        if isinstance(listener, ValueListener):
            return _Following(listener.on_attention_with_values, paused, reductions)
        return _Following(lambda module, weights, values: listener.on_attention(module, weights), paused, reductions)


class Listeners:
    """The listeners of this thread, for all models. A listener receives maps only from the thread that added it."""

    def __init__(self) -> None:
        self._following: ContextItems[_Following] = ContextItems("listeners")
        self._busy = ContextFlag("busy")

    def __bool__(self) -> bool:
        return bool(self._following)

    @contextmanager
    def to(self, listener: Listener | ValueListener) -> Iterator[None]:
        """Give maps to `listener` while the block runs."""
        with self._following.adding(_Following.of(listener)):
            yield

    def computing(self) -> AbstractContextManager[None]:
        """Be `busy` while the block runs: calls inside belong to one attention, which reports its own map."""
        return self._paused() if self._following else self._busy.on()

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Be busy, and pause the listeners that observe other calls."""
        with ExitStack() as stack:
            stack.enter_context(self._busy.on())
            for following in self._following:
                if following.paused is not None:
                    stack.enter_context(following.paused())
            yield

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        """The reductions that listeners will ask of the map of the next call; none if it is a part of another."""
        if not self._following or self._busy:
            return ()
        return tuple(reduction for following in self._following for reduction in following.reductions)

    @property
    def busy(self) -> bool:
        return bool(self._busy)

    def tell(self, module: nn.Module | None, weights: Callable[[], AttentionMap], values: Values = None) -> None:
        """Give the map to all listeners; it is built only if there is one, and if the call is no part of another."""
        if self._following and not self._busy:
            attention_map = weights()
            for following in self._following:
                following.receive(module, attention_map, values)
