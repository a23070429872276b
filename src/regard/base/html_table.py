"""`html_table`: a table for notebooks, as HTML that is also well-formed XML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

#: The most rows of a table; the caption says how many there are.
ROWS = 200
#: Characters that XML cannot hold: most control characters, and halves of surrogate pairs.
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
#: The style of captions and texts.
LEFT = ' style="text-align:left"'


def html_table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]], note: str = "") -> str:
    """A table under its title. A float has three decimals; texts are aligned to the left.

    >>> html_table("Heads", ["head", "entropy"], [[0, 0.5]]).partition("</caption>")[2]
    '<tr><th>head</th><th>entropy</th></tr><tr><td>0</td><td>0.500</td></tr></table>'
    """
    rows = list(rows)
    if len(rows) > ROWS:
        note = f"{note} The first {ROWS} of {len(rows)} rows.".lstrip()
    caption = f"<caption{LEFT}><b>{_text(title)}</b>{f'<br/>{_text(note)}' if note else ''}</caption>"
    names = "".join(f"<th>{_text(name)}</th>" for name in header)
    lines = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows[:ROWS])
    return f"<table>{caption}{f'<tr>{names}</tr>' * bool(names)}{lines}</table>"


def _cell(cell: object) -> str:
    return f"<td{LEFT if isinstance(cell, str) else ''}>{_text(cell)}</td>"


def _text(cell: object) -> str:
    """A cell as text in XML: escaped, without characters that XML cannot hold, with line breaks."""
    said = f"{cell:.3f}" if isinstance(cell, float) else str(cell)
    return escape(NOT_XML.sub("?", said)).replace("\n", "<br/>")
