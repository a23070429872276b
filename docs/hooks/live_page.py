"""Files of one page that the site shows in frames: the live page on its first screen, and the lectures."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

#: The name of the file beside the home page, and the line of the home page below which its frame stands.
NAME, BELOW = (
    "demo.html",
    "**See the attention weights of any PyTorch model, without switching off SDPA or FlashAttention.**\n",
)
FRAME = f"""
<figure class="live-page" markdown="0">
<iframe src="{NAME}" title="Every attention weight of three sentences" loading="lazy"></iframe>
<figcaption>This is the page that <code>regard demo</code> writes, one file that works offline.
<a href="{NAME}">Open it alone</a>, or see <a href="page.html">what it shows</a>.</figcaption>
</figure>
"""


def content() -> bytes:
    """The file. It is made anew with each build of the site, which takes some seconds."""
    from regard.cli.demo import write_sentences

    with tempfile.TemporaryDirectory() as folder:
        return write_sentences(Path(folder) / NAME).read_bytes()


def lectures() -> Iterator[tuple[str, bytes]]:
    """The place of each lecture in the site, beside docs/guides/lectures.md, and its file."""
    from regard.viewer.lecture import LECTURES, write_lecture

    with tempfile.TemporaryDirectory() as folder:
        for lecture in LECTURES:
            path = write_lecture(Path(folder) / f"{lecture}.html", lecture)
            yield f"guides/lectures/{path.name}", path.read_bytes()


def framed(home: str) -> str:
    """The home page with the frame on its first screen."""
    if BELOW not in home:
        raise ValueError(f"README.md has no line {BELOW!r}, below which the site shows the live page")
    return home.replace(BELOW, BELOW + FRAME, 1)
