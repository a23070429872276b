"""What a report is made of, before it is Markdown or HTML: headings, text, tables, figures, facts and examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from regard.viewer.report.svg import Figure


@dataclass(frozen=True)
class Heading:
    """The start of a section."""

    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph; `leading` ones say what the report found, `hint`s how to read what follows."""

    text: str
    kind: str = "plain"


@dataclass(frozen=True)
class Column:
    """The head of a column: its name, and whether it holds numbers."""

    name: str
    number: bool = True


@dataclass(frozen=True)
class Table:
    """Rows of cells; the first cell of a row names it. `best` are the places (row, column) to be set off."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    best: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class Figures:
    """Pictures side by side where there is room; `caption` stands over all of them."""

    figures: Sequence[Figure]
    caption: str = ""
    small: bool = False


@dataclass(frozen=True)
class Facts:
    """Names with what they are."""

    facts: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Quotes:
    """One sentence as several have said it: (who, what)."""

    caption: str
    lines: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Folded:
    """What is opened by who wants to see it."""

    title: str
    blocks: Sequence[Block]


Block = Heading | Text | Table | Figures | Facts | Quotes | Folded


@dataclass(frozen=True)
class Document:
    """A report as it is read, from top to bottom."""

    title: str
    blocks: Sequence[Block]
