"""The page as one file: it opens without a network, and carries the maps of its texts."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from regard.errors import RegardError
from regard.stats import Reading
from regard.viewer.embedded import embedded
from regard.viewer.sheet import COMMON, Sheet, sheets_of

#: Scripts run by their hash alone; styles are those of the page; pictures are made in it, to be saved.
POLICY = (
    "default-src 'none'; script-src 'sha256-{hash}'; style-src 'unsafe-inline'; img-src data: blob:; "
    "connect-src {from_}; base-uri 'none'; form-action 'none'"
)
TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="<!--policy-->">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>Regard</title>
<style>
<!--style-->
</style>
</head>
<body>
<div id="regard" class="regard"></div>
<noscript><p>This page draws its maps with a script that is part of it; please allow scripts.</p></noscript>
<script type="application/json" id="regard-data"><!--data--></script>
<script type="module"><!--script--></script>
</body>
</html>
"""


def write_page(path: str | os.PathLike[str], texts: Sequence[Reading | Sheet]) -> Path:
    """Write the page of some texts to `path`, whole or not at all; its folders are made.

    Weights are exact where queries and keys fit in the page, at most 15 MB in all; maps of longer texts are shown
    in cells that hold the weight summed over keys and averaged over queries.
    """
    path = Path(path)
    if not texts:
        raise RegardError("write_page: there is no text to show. Give at least one Reading.")
    page = render(sheets_of(texts))
    try:
        write_whole(path, page)
    except OSError as error:
        raise RegardError(f"write_page: {path} cannot be written: {error.strerror or error}.") from error
    return path


def write_whole(path: Path, content: str) -> None:
    """To a file beside it, then renamed: whoever interrupts finds the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".regard-") as folder:
        draft = Path(folder) / path.name
        draft.write_text(content, encoding="utf-8")
        os.replace(draft, path)


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
    return re.sub(r"<!--(policy|style|script|data)-->", lambda place: parts[place[1]], TEMPLATE)


def embed(data: Any) -> str:
    """JSON that cannot end the element it stands in, whatever the text holds."""
    escapes = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).translate(escapes)


@cache
def bundle(name: str) -> str:
    """A file that `make page` built from `frontend/`."""
    return files("regard.viewer").joinpath("static", name).read_text(encoding="utf-8")
