"""`html_table`: rows of texts and numbers as a plain table for notebooks, without styles that a site would remove."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

#: The most rows of a table; the caption says how many there are.
ROWS = 100


def html_table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]], note: str = "") -> str:
    """A table under its title. A float has three decimals.

    >>> html_table("Heads", ["head", "entropy"], [[0, 0.5]])[-83:]
    '<tr><th>head</th><th>entropy</th></tr><tr><td>0</td><td>0.500</td></tr></table>'
    """
    rows = list(rows)
    if len(rows) > ROWS:
        note = f"{note} The first {ROWS} of {len(rows)} rows.".lstrip()
    caption = f'<caption align="left"><b>{_text(title)}</b>{f"<br>{_text(note)}" if note else ""}</caption>'
    names = "".join(f"<th>{_text(name)}</th>" for name in header)
    lines = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows[:ROWS])
    return f"<table>{caption}{f'<tr>{names}</tr>' * bool(names)}{lines}</table>"


def _text(cell: object) -> str:
    return escape(f"{cell:.3f}" if isinstance(cell, float) else str(cell)).replace("\n", "<br>")
