"""`regard demo`: three real texts through a real model, and a page of every weight."""

from __future__ import annotations

import webbrowser
from importlib.resources import files
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from regard.cli.reading import Read, Reader
from regard.cli.see import default_words
from regard.cli.summary import print_summary
from regard.stats import CAVEAT
from regard.viewer import write_page

SENTENCES = (
    "The animal didn't cross the street because it was too tired.",
    "The trophy didn't fit in the suitcase because it was too big.",
)
PASSAGE_LENGTH = 512


def run(out: Path, model: str, open_: bool = False) -> None:
    """Read, print, write the page, say where it is, and open it if that is asked for."""
    try:
        reads, page = _read(out, model)
    except KeyboardInterrupt:
        Console(stderr=True).print("Stopped before the page was written; nothing was left behind.")
        raise
    console = Console()
    for read in reads:
        print_summary(console, read, default_words(read.reading))
        console.print()
    console.print(Text(CAVEAT, style="dim"))
    console.print(f"Every weight of these texts is on one page: {page}", markup=False, highlight=False, soft_wrap=True)
    if open_:
        webbrowser.open(page.resolve().as_uri())


def _read(out: Path, model: str) -> tuple[list[Read], Path]:
    """The texts, and the page of them."""
    reads: list[Read] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"Loading {model}")
        reader = Reader.load(model)
        for sentence in SENTENCES:
            progress.update(task, description=f"Reading: {sentence}")
            reads.append(reader.read(sentence))
        progress.update(task, description=f"Reading {PASSAGE_LENGTH} tokens of Alice in Wonderland")
        reads.append(_passage(reader))
        progress.update(task, description="Writing the page")
        return reads, write_page(out / "index.html", [read.reading for read in reads])


def _passage(reader: Reader) -> Read:
    text = files("regard").joinpath("data", "passage.txt").read_text(encoding="utf-8")
    title = "Alice's Adventures in Wonderland, the opening"
    return reader.read(text, length=PASSAGE_LENGTH, title=title)
