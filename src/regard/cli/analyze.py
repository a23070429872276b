"""`regard analyze` reads one text or several with a model, and prints what every head attends to."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO

from rich.console import Console
from rich.text import Text

from regard.base.errors import RegardError
from regard.base.texts.streams import utf8_stream
from regard.base.texts.text_files import decoded, looks_like_path
from regard.cli.options import AnalyzeOptions
from regard.cli.outputs import check_drawing, check_folder, shown_steps
from regard.cli.report import (
    FEW_HEADS,
    NUM_DIFFERENT,
    as_data,
    check_words,
    letter_of,
    locate,
    most_important,
    print_differences,
    print_ending,
    print_findings,
    print_probe,
    print_reading,
    print_roles,
    print_statements,
    print_summary,
    print_word,
    roles_data,
    with_importance,
)
from regard.hf.text_reader import TextReader, TextResult, no_reductions
from regard.stats.roles import RoleTable
from regard.stats.text_reading import TextReading, text_differences
from regard.viewer import Sheet, Story, page_reductions, save_run, write_page
from regard.viewer.findings import lead_of, telling_heads
from regard.viewer.story import story_of

#: Printed by default if the text has it: what this word refers to depends on the sentence.
PRONOUN = "it"
#: A text of more characters (about 4,000 tokens) takes long: its steps are printed also where there is no terminal.
LONG = 20_000


def run(options: AnalyzeOptions) -> None:
    """Read the texts, print the results, and write the page of --save and the figures of --figures."""
    check_outputs(options)
    texts, errors = read_texts(options.texts), Console(stderr=True)
    numbers = options.numbers
    with shown_steps(errors, f"Reading with {options.model}", _is_long(texts)) as show:
        reader = replace(TextReader.load(options.model), verify_all=options.verify_all)
        _check_story(options, reader, texts)
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
    """Whether a text is so long that its steps are printed where there is no terminal, too."""
    return any(len(text) > LONG for text in texts)


def check_outputs(options: AnalyzeOptions) -> None:
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


def _check_story(options: AnalyzeOptions, reader: TextReader, texts: Sequence[str]) -> None:
    """Refuse a link of --story to what the model and the texts do not have, before the model runs."""
    config = getattr(reader.model, "config", None)
    layers, heads = (getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
    if options.story is None or layers is None or heads is None:
        return
    tokens = [reader.tokenize(text, options.length)["input_ids"].shape[-1] for text in texts]
    num_layers = layers if options.numbers is None else len(options.numbers)
    Story.read(options.story).check_sizes([[(heads, count, count)] * num_layers for count in tokens])


def _check_words(results: Sequence[TextResult], words: Sequence[str]) -> None:
    """Refuse a word of --word that the only text does not have, or none of several texts."""
    if len(results) > 1:
        check_words([result.reading for result in results], words)
    for word in words if len(results) == 1 else ():
        locate(results[0].reading, word)


def _words(result: TextResult, options: AnalyzeOptions) -> list[str]:
    """The words of --word that this text has, or the default words."""
    return [word for word in options.words if result.reading.find(word) is not None] or default_words(result.reading)


def _print(console: Console, results: Sequence[TextResult], options: AnalyzeOptions, probe: RoleTable | None) -> None:
    """Print the results: the differences of several texts, or every head (--table) or a summary of one."""
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
    """Print all roles on the random tokens of --probe, for --table."""
    console.print()
    print_roles(console, probe, "random tokens, each of them twice")


def _print_several(console: Console, results: Sequence[TextResult], options: AnalyzeOptions) -> None:
    """Print the titles of several texts, the heads that differ most, and each text below its letter."""
    for number, result in enumerate(results):
        size = f"  {len(result.reading.profile.tokens)} tokens"
        console.print(Text.assemble((letter_of(number), "bold"), f"  {result.reading.title}", (size, "dim")))
    console.print()
    print_differences(console, [result.reading for result in results], NUM_DIFFERENT if options.table else FEW_HEADS)
    for number, result in enumerate(results):
        console.print()
        console.print(Text(f"{letter_of(number)}  {result.reading.title}", style="bold"))
        if options.table:
            _print_all(console, result.reading, _words(result, options))
        else:
            print_statements(console, result.reading, _words(result, options))


def _print_all(console: Console, reading: TextReading, words: Sequence[str]) -> None:
    """Print words, roles and warnings of one text among several, without the table of heads."""
    for word in words:
        print_word(console, reading, word)
    print_roles(console, reading.roles)
    print_findings(console, reading.findings)


def _as_data(results: Sequence[TextResult], options: AnalyzeOptions, probe: RoleTable | None) -> dict[str, Any]:
    """The results as plain data for --json: those of one text, or of several with their differences."""
    texts = [as_data(result, _words(result, options)) for result in results]
    data = texts[0]
    if len(results) > 1:
        data = {
            "texts": texts,
            "differences": [vars(head) for head in text_differences([result.reading for result in results])],
        }
    return data if probe is None else data | {"probe": roles_data(probe)}


def save_page(
    options: AnalyzeOptions, sheets_of: Callable[[], list[Sheet]], errors: Console, lines: bool = False
) -> None:
    """Write the page and the maps of --save, if it is given, and print where they are.

    `sheets_of` makes the sheets; it is called only then, because their statistics take time. `errors` is the console of
    messages. With `lines`, here and below, each step is a line where there is no terminal (`shown_steps`).
    """
    if options.save is None:
        return
    with shown_steps(errors, f"Saving to {options.save}", lines) as show:
        sheets = sheets_of()
        story = story_of(options.story, sheets)
        page = write_page(options.save / "index.html", sheets, story)
        save_run(options.save, sheets, show, story)
    errors.print(f"The page is at {page}; regard view {options.save} serves it.", markup=False, highlight=False)


def _write(results: Sequence[TextResult], options: AnalyzeOptions, errors: Console, lines: bool) -> None:
    """Write the page of --save and the figures of --figures; those of several texts are in folders A, B, ..."""
    save_page(options, lambda: [Sheet.of(result.reading, charts=result.charts) for result in results], errors, lines)
    if options.figures is not None:
        from regard.drawing.figures import save_figures

        for number, result in enumerate(results):
            folder = options.figures if len(results) == 1 else options.figures / letter_of(number)
            with shown_steps(errors, f"Drawing pictures for {folder}", lines) as show:
                told = partial(_tell_saved, show)
                reading = result.reading
                link, heads = lead_of(reading), telling_heads(reading)
                saved = save_figures(folder, reading, link, heads, told, every_head=options.all_figures)
            errors.print(f"{len(saved)} pictures are in {folder}", markup=False, highlight=False)


def _tell_saved(show: Callable[[str], None], done: int, total: int) -> None:
    """Show how many of the figures are saved."""
    show(f"Saving pictures: {done} of {total}")


def default_words(reading: TextReading) -> list[str]:
    """`PRONOUN`, if the text has it."""
    return [PRONOUN] if reading.find(PRONOUN) is not None else []


#: Ends the errors about a source.
REMEDY = "Give a text, a UTF-8 file, or - for standard input."


def read_texts(sources: Sequence[str]) -> list[str]:
    """The texts in their order; empty ones are refused."""
    if sources.count("-") > 1:
        raise RegardError("analyze: standard input can be read once. Give - once, and the other texts as files.")
    texts = [_read_text(source) for source in sources]
    if not all(text.strip() for text in texts):
        raise RegardError("analyze: the text is empty. Give at least one word, a file, or - for standard input.")
    return texts


def _read_text(source: str) -> str:
    """The text of a source: of standard input (-), of a file, or the source itself if it does not look like a path."""
    if source == "-":
        return _text(sys.stdin.buffer, "standard input")
    if os.path.isfile(source):
        with open(source, "rb") as file:
            return _text(file, source)
    if os.path.isdir(source):
        raise RegardError(f"analyze: {source} is a folder. {REMEDY}")
    if looks_like_path(source):
        raise RegardError(f"analyze: there is no file {source}. {REMEDY}")
    return source


def _text(stream: BinaryIO, name: str) -> str:
    """The text of a stream, which is read as a corpus is: also compressed, or in UTF-16 with a byte order mark."""
    lines = enumerate(utf8_stream(stream, name, "analyze"), 1)
    return "".join(decoded(line, number, name, "analyze") for number, line in lines)
