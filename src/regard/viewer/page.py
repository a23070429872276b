"""The page as one file that contains the maps of its texts and opens without a network."""

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

from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.base.whole_files import write_whole
from regard.stats.text_reading import TextReading
from regard.viewer.embedded import embedded
from regard.viewer.sheet import COMMON, Sheet, sheets_of
from regard.viewer.story import Story, story_of

#: Only the script with this hash runs. Styles are inline. The page makes images to be saved.
POLICY = (
    "default-src 'none'; script-src 'sha256-{hash}'; style-src 'unsafe-inline'; img-src data: blob:; "
    "connect-src {from_}; base-uri 'none'; form-action 'none'"
)


@checked
def write_page(
    path: str | os.PathLike[str],
    texts: Sequence[TextReading | Sheet],
    story: Story | str | os.PathLike[str] | None = None,
) -> Path:
    """Write the page of some texts to `path`, completely or not at all. Missing folders are created.

    `story` is a `Story` or a JSON file that the page saved: the page then plays it.

    Weights are exact if queries and keys fit into the page, at most 15 MB in all. Maps of longer texts are shown in
    cells: the weight summed over keys and averaged over queries.

    >>> import tempfile, torch, regard as rg
    >>> from pathlib import Path
    >>> x = torch.zeros(1, 1, 3, 4)
    >>> reading = rg.types.TextReading.of("zeros", {"layers.0": rg.Attention()(x, x, x).weights}, ["a", "b", "c"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = rg.viewer.write_page(Path(folder) / "page.html", [reading])
    ...     page.name, page.read_text().startswith("<!doctype html>")
    ('page.html', True)
    """
    if not isinstance(path, str | os.PathLike):
        raise RegardError(
            f"write_page: the first argument must be the path of the file, got {type(path).__name__}. "
            "Example: write_page('page.html', [reading]); TextReading.of(title, maps, tokens) makes a reading."
        )
    path = Path(path)
    sheets = sheets_of(texts)
    if not sheets:
        raise RegardError("write_page: there is no text to show. Give at least one TextReading.")
    write_whole(path, render(sheets, story_of(story, sheets)))
    return path


def render(sheets: list[Sheet], story: Story | None = None) -> str:
    """The page of texts as HTML."""
    return html(embed(payload(sheets, story)))


def payload(sheets: list[Sheet], story: Story | None = None) -> dict[str, Any]:
    """The data of the page: everything about each text, and its maps; the story, if it has one."""
    texts = [sheet.about | {"maps": maps} for sheet, maps in zip(sheets, embedded(sheets), strict=True)]
    return COMMON | {"texts": texts} | ({} if story is None else {"story": story.about})


def html(data: str, from_: str = "'none'") -> str:
    """The page with its data as JSON. `from_` is the source that it may request more data from (connect-src)."""
    script = bundle("page.js")
    digest = hashlib.sha256(script.encode()).digest()
    parts = {
        "policy": POLICY.format(hash=base64.b64encode(digest).decode(), from_=from_),
        "style": bundle("page.css"),
        "script": script,
        "data": data,
    }
    return re.sub(r"<!--(policy|style|script|data)-->", lambda match: parts[match[1]], bundle("page.html"))


def embed(data: Any) -> str:
    """JSON without characters that could end the HTML element around it."""
    escapes = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).translate(escapes)


@cache
def bundle(name: str) -> str:
    """A file that `make page` built from `frontend/`."""
    return files("regard.viewer").joinpath("static", name).read_text(encoding="utf-8")
