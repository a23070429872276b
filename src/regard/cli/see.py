"""`regard see`: one text, one model, every head."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from regard.cli.reading import Reader, read_text
from regard.cli.report import as_data, locate, print_reading
from regard.errors import RegardError
from regard.stats import Reading
from regard.viewer import write_page

#: Looked up without being asked for, when the text has it: the word whose meaning a sentence decides.
PRONOUN = "it"


def run(
    text: str, model: str, layers: str | None, length: int | None, words: list[str], save: Path | None, as_json: bool
) -> None:
    """Read, print, and write the page where one is asked for."""
    content, numbers = read_text(text), _numbers(layers)
    if not content.strip():
        raise RegardError("see: the text is empty. Give at least one word, a file, or - for standard input.")
    errors = Console(stderr=True)
    with errors.status(f"Reading with {model}"):
        read = Reader.load(model).read(content, numbers, length)
    reading = read.reading
    words = words or default_words(reading)
    for word in words:
        locate(reading, word)
    if as_json:
        print(json.dumps(as_data(read, words), ensure_ascii=False, indent=1))
    else:
        print_reading(Console(), read, words)
    for name, reason in read.missing.items():
        errors.print(f"Not seen: {name}: {reason}", style="yellow", markup=False)
    if save is not None:
        page = write_page(save / "index.html", [reading])
        errors.print(f"The page is at {page}", markup=False, highlight=False)


def default_words(reading: Reading) -> list[str]:
    """The pronoun, if the text has it."""
    return [PRONOUN] if reading.find(PRONOUN) is not None else []


def _numbers(layers: str | None) -> list[int] | None:
    if layers is None:
        return None
    try:
        return sorted({int(part) for part in layers.split(",")})
    except ValueError:
        raise RegardError(
            f"see: --layers takes numbers with commas between them, such as 0,1; got {layers!r}."
        ) from None
