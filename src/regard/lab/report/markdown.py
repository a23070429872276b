"""Writes a report as Markdown, with figures as separate files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from regard.lab.report.elements import Block, Document, Facts, Figures, Folded, Heading, Quotes, Table, Text
from regard.lab.report.svg import Figure

#: The folder of the figures, beside the Markdown.
FIGURES = "figures"


def to_markdown(document: Document) -> str:
    """The whole report. Figures are links to `figures/<name>.svg`."""
    return "\n\n".join([f"# {_plain(document.title)}", *_blocks(document.blocks)]) + "\n"


def _blocks(blocks: Iterable[Block]) -> list[str]:
    """The paragraphs of blocks, to be joined by empty lines."""
    return [part for block in blocks for part in _block(block)]


def _block(block: Block) -> list[str]:
    """The paragraphs of one block."""
    match block:
        case Heading(text):
            return [f"## {_plain(text)}"]
        case Text(text, kind):
            return [f"**{_plain(text)}**" if kind == "leading" else _plain(text)]
        case Table():
            return _table(block)
        case Figures(figures, caption):
            pictures = [_picture(figure) for figure in figures]
            between = "\n\n" if any(figure.look for figure in figures) else "\n"
            return [*([_plain(caption)] if caption else []), between.join(pictures)]
        case Facts(facts):
            return ["\n".join(f"- **{_plain(name)}**: {_plain(value)}" for name, value in facts)]
        case Quotes(caption, lines):
            return [
                f"{_plain(caption)}\n" + "".join(f"\n- *{_plain(who)}*: {_plain(sentence)}" for who, sentence in lines)
            ]
        case Folded(title, inner):
            return [f"<details><summary>{_plain(title)}</summary>", *_blocks(inner), "</details>"]


def _picture(figure: Figure) -> str:
    """The link of a figure, and below it what to see."""
    return f"![{_plain(figure.title)}]({FIGURES}/{figure.name}.svg)" + (
        f"\n{_plain(figure.look)}" if figure.look else ""
    )


def _table(table: Table) -> list[str]:
    """The caption of a table, if it has one, and the table."""
    head = _row(column.name for column in table.columns)
    rule = "|" + "|".join("---:" if column.number else "---" for column in table.columns) + "|"
    rows = [_row(_cell(cell, (r, c) in table.best) for c, cell in enumerate(row)) for r, row in enumerate(table.rows)]
    return [*([_plain(table.caption)] if table.caption else []), "\n".join([head, rule, *rows])]


def _row(cells: Iterable[str]) -> str:
    """A row of a table."""
    return "| " + " | ".join(cells) + " |"


def _cell(text: str, best: bool) -> str:
    """The text of a cell; the best cells are bold."""
    plain = _plain(text).replace("|", "\\|")
    return f"**{plain}**" if best and plain else plain


def _plain(text: str) -> str:
    """Text with Markdown characters escaped."""
    text = re.sub(r"([\\`*_<>\[\]])", r"\\\1", " ".join(text.split()))
    return re.sub(r"^([#+-]|\d+\.)(\s)", r"\\\1\2", text)  # else a heading or a list would begin


def cells(line: str) -> Sequence[str]:
    """The cells of a row of a Markdown table.

    >>> cells("| a | **1.0** |")
    ['a', '1.0']
    """
    return [cell.strip().strip("*") for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])]
