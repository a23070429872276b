"""Values that only one context has: a thread, or an asyncio task."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(eq=False)
class _Entry(Generic[Item]):
    """An item of an open block. When the block ends it becomes None, in copies of the context too."""

    item: Item | None


class ContextItems(Generic[Item]):
    """The items of the with-blocks that are open in this context.

    A new thread begins without items. `asyncio.to_thread`, `asyncio.create_task` and `contextvars.copy_context` take
    the items with them, until their blocks end.

    >>> from threading import Thread
    >>> items, in_thread = ContextItems("doc"), []
    >>> with items.adding("a"), items.adding("b"):
    ...     thread = Thread(target=lambda: in_thread.append(tuple(items)))
    ...     thread.start(); thread.join()
    ...     tuple(items), in_thread
    (('a', 'b'), [()])
    >>> bool(items)
    False
    """

    def __init__(self, name: str) -> None:
        self._entries: ContextVar[tuple[_Entry[Item], ...]] = ContextVar(name, default=())

    @contextmanager
    def adding(self, item: Item) -> Iterator[None]:
        """Add the item while the block runs. Blocks may end in any order."""
        entry = _Entry(item)
        self._entries.set((*self._entries.get(), entry))
        try:
            yield
        finally:
            entry.item = None
            self._entries.set(tuple(other for other in self._entries.get() if other.item is not None))

    def __iter__(self) -> Iterator[Item]:
        """The items of the open blocks, the outermost first; later changes do not change the iterator."""
        return iter([entry.item for entry in self._entries.get() if entry.item is not None])

    def __bool__(self) -> bool:
        entries = self._entries.get()
        return bool(entries) and any(entry.item is not None for entry in entries)


class ContextFlag:
    """Whether a with-block of this context is open.

    >>> inside = ContextFlag("doc")
    >>> with inside.on():
    ...     bool(inside)
    True
    >>> bool(inside)
    False
    """

    def __init__(self, name: str) -> None:
        self._value = ContextVar(name, default=False)

    @contextmanager
    def on(self) -> Iterator[None]:
        """The flag is set while the block runs; blocks may be nested."""
        token = self._value.set(True)
        try:
            yield
        finally:
            self._value.reset(token)

    def __bool__(self) -> bool:
        return self._value.get()
