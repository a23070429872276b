"""Prints which heads of a model change most between several texts."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.base.errors import RegardError
from regard.stats.text_reading import TextReading, text_differences

#: Heads in the table, and in the summary.
NUM_HEADS, FEW_HEADS = 20, 5


def print_differences(console: Console, readings: Sequence[TextReading], count: int = NUM_HEADS) -> None:
    """The `count` heads that differ most, with their value on each text."""
    letters = [letter_of(number) for number in range(len(readings))]
    console.print(Text("The heads that differ most between the texts", style="bold"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("L", "H"):
        table.add_column(title, justify="right", style="bold")
    table.add_column("differs in")
    for title in (*letters, "spread"):
        table.add_column(title, justify="right", style="cyan" if title == "spread" else "")
    for head in text_differences(readings)[:count]:
        numbers = (f"{value:.2f}" for value in (*head.values, head.spread))
        table.add_row(str(head.layer), str(head.head), head.statistic, *numbers)
    console.print(table)


def letter_of(number: int) -> str:
    """The name of a text: A, B, ... Z, then T27, T28, ..."""
    return chr(ord("A") + number) if number < 26 else f"T{number + 1}"


def check_words(readings: Sequence[TextReading], words: Sequence[str]) -> None:
    """Refuse a word that is in none of the texts."""
    for word in words:
        if all(reading.find(word) is None for reading in readings):
            raise RegardError(f"analyze: none of the {len(readings)} texts has the word {word!r}.")
