"""`Piece`, the base of everything that a slot of an attention may hold, and what its subclasses inherit."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable
from functools import singledispatch, wraps
from typing import Any, TypeGuard, TypeVar

from regard.base.errors import RegardError

P = TypeVar("P")


#: For each kind of piece: its rules, the methods that say what a piece computes, and its promises, what a piece says
#: about its rules, each with the value that promises nothing. Its shortcuts are methods that compute what the rules
#: say, and that not every engine calls.
_PROMISES: dict[type, tuple[set[str], dict[str, Any], set[str]]] = {}


class Piece(ABC):  # noqa: B024 - each kind of piece has abstract methods of its own
    """The base of scores, encodings, biases, masks, normalizers, selections, transitions, and of their parts."""

    def __init_subclass__(cls, **options: Any) -> None:
        """A class that overrides a rule of another piece inherits none of the promises about this rule."""
        super().__init_subclass__(**options)
        rules, promises, shortcuts = next((_PROMISES[of] for of in cls.__mro__ if of in _PROMISES), (set(), {}, set()))
        if (own := shortcuts & vars(cls).keys()) and not _is_ours(cls) and all(_is_ours(cls, rule) for rule in rules):
            raise RegardError(
                f"{cls.__name__}: {' and '.join(sorted(own))} may only say faster what the class says: engines "
                f"and maps read that from its rules. Override these instead: {', '.join(sorted(rules))}."
            )
        if any(_overrides(cls, rule) for rule in rules & vars(cls).keys()):
            for name in promises.keys() - vars(cls).keys():
                setattr(cls, name, promises[name])


def _overrides(kind: type, method: str) -> bool:
    """Whether a base has the method, and not as an abstract one."""
    inherited = (getattr(base, method, None) for base in kind.__bases__)
    return any(it is not None and not getattr(it, "__isabstractmethod__", False) for it in inherited)


def _is_ours(kind: type, method: str | None = None) -> bool:
    """Whether Regard defines a class, or its method, if it has one. An abstract method is still to be defined."""
    owner = kind if method is None else next((base for base in kind.__mro__ if method in vars(base)), None)
    if method and getattr(getattr(kind, method, None), "__isabstractmethod__", False):
        return False
    return owner is None or owner.__module__.partition(".")[0] == __name__.partition(".")[0]


def set_promises(kind: type, rules: set[str], promises: set[str], shortcuts: Iterable[str] = (), **values: Any) -> None:
    """Say what a kind of piece promises about its rules, and which methods are shortcuts for them.

    A promise has the value of this class, or that of `values`.
    """
    _PROMISES[kind] = rules, {name: vars(kind)[name] for name in promises} | values, set(shortcuts)


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
