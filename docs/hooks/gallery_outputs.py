"""The notebooks of the gallery with the outputs of their examples: what each block printed, and its figures.

mkdocs-gallery runs every example for its page, and writes a notebook of the same blocks without outputs.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

CODE = re.compile(r"^```\{\.python \}\n.*?^```$", re.M | re.S)
PRINTED = re.compile(r"^```\{\.shell \.mkd-glr-script-out-disp \}\n(.*?)^```$", re.M | re.S)
FIGURE = re.compile(r"images/(mkd_glr_\w+\.png)")


def with_outputs(notebook: dict[str, Any], page: str, images: Path) -> dict[str, Any]:
    """The notebook of an example with the outputs that its page shows; `images` has the figures."""
    ends = [code.end() for code in CODE.finditer(page)]
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code" and not _is_magic(cell)]
    if len(cells) != len(ends):
        raise ValueError(f"a notebook has {len(cells)} cells of code, and its page {len(ends)} blocks")
    for cell, start, stop in zip(cells, ends, [*ends[1:], len(page)], strict=True):
        cell["outputs"] = [*_printed(page[start:stop]), *_figures(page[start:stop], images)]
    return notebook


def _is_magic(cell: dict[str, Any]) -> bool:
    return "".join(cell["source"]).startswith("%matplotlib")


def _printed(region: str) -> list[dict[str, Any]]:
    return [
        {"output_type": "stream", "name": "stdout", "text": found[1].rstrip() + "\n"}
        for found in PRINTED.finditer(region)
    ]


def _figures(region: str, images: Path) -> list[dict[str, Any]]:
    names = dict.fromkeys(FIGURE.findall(region))
    pictures = [base64.b64encode((images / name).read_bytes()).decode() for name in names]
    return [{"output_type": "display_data", "metadata": {}, "data": {"image/png": picture}} for picture in pictures]
