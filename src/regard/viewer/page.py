"""The page as one file: it opens without a network, and carries the maps of its texts."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from regard.checks import checked
from regard.errors import RegardError
from regard.seq2seq.runs.files import write_whole
from regard.stats import Reading
from regard.viewer.embedded import embedded
from regard.viewer.sheet import COMMON, Sheet, sheets_of

#: Scripts run by their hash alone; styles are those of the page; pictures are made in it, to be saved.
POLICY = (
    "default-src 'none'; script-src 'sha256-{hash}'; style-src 'unsafe-inline'; img-src data: blob:; "
    "connect-src {from_}; base-uri 'none'; form-action 'none'"
)


@checked
def write_page(path: str | os.PathLike[str], texts: Sequence[Reading | Sheet]) -> Path:
    """Write the page of some texts to `path`, whole or not at all; its folders are made.

    Weights are exact where queries and keys fit in the page, at most 15 MB in all; maps of longer texts are shown
    in cells that hold the weight summed over keys and averaged over queries.
    """
    if not isinstance(path, str | os.PathLike):
        raise RegardError(
            f"write_page: the first argument is the file to write, got {type(path).__name__}. "
            "Write write_page('page.html', [reading]); Reading.of(title, maps, tokens) makes a reading."
        )
    path = Path(path)
    sheets = sheets_of(texts)
    if not sheets:
        raise RegardError("write_page: there is no text to show. Give at least one Reading.")
    write_whole(path, render(sheets))
    return path


def render(sheets: list[Sheet]) -> str:
    """The page of some texts as a string of HTML."""
    return html(embed(payload(sheets)))


def payload(sheets: list[Sheet]) -> dict[str, Any]:
    """What the page reads: what is said of every text, and its maps."""
    texts = [sheet.about | {"maps": maps} for sheet, maps in zip(sheets, embedded(sheets), strict=True)]
    return COMMON | {"texts": texts}


def html(data: str, from_: str = "'none'") -> str:
    """The page around JSON; `from_` is where it may ask for more."""
    script = bundle("page.js")
    found = hashlib.sha256(script.encode()).digest()
    parts = {
        "policy": POLICY.format(hash=base64.b64encode(found).decode(), from_=from_),
        "style": bundle("page.css"),
        "script": script,
        "data": data,
    }
    return re.sub(r"<!--(policy|style|script|data)-->", lambda place: parts[place[1]], bundle("page.html"))


def embed(data: Any) -> str:
    """JSON that cannot end the element it stands in, whatever the text holds."""
    escapes = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).translate(escapes)


@cache
def bundle(name: str) -> str:
    """A file that `make page` built from `frontend/`."""
    return files("regard.viewer").joinpath("static", name).read_text(encoding="utf-8")
