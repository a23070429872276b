"""`regard demo` reads three texts with a real model, translates a sentence, and writes a page with all weights."""

from __future__ import annotations

import webbrowser
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from regard.base.texts.embedded import passage
from regard.cli.analyze import default_words
from regard.cli.lab import lab
from regard.cli.outputs import check_folder
from regard.cli.report import print_summary
from regard.engine.kernel.library import described
from regard.hf.text_reader import TextReader, TextResult
from regard.stats import CAVEAT
from regard.viewer import page_reductions, write_page
from regard.viewer.sheet import sheets_of
from regard.viewer.story import tour

SENTENCES = (
    "The animal didn't cross the street because it was too tired.",
    "The trophy didn't fit in the suitcase because it was too big.",
)
#: Tokens of the passage.
PASSAGE_LENGTH = 512


def run(out: Path, model: str, open_: bool = False) -> None:
    """Read the texts, print the results, write the page, and open it if `open_`.

    `out` is the folder of the page. `model` is a name that `load_model` finds, such as "minilm".
    """
    check_folder("demo", "--out", out)
    try:
        results, page, translation = _read(out, model)
    except KeyboardInterrupt:
        Console(stderr=True).print("Stopped before the page was written; no files were left.")
        raise
    console = Console()
    for result in results:
        print_summary(console, result, default_words(result.reading))
        console.print()
    console.print(translation, markup=False, highlight=False)
    console.print(Text(CAVEAT, style="dim"))
    console.print(described(), highlight=False, soft_wrap=True)
    console.print(f"Every weight of these texts is on one page: {page}", markup=False, highlight=False, soft_wrap=True)
    if open_:
        webbrowser.open(page.resolve().as_uri())


def _read(out: Path, model: str) -> tuple[list[TextResult], Path, str]:
    """The results of both `SENTENCES` and of the passage, the path of the page, and a line about the translation.

    The line has the sentence, its translation and the models that align them, or the reason why there is none.
    """
    results: list[TextResult] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"Loading {model}")
        reader = TextReader.load(model)
        for sentence in SENTENCES:
            progress.update(task, description=f"Reading: {sentence}")
            results.append(reader.read(sentence, also=page_reductions))
        progress.update(task, description=f"Reading {PASSAGE_LENGTH} tokens of Alice in Wonderland")
        results.append(_passage(reader))
        progress.update(task, description="Translating")
        sheets, translation = lab("pages").translated_sheets()
        progress.update(task, description="Writing the page")
        sheets = [*sheets_of([result.reading for result in results]), *sheets]
        return results, write_page(out / "index.html", sheets, tour(sheets)), translation


def write_sentences(path: Path, model: str = "minilm") -> Path:
    """Write the page of the demo without the long passage to the file `path`: the documentation shows it."""
    reader = TextReader.load(model)
    readings = [reader.read(sentence, also=page_reductions).reading for sentence in SENTENCES]
    sheets = [*sheets_of(readings), *lab("pages").translated_sheets()[0]]
    return write_page(path, sheets, tour(sheets))


def _passage(reader: TextReader) -> TextResult:
    """The result of the long passage, the opening of a book."""
    title = "Alice's Adventures in Wonderland, the opening"
    return reader.read(passage(), length=PASSAGE_LENGTH, title=title, also=page_reductions)
