"""`regard list` and `regard info`: print the catalog, or one mechanism with its weights."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from regard.catalog import CatalogEntry, mechanism, mechanisms
from regard.cli.draw import draw, drawn_size

#: Characters before each row of the picture of `regard info`.
INDENT = 2
#: Printed below the list: the meaning of the letters.
LETTERS = (
    "Costs: H query heads, G key/value heads, I queries, J keys (n if both are equal), D and E the widths of a "
    "head's keys and values, D' the width of keys if it differs from that of queries; words are parameters."
)


def list_mechanisms() -> None:
    """Print each mechanism with its summary, its cost, its family and year, and models that have it."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for name, entry in mechanisms().items():
        table.add_row(name, Text.assemble(entry.summary, "\n", (f"{entry.cost}\n{_origin(entry)}", "dim")))
    console = Console()
    console.print(table)
    console.print()
    console.print(Text(LETTERS, style="dim"))


def _origin(entry: CatalogEntry) -> str:
    """Family and year of a mechanism, and some models that have it."""
    models = f"; in {', '.join(entry.used_by)}" if entry.used_by else ""
    return f"{entry.family}, {entry.year}{models}"


def show_mechanism(name: str) -> None:
    """Print the entry of one mechanism, and its weights on a small random problem."""
    entry = mechanism(name)
    console = Console()
    console.print(Text(entry.name, style="bold"), Text(entry.summary), sep="\n")
    console.print()
    console.print(_facts(entry))
    attention, query, key, value = entry.example()
    with torch.no_grad():
        weights = attention(query, key, value, **entry.tensors(attention, query, key, value)).weights
    _, H, I, J = weights.shape
    console.print()
    width = console.width - INDENT
    size = drawn_size(weights, width)
    rows, columns = (f"{m}" if m == n else f"the first {m} of {n}" for m, n in zip(size, (I, J), strict=True))
    console.print(Text(f"Weights of head 0 of {H}: {rows} rows of queries, {columns} columns of random keys:"))
    console.print(Padding(draw(weights, width), (0, 0, 0, INDENT)))


def _facts(entry: CatalogEntry) -> Table:
    attention = entry.example()[0]
    facts = {
        "also called": ", ".join(entry.also_called),
        "formula": entry.formula,
        "paper": entry.paper,
        "family, year": f"{entry.family}, {entry.year}",
        "some models": ", ".join(entry.used_by),
        "parameters": entry.signature.split(" -> ")[0],
        "cost": entry.cost,
        "other libraries": entry.disagree,
        "small example": repr(attention),
    }
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, fact in facts.items():
        if fact:
            table.add_row(name, Text(fact))
    return table
