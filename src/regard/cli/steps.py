"""What a command shows on standard error while it works: the step that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text


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
        if lines:
            console.print(step, markup=False, highlight=False, soft_wrap=True)

    show(first)
    yield show
