"""`Piece`, the base of everything that a slot of an attention may hold, and what its subclasses inherit."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from functools import singledispatch, wraps
from typing import Any, TypeGuard, TypeVar

P = TypeVar("P")


#: For each kind of piece: its rules, the methods that say what a piece computes, and its promises, what a piece says
#: about its rules, each with the value that promises nothing.
_PROMISES: dict[type, tuple[set[str], dict[str, Any]]] = {}


class Piece(ABC):  # noqa: B024 - each kind of piece has abstract methods of its own
    """The base of scores, encodings, biases, masks, normalizers, selections, transitions, and of their parts."""

    def __init_subclass__(cls, **options: Any) -> None:
        """A class that overrides a rule of another piece inherits none of the promises about this rule."""
        super().__init_subclass__(**options)
        rules, promises = next((_PROMISES[kind] for kind in cls.__mro__ if kind in _PROMISES), (set(), {}))
        if any(_overrides(cls, rule) for rule in rules & vars(cls).keys()):
            for name in promises.keys() - vars(cls).keys():
                setattr(cls, name, promises[name])


def _overrides(kind: type, method: str) -> bool:
    """Whether a base has the method, and not as an abstract one."""
    inherited = (getattr(base, method, None) for base in kind.__bases__)
    return any(it is not None and not getattr(it, "__isabstractmethod__", False) for it in inherited)


def set_promises(kind: type, rules: set[str], promises: set[str], **values: Any) -> None:
    """Say what a kind of piece promises about its rules. A promise has the value of this class, or that of `values`."""
    _PROMISES[kind] = rules, {name: vars(kind)[name] for name in promises} | values


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
