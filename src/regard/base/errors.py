"""`RegardError`, the error for every mistake of a user, and helpers that write its message."""

from __future__ import annotations

import difflib
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class RegardError(ValueError):
    """A mistake in a call. The message names the operation, what it received, the rule and the remedy.

    Wrong arguments raise it; errors of a user's own model or function keep their type. It is a `ValueError`, so code
    that catches `ValueError` keeps working.

    >>> import regard as rg
    >>> rg.RoPE(head_dim=3)
    Traceback (most recent call last):
        ...
    regard.RegardError: RoPE(head_dim=3): channels turn in pairs, so the width must be even.
    """

    __module__ = "regard"  # the public name, which tracebacks print


class MissingPackage(RegardError):
    """An optional package is not installed. The message names the extra that has it.

    A command of the command line names its own extra instead (`regard.cli.extras`), which has all that it needs.
    """

    def __init__(self, operation: str, package: str, extra: str) -> None:
        super().__init__(f"{operation}: {package} is not installed. pip install 'regard[{extra}]'")
        self.operation, self.package, self.extra = operation, package, extra

    def __reduce__(self) -> tuple[type[MissingPackage], tuple[str, str, str]]:
        return MissingPackage, (self.operation, self.package, self.extra)


@contextmanager
def errors_named(inner: str, outer: str) -> Iterator[None]:
    """In the errors of a block, replace the operation `inner` by `outer`, which runs the checks of `inner`.

    >>> with errors_named("attend", "plan"):
    ...     raise RegardError("attend: no keys")
    Traceback (most recent call last):
        ...
    regard.RegardError: plan: no keys
    """
    try:
        yield
    except RegardError as error:  # a subclass, such as MissingPackage, holds more than a message and stays
        own = re.sub(rf"^{re.escape(inner)}(?=[:(])", outer, str(error))
        if type(error) is not RegardError or own == str(error):
            raise
        raise RegardError(own) from None


def warn_caller(message: str) -> None:
    """Warn at the line of the caller's code: the innermost frame that is neither Regard's nor torch's."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("regard", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def nearest(name: str, known: Iterable[str]) -> str:
    """A text with the valid names, and the valid name that is most like `name`."""
    known = sorted(known)
    if not known:
        return "There are no names to choose from."
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known names: {', '.join(known)}."


def first_line(error: BaseException) -> str:
    r"""The first line of the message of an error, at most 200 characters; "" if it has no message.

    >>> first_line(RuntimeError("sizes differ\nframe 0: ..."))
    'sizes differ'
    """
    return (str(error).strip().splitlines() or [""])[0][:200]


def first_few(values: Iterable[object], most: int = 5, separator: str = ", ") -> str:
    """The first values of a list that may be long.

    >>> first_few(range(7)), first_few([])
    ('0, 1, 2, 3, 4, ...', '')
    """
    values = list(values)
    return separator.join([*map(str, values[:most]), *(["..."] if len(values) > most else [])])
