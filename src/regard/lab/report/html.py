"""Writes a report as one HTML page that opens without a network."""

from __future__ import annotations

import html
import re
from importlib.resources import files

from regard.lab.report.elements import Block, Document, Facts, Figures, Folded, Heading, Quotes, Table, Text
from regard.lab.report.svg import Figure


def to_html(document: Document) -> str:
    """The whole page, with styles and figures inside and without scripts."""
    headings = [block.text for block in document.blocks if isinstance(block, Heading)]
    parts = {
        "title": _safe(document.title),
        "style": _template("report.css"),
        "sections": "".join(f'<li><a href="#{_anchor(h)}">{_safe(h)}</a></li>' for h in headings),
        "body": "\n".join(map(_block, document.blocks)),
    }
    return re.sub(r"<!--(title|style|sections|body)-->", lambda match: parts[match[1]], _template("report.html"))


def _anchor(text: str) -> str:
    """The id of a heading, to which the list of sections links."""
    return "section-" + re.sub(r"\W+", "-", text.lower()).strip("-")


def _block(block: Block) -> str:
    """The HTML of one block."""
    match block:
        case Heading(text):
            return f'<h2 id="{_anchor(text)}">{_safe(text)}</h2>'
        case Text(text, kind):
            return f'<p class="{_safe(kind)}">{_safe(text)}</p>'
        case Table():
            return _table(block)
        case Figures(figures, caption, small):
            heading = f"<h3>{_safe(caption)}</h3>" if caption else ""
            kind = "panels" if small else "figures"
            return f'{heading}<div class="{kind}">{"".join(_figure(figure, small) for figure in figures)}</div>'
        case Facts(facts):
            rows = "".join(f"<dt>{_safe(name)}</dt><dd>{_safe(value)}</dd>" for name, value in facts)
            return f'<dl class="facts">{rows}</dl>'
        case Quotes(caption, lines):
            rows = "".join(f"<dt>{_safe(who)}</dt><dd>{_safe(sentence)}</dd>" for who, sentence in lines)
            return f'<section class="quotes"><h3>{_safe(caption)}</h3><dl>{rows}</dl></section>'
        case Folded(title, inner):
            return f"<details><summary>{_safe(title)}</summary>{''.join(map(_block, inner))}</details>"


def _figure(figure: Figure, small: bool) -> str:
    """A figure with the sentence that says what to see; small ones have no caption."""
    caption = "" if small else f"<figcaption>{_safe(figure.title)}</figcaption>"
    look = f'<p class="look">{_safe(figure.look)}</p>' if figure.look else ""
    return f"<figure>{caption}{figure.svg}{look}</figure>"


def _table(table: Table) -> str:
    """A table that scrolls sideways if it is wider than the page."""
    head = "".join(f'<th scope="col"{_kind(c.number)}>{_safe(c.name)}</th>' for c in table.columns)
    rows = "".join(_row(table, number) for number in range(len(table.rows)))
    caption = f"<caption>{_safe(table.caption)}</caption>" if table.caption else ""
    label = _safe(table.caption or table.columns[0].name)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table>{caption}'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _row(table: Table, number: int) -> str:
    """A row of a table, by its number; the first cell is its head, and the best cells are bold."""
    cells = []
    for index, (column, cell) in enumerate(zip(table.columns, table.rows[number], strict=True)):
        text = f"<strong>{_safe(cell)}</strong>" if (number, index) in table.best else _safe(cell)
        cells.append(f'<th scope="row">{text}</th>' if index == 0 else f"<td{_kind(column.number)}>{text}</td>")
    return f"<tr>{''.join(cells)}</tr>"


def _kind(number: bool) -> str:
    """The attribute of a cell with a number."""
    return ' class="number"' if number else ""


def _safe(text: str) -> str:
    """Text with the special characters of HTML escaped."""
    return html.escape(text, quote=True)


def _template(name: str) -> str:
    """The content of a file of this package."""
    return files("regard.lab.report").joinpath(name).read_text(encoding="utf-8")
