"""`Piece`, the base of everything that a slot of an attention may hold, and what its subclasses inherit."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from functools import singledispatch, wraps
from typing import Any, TypeGuard, TypeVar

P = TypeVar("P")


class Piece(ABC):  # noqa: B024 - each kind of piece has abstract methods of its own
    """The base of scores, encodings, biases, masks, normalizers, selections, transitions, and of their parts."""


def computes_as(piece: object, kind: type[P], *methods: str) -> TypeGuard[P]:
    """Whether a piece is of this class and has its methods: with a method of its own, it computes something else."""
    own = getattr(piece, "__dict__", {})
    return isinstance(piece, kind) and all(
        name not in own and getattr(type(piece), name, None) is getattr(kind, name, None) for name in methods
    )


def by_class(*methods: str) -> Callable[[Callable[..., Any]], Any]:
    """`singledispatch` for pieces. A subclass that overrides one of the methods has the default of the function."""

    def decorator(default: Callable[..., Any]) -> Any:
        dispatcher = singledispatch(default)

        @wraps(default)
        def function(piece: object, *args: Any, **options: Any) -> Any:
            kind = next((of for of in type(piece).__mro__ if of in dispatcher.registry), object)
            chosen = dispatcher.registry[kind] if computes_as(piece, kind, *methods) else default
            return chosen(piece, *args, **options)

        vars(function).update(register=dispatcher.register)
        return function

    return decorator
