"""`regard see`: one text or several, one model, every head."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from regard.cli.compare import FEW_HEADS, NUM_HEADS, check_words, differences, letter_of, print_differences
from regard.cli.importance import most_important, weighed
from regard.cli.outputs import check_drawing, check_folder
from regard.cli.report import as_data, locate, print_findings, print_reading, print_roles, print_word, roles_data
from regard.cli.summary import print_ending, print_probe, print_statements, print_summary
from regard.errors import RegardError
from regard.hf.text_reader import Read, Reader, no_folds, read_text
from regard.stats import Reading, RoleTable
from regard.viewer import Sheet, page_folds, save_run, write_page

#: Looked up without being asked for, when the text has it: the word whose meaning a sentence decides.
PRONOUN = "it"


@dataclass(frozen=True)
class Wish:
    """What was asked for on the command line."""

    texts: list[str]
    model: str = "minilm"
    layers: str | None = None
    length: int | None = None
    words: tuple[str, ...] = ()
    save: Path | None = None
    figures: Path | None = None
    probe: bool = False
    as_json: bool = False
    table: bool = False
    importance: bool = False
    verify_all: bool = False

    @property
    def numbers(self) -> list[int] | None:
        """The layers as numbers."""
        if self.layers is None:
            return None
        try:
            return sorted({int(part) for part in self.layers.split(",")})
        except ValueError:
            raise RegardError(
                f"see: --layers takes numbers with commas between them, such as 0,1; got {self.layers!r}."
            ) from None


def run(wish: Wish) -> None:
    """Read, print, and write the page and the pictures where they are asked for."""
    check_outputs(wish)
    contents, errors = _contents(wish.texts), Console(stderr=True)
    numbers = wish.numbers
    with errors.status(f"Reading with {wish.model}"):
        reader = replace(Reader.load(wish.model), verify_all=wish.verify_all)
        also = page_folds if wish.save is not None else no_folds
        reads = [reader.read(content, numbers, wish.length, also=also) for content in contents]
        probe = reader.probe(numbers) if wish.probe else None
    if wish.importance:
        reads = [weighed(reader, content, read, wish.length) for content, read in zip(contents, reads, strict=True)]
    _check_words(reads, wish.words)
    if wish.as_json:
        print(json.dumps(_as_data(reads, wish, probe), ensure_ascii=False, indent=1))
    else:
        _print(Console(), reads, wish, probe)
    for name, reason in reads[0].missing.items():
        errors.print(f"Not seen: {name}: {reason}", style="yellow", markup=False)
    _write(reads, wish, errors)


def check_outputs(wish: Wish) -> None:
    """Refuse places that cannot be written to, before the work."""
    check_folder("see", "--save", wish.save)
    check_folder("see", "--figures", wish.figures)
    if wish.figures is not None:
        check_drawing("see", "--figures")


def _contents(sources: Sequence[str]) -> list[str]:
    if sources.count("-") > 1:
        raise RegardError("see: standard input can be read once. Give - once, and the other texts as files.")
    contents = [read_text(source) for source in sources]
    if not all(content.strip() for content in contents):
        raise RegardError("see: the text is empty. Give at least one word, a file, or - for standard input.")
    return contents


def _check_words(reads: Sequence[Read], words: Sequence[str]) -> None:
    if len(reads) > 1:
        check_words([read.reading for read in reads], words)
    for word in words if len(reads) == 1 else ():
        locate(reads[0].reading, word)


def _words(read: Read, wish: Wish) -> list[str]:
    """The words asked for that this text has, or the pronoun."""
    return [word for word in wish.words if read.reading.find(word) is not None] or default_words(read.reading)


def _print(console: Console, reads: Sequence[Read], wish: Wish, probe: RoleTable | None) -> None:
    if len(reads) > 1:
        _print_several(console, reads, wish)
    elif wish.table:
        print_reading(console, reads[0], _words(reads[0], wish))
    else:
        print_summary(console, reads[0], _words(reads[0], wish))
    if wish.importance and len(reads) == 1:
        console.print(most_important(reads[0].reading))
    if probe is not None:
        (_print_probe if wish.table else print_probe)(console, probe)
    if not wish.table:
        print_ending(console)


def _print_probe(console: Console, probe: RoleTable) -> None:
    console.print()
    print_roles(console, probe, "random tokens, all of them twice")


def _print_several(console: Console, reads: Sequence[Read], wish: Wish) -> None:
    for number, read in enumerate(reads):
        size = f"  {len(read.reading.profile.tokens)} tokens"
        console.print(Text.assemble((letter_of(number), "bold"), f"  {read.reading.title}", (size, "dim")))
    console.print()
    print_differences(console, [read.reading for read in reads], NUM_HEADS if wish.table else FEW_HEADS)
    for number, read in enumerate(reads):
        console.print()
        console.print(Text(f"{letter_of(number)}  {read.reading.title}", style="bold"))
        if wish.table:
            _print_all(console, read.reading, _words(read, wish))
        else:
            print_statements(console, read.reading, _words(read, wish))


def _print_all(console: Console, reading: Reading, words: Sequence[str]) -> None:
    for word in words:
        print_word(console, reading, word)
    print_roles(console, reading.roles)
    print_findings(console, reading.findings)


def _as_data(reads: Sequence[Read], wish: Wish, probe: RoleTable | None) -> dict[str, Any]:
    texts = [as_data(read, _words(read, wish)) for read in reads]
    data = texts[0]
    if len(reads) > 1:
        data = {"texts": texts, "differences": [vars(each) for each in differences([read.reading for read in reads])]}
    return data if probe is None else data | {"probe": roles_data(probe)}


def _write(reads: Sequence[Read], wish: Wish, errors: Console) -> None:
    if wish.save is not None:
        with errors.status(f"Saving to {wish.save}") as status:
            sheets = [Sheet.of(read.reading, charts=read.charts) for read in reads]
            page = write_page(wish.save / "index.html", sheets)
            save_run(wish.save, sheets, status.update)
        errors.print(f"The page is at {page}; regard view {wish.save} serves it.", markup=False, highlight=False)
    if wish.figures is not None:
        from regard.viewer.figures import save_figures

        for number, read in enumerate(reads):
            folder = wish.figures if len(reads) == 1 else wish.figures / letter_of(number)
            saved = save_figures(folder, read.reading)
            errors.print(f"{len(saved)} pictures are in {folder}", markup=False, highlight=False)


def default_words(reading: Reading) -> list[str]:
    """The pronoun, if the text has it."""
    return [PRONOUN] if reading.find(PRONOUN) is not None else []
