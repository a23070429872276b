"""The one error users meet, and the words it is made of."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable
from typing import Any


class RegardError(ValueError):
    """A mistake in what was asked: names the operation, what it received, the rule and the remedy.

    Every error that a user can cause is a `RegardError`; it is a `ValueError`, so code that
    catches those keeps working.

    >>> import regard as rg
    >>> rg.RoPE(width=3)
    Traceback (most recent call last):
        ...
    regard.errors.RegardError: RoPE(width=3): channels turn in pairs, so the width must be even.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence that lists the valid names and points at the one most like `name`."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known names: {', '.join(known)}."


def integer(owner: str, name: str, value: Any, least: int | None = None) -> int:
    """`value` as an integer of Python's own; those of NumPy and tensors without axes are integers too.

    >>> integer("window", "size", 0, least=1)
    Traceback (most recent call last):
        ...
    regard.errors.RegardError: window(size=0): size must be an integer of at least 1.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None or (least is not None and number < least):
        bound = "" if least is None else f" of at least {least}"
        raise RegardError(f"{owner}({name}={value!r}): {name} must be an integer{bound}.")
    return number


def keep_integers(piece: Any, least: int, *names: str) -> None:
    """Make sure that those fields of a frozen dataclass are integers of at least `least`, of Python's own."""
    for name in names:
        object.__setattr__(piece, name, integer(type(piece).__name__, name, getattr(piece, name), least))
