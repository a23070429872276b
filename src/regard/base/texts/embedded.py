"""The texts in the package. `README.md` in this folder gives their sources."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "english_verses", "passage", "read_segments"]

#: The folder of the texts.
FOLDER = Path(__file__).parent
#: A split, a verse, and the segment in two languages.
Segment = tuple[str, str, str, str]


def passage() -> str:
    """The opening of Alice's Adventures in Wonderland.

    >>> passage().split()[:6]
    ['Alice', 'was', 'beginning', 'to', 'get', 'very']
    """
    return (FOLDER / "passage.txt").read_text(encoding="utf-8")


def english_verses(count: int) -> list[str]:
    """The first `count` segments of the training split of the World English Bible in the package."""
    _, segments = read_segments(FOLDER / "bible-en-fr-20.tsv.xz")
    return [source for split, _, source, _ in segments if split == "train"][:count]


def read_segments(path: Path) -> tuple[dict[str, Any], list[Segment]]:
    """The facts and the segments of a file: xz of one line of JSON, then lines of split, verse, source, target."""
    head, *lines = lzma.decompress(path.read_bytes()).decode().splitlines()
    segments = []
    for line in lines:
        split, verse, source, target = line.split("\t")
        segments.append((split, verse, source, target))
    return json.loads(head), segments
