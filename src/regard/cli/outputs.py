"""Checks that a command can write its outputs before it computes for hours; prints the current step."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.text import Text

from regard.base.errors import MissingPackage, RegardError


def check_folder(operation: str, option: str, folder: Path | None) -> None:
    """Refuse a folder that cannot be created or written. None: the option was not given.

    >>> check_folder("analyze", "--save", Path(__file__))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    regard.RegardError: analyze: --save ...outputs.py: that is a file. Give a folder, or the name of a new one.
    """
    if folder is None:
        return
    try:
        existing = _nearest(folder.absolute())
        if not existing.is_dir():
            inside = "that is" if existing == folder.absolute() else f"{existing} is"
            raise RegardError(
                f"{operation}: {option} {folder}: {inside} a file. Give a folder, or the name of a new one."
            )
        with tempfile.TemporaryDirectory(dir=existing, prefix=".regard-"):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise RegardError(f"{operation}: {option} {folder} cannot be written to: {reason}. Give another.") from None


def check_file(operation: str, option: str, path: Path | None, ending: str = "") -> None:
    """Refuse a file that cannot be written, or whose name has another ending. None: the option was not given."""
    if path is None:
        return
    if os.path.isdir(path):
        raise RegardError(f"{operation}: {option} {path} is a folder. Give the name of a file.")
    if ending and path.suffix.lower() != ending:
        raise RegardError(f"{operation}: {option} {path} does not end in {ending}. Give a name with this ending.")
    if not path.absolute().parent.is_dir():
        raise RegardError(f"{operation}: there is no folder {path.parent} to write {path.name} to.")
    check_folder(operation, option, path.parent)
    if path.exists() and not os.access(path, os.W_OK):
        raise RegardError(f"{operation}: {option} {path} may not be written. Give another name.")


def check_drawing(operation: str, option: str) -> None:
    """Refuse pictures if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise MissingPackage(f"{operation} {option}", "matplotlib", "view")


def _nearest(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    while not os.path.lexists(path) and path != path.parent:
        _check_name(path)
        path = path.parent
    return path


def _check_name(path: Path) -> None:
    """Raise the operating system's error for an invalid name."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.stat(path)


@contextmanager
def shown_steps(console: Console, first: str, lines: bool = False) -> Iterator[Callable[[str], None]]:
    """Show the step `first`, and then each step that the yielded function is called with.

    A terminal has one line, which changes and goes. Elsewhere nothing is printed, or with `lines` a line for each step.

    >>> import sys
    >>> with shown_steps(Console(file=sys.stdout), "Reading", lines=True) as show:
    ...     show("Saving to out[/b]")
    Reading
    Saving to out[/b]
    """
    if console.is_terminal:
        with console.status(Text(first)) as status:
            yield lambda step: status.update(Text(step))
        return

    def show(step: str) -> None:
        """Print a step, where lines were asked for."""
        if lines:
            console.print(step, markup=False, highlight=False, soft_wrap=True)

    show(first)
    yield show
