"""`regard analyze` results one text or several with a model, and prints what every head attends to."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from regard.base.errors import RegardError
from regard.cli.compare import FEW_HEADS, NUM_HEADS, check_words, letter_of, print_differences
from regard.cli.importance import most_important, with_importance
from regard.cli.outputs import check_drawing, check_folder
from regard.cli.report import as_data, locate, print_findings, print_reading, print_roles, print_word, roles_data
from regard.cli.steps import shown_steps
from regard.cli.summary import print_ending, print_probe, print_statements, print_summary
from regard.cli.texts import read_texts
from regard.hf.text_reader import TextReader, TextResult, no_reductions
from regard.stats.roles import RoleTable
from regard.stats.text_reading import TextReading, text_differences
from regard.viewer import Sheet, Story, page_reductions, save_run, write_page
from regard.viewer.story import story_of

#: Printed by default if the text has it: what this word refers to depends on the sentence.
PRONOUN = "it"
#: A text of more characters (about 4,000 tokens) takes long: its steps are printed also where there is no terminal.
LONG = 20_000


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    texts: list[str]
    model: str = "minilm"
    layers: str | None = None
    length: int | None = None
    words: tuple[str, ...] = ()
    save: Path | None = None
    figures: Path | None = None
    all_figures: bool = False
    probe: bool = False
    as_json: bool = False
    table: bool = False
    importance: bool = False
    verify_all: bool = False
    story: Path | None = None

    @property
    def numbers(self) -> list[int] | None:
        """The layers of --layers as numbers; None for all."""
        if self.layers is None:
            return None
        try:
            return sorted({int(part) for part in self.layers.split(",")})
        except ValueError:
            raise RegardError(
                f"analyze: --layers takes numbers separated by commas, such as 0,1; got {self.layers!r}."
            ) from None


def run(options: Options) -> None:
    """Read the texts, print the results, and write the page of --save and the figures of --figures."""
    check_outputs(options)
    texts, errors = read_texts(options.texts), Console(stderr=True)
    numbers = options.numbers
    with shown_steps(errors, f"Reading with {options.model}", _is_long(texts)) as show:
        reader = replace(TextReader.load(options.model), verify_all=options.verify_all)
        also = page_reductions if options.save is not None else no_reductions
        results = [reader.read(text, numbers, options.length, also=also, progress=show) for text in texts]
        probe = reader.probe(numbers) if options.probe else None
    if options.importance:
        results = [with_importance(reader, *pair, options.length) for pair in zip(texts, results, strict=True)]
    _check_words(results, options.words)
    if options.as_json:
        print(json.dumps(_as_data(results, options, probe), ensure_ascii=False, indent=1))
    else:
        _print(Console(), results, options, probe)
    for name, reason in results[0].missing.items():
        errors.print(f"Not captured: {name}: {reason}", style="yellow", markup=False)
    _write(results, options, errors, lines=_is_long(texts))


def _is_long(texts: Sequence[str]) -> bool:
    return any(len(text) > LONG for text in texts)


def check_outputs(options: Options) -> None:
    """Refuse folders that cannot be written, and a story that cannot be read, before the work."""
    if options.story is not None:
        if options.save is None:
            raise RegardError("analyze: --story needs --save DIR, since a page plays the story.")
        Story.read(options.story)
    if options.all_figures and options.figures is None:
        raise RegardError("analyze: --all-figures needs --figures DIR, the folder of the figures.")
    check_folder("analyze", "--save", options.save)
    check_folder("analyze", "--figures", options.figures)
    if options.figures is not None:
        check_drawing("analyze", "--figures")


def _check_words(results: Sequence[TextResult], words: Sequence[str]) -> None:
    if len(results) > 1:
        check_words([result.reading for result in results], words)
    for word in words if len(results) == 1 else ():
        locate(results[0].reading, word)


def _words(result: TextResult, options: Options) -> list[str]:
    """The words of --word that this text has, or the default words."""
    return [word for word in options.words if result.reading.find(word) is not None] or default_words(result.reading)


def _print(console: Console, results: Sequence[TextResult], options: Options, probe: RoleTable | None) -> None:
    if len(results) > 1:
        _print_several(console, results, options)
    elif options.table:
        print_reading(console, results[0], _words(results[0], options))
    else:
        print_summary(console, results[0], _words(results[0], options))
    if options.importance and len(results) == 1:
        console.print(most_important(results[0].reading))
    if probe is not None:
        (_print_probe if options.table else print_probe)(console, probe)
    if not options.table:
        print_ending(console)


def _print_probe(console: Console, probe: RoleTable) -> None:
    console.print()
    print_roles(console, probe, "random tokens, each of them twice")


def _print_several(console: Console, results: Sequence[TextResult], options: Options) -> None:
    for number, result in enumerate(results):
        size = f"  {len(result.reading.profile.tokens)} tokens"
        console.print(Text.assemble((letter_of(number), "bold"), f"  {result.reading.title}", (size, "dim")))
    console.print()
    print_differences(console, [result.reading for result in results], NUM_HEADS if options.table else FEW_HEADS)
    for number, result in enumerate(results):
        console.print()
        console.print(Text(f"{letter_of(number)}  {result.reading.title}", style="bold"))
        if options.table:
            _print_all(console, result.reading, _words(result, options))
        else:
            print_statements(console, result.reading, _words(result, options))


def _print_all(console: Console, reading: TextReading, words: Sequence[str]) -> None:
    for word in words:
        print_word(console, reading, word)
    print_roles(console, reading.roles)
    print_findings(console, reading.findings)


def _as_data(results: Sequence[TextResult], options: Options, probe: RoleTable | None) -> dict[str, Any]:
    texts = [as_data(result, _words(result, options)) for result in results]
    data = texts[0]
    if len(results) > 1:
        data = {
            "texts": texts,
            "differences": [vars(head) for head in text_differences([result.reading for result in results])],
        }
    return data if probe is None else data | {"probe": roles_data(probe)}


def save_page(options: Options, sheets_of: Callable[[], list[Sheet]], errors: Console, lines: bool = False) -> None:
    """Write the page and the maps of --save, if it is given, and print where they are."""
    if options.save is None:
        return
    with shown_steps(errors, f"Saving to {options.save}", lines) as show:
        sheets = sheets_of()
        story = story_of(options.story, sheets)
        page = write_page(options.save / "index.html", sheets, story)
        save_run(options.save, sheets, show, story)
    errors.print(f"The page is at {page}; regard view {options.save} serves it.", markup=False, highlight=False)


def _write(results: Sequence[TextResult], options: Options, errors: Console, lines: bool) -> None:
    save_page(options, lambda: [Sheet.of(result.reading, charts=result.charts) for result in results], errors, lines)
    if options.figures is not None:
        from regard.viewer.figures import save_figures

        for number, result in enumerate(results):
            folder = options.figures if len(results) == 1 else options.figures / letter_of(number)
            with shown_steps(errors, f"Drawing pictures for {folder}", lines) as show:
                told = partial(_tell_saved, show)
                saved = save_figures(folder, result.reading, told, every_head=options.all_figures)
            errors.print(f"{len(saved)} pictures are in {folder}", markup=False, highlight=False)


def _tell_saved(show: Callable[[str], None], done: int, total: int) -> None:
    show(f"Saving pictures: {done} of {total}")


def default_words(reading: TextReading) -> list[str]:
    """`PRONOUN`, if the text has it."""
    return [PRONOUN] if reading.find(PRONOUN) is not None else []
