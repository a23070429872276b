"""The blocks of a report, independent of Markdown and HTML: headings, text, tables, figures, facts and quotes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from regard.lab.report.svg import Figure


@dataclass(frozen=True)
class Heading:
    """The start of a section."""

    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph. Kind "leading" is a main result, "hint" explains how to read the report, "warning" is a warning."""

    text: str
    kind: str = "plain"


@dataclass(frozen=True)
class Column:
    """The head of a column: its name, and whether it has numbers."""

    name: str
    number: bool = True


@dataclass(frozen=True)
class Table:
    """Rows of cells. The first cell of a row is its name. `best` are the cells (row, column) in bold."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    best: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class Figures:
    """Figures side by side if there is space, below one `caption`."""

    figures: Sequence[Figure]
    caption: str = ""
    small: bool = False


@dataclass(frozen=True)
class Facts:
    """Pairs of a name and a value."""

    facts: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Quotes:
    """Several versions of one sentence: pairs of a name and the sentence."""

    caption: str
    lines: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Folded:
    """Blocks that are hidden until the reader opens them."""

    title: str
    blocks: Sequence[Block]


Block = Heading | Text | Table | Figures | Facts | Quotes | Folded


@dataclass(frozen=True)
class Document:
    """A report: its title, and its blocks from top to bottom."""

    title: str
    blocks: Sequence[Block]
