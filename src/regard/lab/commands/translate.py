"""`regard translate`: translate lines of text as they arrive."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from regard.base.errors import RegardError, first_few, nearest
from regard.base.texts.streams import utf8_stream
from regard.base.texts.text_files import decoded, looks_like_path
from regard.cli.catalog import SHADES
from regard.cli.options import TranslateOptions
from regard.lab.decoding.alignment import READINGS, Alignment, write_pharaoh
from regard.lab.decoding.translation import Translation, TranslationOptions

if TYPE_CHECKING:
    from regard.lab.runs.run import Run

ALIGNMENTS = ("pharaoh", "show")
#: Most bytes of one read; a pipe or a terminal may give fewer.
CHUNK = 1 << 16


def translation_options(settings: TranslateOptions, run: Run) -> TranslationOptions:
    """The options of `Run.translate`; None takes the value of the run."""
    search = run.search(beam=settings.beam, n_best=settings.n_best, length_penalty=settings.length_penalty)
    reading = None if settings.align is None else settings.reading
    return TranslationOptions(search, batch=settings.batch, reading=reading, replace_unknown=settings.replace_unknown)


def run(settings: TranslateOptions) -> None:
    """Translate and print; every translation is printed before the next line is read."""
    if settings.align is not None and settings.align not in ALIGNMENTS:
        raise RegardError(f"translate: --align {settings.align} is not known. {nearest(settings.align, ALIGNMENTS)}")
    folder, text = _arguments(settings)
    with Console(stderr=True).status("Loading the model"):
        trained = load(folder, settings.model)
    options, printer, number = translation_options(settings, trained), _Printer(settings), 0
    for lines in read_lines(text):
        for each in trained.translate(lines, options):
            printer.print(number, each)
            number += 1
    printer.report(number)


def load(folder: str | None, name: str | None) -> Run:
    """The run of a folder, or a model that comes with the package."""
    from regard.lab import load_pretrained, load_run

    return load_run(folder or "") if name is None else load_pretrained(name)


def _arguments(settings: TranslateOptions) -> tuple[str | None, str]:
    """RUN and TEXT of the command. RUN is None with --model; TEXT is "-", standard input, if it is not given."""
    given = list(settings.arguments)
    folder = given.pop(0) if settings.model is None and given else None
    if (settings.model is None and folder is None) or len(given) > 1:
        raise RegardError(
            f"translate: give a run and one text, or --model NAME and one text; got {len(settings.arguments)} "
            "arguments. "
            "Put a text of several words in quotes."
        )
    return folder, given[0] if given else "-"


def read_lines(source: str) -> Iterator[list[str]]:
    """The lines of a text, of a file, or of standard input ("-"), in lists of the lines that have arrived."""
    if source == "-":
        if sys.stdin.isatty():
            Console(stderr=True).print("Reading from the keyboard; end with Ctrl-D.", style="dim")
        yield from _decoded(sys.stdin.buffer, "standard input")
    elif os.path.isfile(source):
        try:
            with open(source, "rb") as file:
                yield from _decoded(file, source)
        except OSError as error:
            raise RegardError(f"translate: {source} cannot be read: {error.strerror or error}.") from None
    elif os.path.isdir(source):
        raise RegardError(f"translate: {source} is a folder. Give a text, a UTF-8 file, or - for standard input.")
    elif looks_like_path(source):
        raise RegardError(
            f"translate: there is no file {source}. Give a text, a UTF-8 file, or - for standard input; if this is "
            "the text, pipe it: echo TEXT | regard translate RUN"
        )
    else:
        yield source.splitlines() or [""]


def _decoded(stream: IO[bytes], name: str) -> Iterator[list[str]]:
    """Complete lines as soon as they arrive: `read1` waits only for the first bytes.

    `rest` is the beginning of a line whose end has not arrived. `number` counts the lines before it, for errors.
    """
    rest, number = b"", 0
    stream = utf8_stream(stream, name, "translate")
    while data := stream.read1(CHUNK):
        *lines, rest = (rest + data).split(b"\n")
        yield from _texts(lines, number, name)
        number += len(lines)
    yield from _texts([rest] if rest else [], number, name)


def _texts(lines: Sequence[bytes], number: int, name: str) -> Iterator[list[str]]:
    """The lines as one list of texts; nothing without lines. `number` is the number of lines before them.

    If a line cannot be read, the lines before it are yielded first, then the error is raised.
    """
    texts: list[str] = []
    try:
        for place, line in enumerate(lines, number + 1):
            texts.append(decoded(line, place, name, "translate").removesuffix("\r"))
    except RegardError:
        if texts:
            yield texts
        raise
    if texts:
        yield texts


@dataclass(frozen=True)
class _Printer:
    """Prints translations, and collects what `report` says at the end.

    `skipped` counts the lines that were not translated, by reason. `cut` has the numbers of the lines whose best
    translation has no end. `unknown` has a note for each line with unknown pieces.
    """

    settings: TranslateOptions
    skipped: Counter[str] = field(default_factory=Counter)
    cut: list[int] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def print(self, number: int, done: Translation) -> None:
        """Print one line for input line `number`, counted from 0; more with --n-best and --align show."""
        if done.hypotheses and not done.hypotheses[0].ended:
            self.cut.append(number + 1)
        if done.num_unknown:
            self.unknown.append(f"line {number + 1}: {done.num_unknown} of {done.num_pieces} pieces")
        if done.skipped:
            self.skipped["empty" if done.skipped == "empty" else f"line {number + 1}: {done.skipped}"] += 1
        try:
            for text in self._lines(number, done):
                sys.stdout.write(text + "\n")
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has closed the pipe
            raise
        except OSError as error:
            raise RegardError(
                f"translate: the translation of line {number + 1} cannot be written: {error.strerror or error}. Free "
                f"space, then translate from this line on: tail -n +{number + 1} FILE"
            ) from None
        if self.settings.align == "show" and done.alignment is not None:
            Console().print(picture(done.alignment))

    def _lines(self, number: int, done: Translation) -> Iterator[str]:
        """The lines to print for one input line: its best translation, or with --n-best all of them."""
        if (self.settings.n_best or 1) > 1:
            yield from (" ||| ".join(fields) for fields in self._ranked(number, done))
        else:
            yield " ||| ".join(self._linked(done, 0))

    def _ranked(self, number: int, done: Translation) -> Iterator[list[str]]:
        """The fields of the Moses format: number, text, score, links with --align, and "cut" for a text without an end.

        A line that was not translated has its number, no text, and the score nan.
        """
        for n, hypothesis in enumerate(done.hypotheses):
            text, *links = self._linked(done, n)
            yield [str(number), text, f"{hypothesis.score:.4f}", *links, *([] if hypothesis.ended else ["cut"])]
        if not done.hypotheses:
            text, *links = self._linked(done, 0)
            yield [str(number), text, "nan", *links]

    def _linked(self, done: Translation, n: int) -> list[str]:
        """Text `n`, and with --align pharaoh its links. Links count words, so words are then separated by spaces."""
        text = done.texts[n] if done.texts else ""
        if self.settings.align != "pharaoh":
            return [text]
        if not done.alignments:
            return [text, ""]
        alignment = done.alignments[n]
        return [" ".join(alignment.target), write_pharaoh(alignment.links())]

    def report(self, number: int) -> None:
        """Print to stderr which of the `number` lines were not translated, and why.

        Also which have pieces that the model does not know, and which translations reached their maximum length.
        """
        errors, long = Console(stderr=True, soft_wrap=True), [reason for reason in self.skipped if reason != "empty"]
        if long:
            named = first_few(long, separator="; ")
            errors.print(f"{len(long)} of {number} lines were too long and are left empty: {named}", style="yellow")
        if self.unknown:
            errors.print(
                f"The model knows no word or character for pieces of {len(self.unknown)} of {number} lines, and reads "
                f"them as unknown: {first_few(self.unknown, separator='; ')}.",
                style="yellow",
            )
        if self.cut:
            lines = first_few(self.cut)
            errors.print(f"{len(self.cut)} of {number} translations reached their maximum length: line {lines}.")
        if self.skipped["empty"] and number > 1:
            errors.print(f"{self.skipped['empty']} of {number} lines were empty.", style="dim")


def picture(alignment: Alignment) -> Text:
    """The alignment as text: target words down, source words across; darker means more weight.

    The shade is that of the square root of the weight, so that small weights are seen. Each row ends with its strongest
    source word.
    """
    if not alignment.weights.numel():
        return Text("no words")
    width, drawn = max(map(cell_len, alignment.target)), Text(no_wrap=True)
    for word, row in zip(alignment.target, alignment.weights.tolist(), strict=True):
        most = max(range(len(row)), key=row.__getitem__)
        cells = "".join(SHADES[min(4, round(4 * max(weight, 0.0) ** 0.5))] * 2 for weight in row)
        drawn.append(f"  {' ' * (width - cell_len(word))}{word} ")
        drawn.append(f"│{cells}│ ", "blue")
        drawn.append(f"{alignment.source[most]} {row[most]:.2f}\n", "dim")
    drawn.append(f"  across: {' '.join(alignment.source)}; down: {READINGS[alignment.reading]}\n", "dim")
    return drawn
