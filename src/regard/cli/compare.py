"""The same heads on different texts, those that change most first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.errors import RegardError
from regard.stats import Reading

#: Statistics between 0 and 1, which can be held against one another; the others grow with the length of a text.
SHARES = ("evenness", "special", "previous", "next", "itself")
#: Heads that are shown, in the table and in the summary.
NUM_HEADS, FEW_HEADS = 20, 5


@dataclass(frozen=True)
class Difference:
    """A head, the statistic in which it differs most between texts, its value on each, and the spread of these."""

    layer: int
    head: int
    statistic: str
    values: tuple[float, ...]
    spread: float


def differences(readings: Sequence[Reading]) -> list[Difference]:
    """Every head once, the greatest spread first."""
    found = []
    for profiles in zip(*(reading.profile.layers for reading in readings), strict=True):
        for head in range(profiles[0].num_heads):
            values = torch.stack([torch.stack([p.values[name][head] for name in SHARES]) for p in profiles])
            spread = values.amax(0) - values.amin(0)
            most = int(spread.argmax())
            numbers = tuple(values[:, most].tolist())
            found.append(Difference(profiles[0].number, head, SHARES[most], numbers, float(spread[most])))
    return sorted(found, key=lambda difference: -difference.spread)


def print_differences(console: Console, readings: Sequence[Reading], count: int = NUM_HEADS) -> None:
    """The texts by letter, and the heads that change most between them."""
    letters = [letter_of(number) for number in range(len(readings))]
    console.print(Text("The heads that differ most between the texts", style="bold"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("L", "H"):
        table.add_column(title, justify="right", style="bold")
    table.add_column("differs in")
    for title in (*letters, "spread"):
        table.add_column(title, justify="right", style="cyan" if title == "spread" else "")
    for each in differences(readings)[:count]:
        numbers = (f"{value:.2f}" for value in (*each.values, each.spread))
        table.add_row(str(each.layer), str(each.head), each.statistic, *numbers)
    console.print(table)


def letter_of(number: int) -> str:
    """A, B, ... Z, then T27 and on."""
    return chr(ord("A") + number) if number < 26 else f"T{number + 1}"


def check_words(readings: Sequence[Reading], words: Sequence[str]) -> None:
    """A word asked for must be in one of the texts at least."""
    for word in words:
        if all(reading.find(word) is None for reading in readings):
            raise RegardError(f"see: none of the {len(readings)} texts has the word {word!r}.")
