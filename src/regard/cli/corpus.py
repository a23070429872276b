"""`regard see --corpus`: every document folded into one profile, in a run that can be taken up again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from regard.cli.see import Wish, check_outputs
from regard.cluster import check_engine
from regard.errors import RegardError
from regard.hf.text_reader import Reader
from regard.profiling.corpus_state import Key, Outcome, State, fold, measure, resume
from regard.profiling.documents import Documents, open_corpus
from regard.stats import CAVEAT, HeadTable
from regard.viewer import Sheet, page_folds, save_run

#: Heads named for a statistic in the summary.
NUM_HIGHEST = 5
#: What the numbers are.
LEGEND = (
    "Heads are layer.head. Entropy is in nats, reach in tokens, evenness a share of the largest entropy; the others "
    "are shares of the weight."
)
#: Statistics that are shown.
SHOWN = ("entropy", "evenness", "reach", "first", "special", "previous", "next", "punctuation", "same")


class Engine(Protocol):
    """Who measures the documents."""

    def outcomes(self, documents: Iterable[str], key: Key) -> Iterator[Outcome]:
        """What comes of each document, in their order."""
        ...


@dataclass(frozen=True)
class Alone:
    """This process."""

    reader: Reader

    def outcomes(self, documents: Iterable[str], key: Key) -> Iterator[Outcome]:
        """One after the other."""
        return (measure(self.reader, document, key.layers, key.length) for document in documents)


def run(wish: Wish, field: str, engine: str = "local", workers: int | None = None) -> None:
    """Fold the corpus, print the table, and say what was left out."""
    _check(wish, engine, workers)
    documents, errors = open_corpus(wish.texts[0], field), Console(stderr=True)
    with errors.status(f"Loading {wish.model}"):
        reader = Reader.load(wish.model)
        reader.check_length(wish.length)
        key = Key(documents.hash, wish.model, wish.length, wish.numbers, reader.fingerprint())
    state = resume(key, wish.save)
    if state.done:
        errors.print(f"Going on after {state.done} of {documents.count} documents.", markup=False)
    state = _with_bar(_engine(engine, reader, workers), documents, state, wish, errors)
    if state.table is None:
        reasons = f" The first: {state.broken[0][1]}" if state.broken else " All documents are empty."
        raise RegardError(f"see: no document of {wish.texts[0]} could be read.{reasons}")
    try:
        if wish.as_json:
            print(json.dumps(state.to_json() | {"caveat": CAVEAT}, ensure_ascii=False, indent=1), flush=True)
        else:
            _print(Console(), state, state.table, wish.table)
    finally:  # last, so that a full disk costs no numbers
        state.save(wish.save)
    _keep(wish, reader, documents, state, state.table)


def _check(wish: Wish, engine: str, workers: int | None) -> None:
    if len(wish.texts) != 1 or wish.texts[0] == "-":
        raise RegardError("see: --corpus takes one file or folder. Put the documents into one file, one a line.")
    options = {"word": wish.words, "figures": wish.figures, "probe": wish.probe, "verify-all": wish.verify_all}
    for name, given in options.items():
        if given:
            raise RegardError(f"see: --{name} is for single texts and says nothing of a corpus. Leave it out.")
    check_engine("see", engine)
    check_outputs(wish)
    if workers is not None and engine == "local":
        raise RegardError("see: --workers are those of --engine ray. Leave it out, or name that engine.")


def _engine(name: str, reader: Reader, workers: int | None) -> Engine:
    if name == "local":
        return Alone(reader)
    from regard.profiling.workers import Pool

    return Pool(workers)


def _with_bar(engine: Engine, documents: Documents, state: State, wish: Wish, errors: Console) -> State:
    columns = (TextColumn("Reading"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    left = engine.outcomes(documents.start_at(state.done), state.key)
    with Progress(*columns, console=errors, transient=True) as progress, closing(left):  # type: ignore[type-var]
        task = progress.add_task("", total=documents.count, completed=state.done)
        return fold(left, state, wish.save, lambda done: progress.update(task, completed=done))


def _keep(wish: Wish, reader: Reader, documents: Documents, state: State, table: HeadTable) -> None:
    """For `regard view`: the statistics of the corpus, over the maps of its first document."""
    if wish.save is None:
        return
    broken = {number for number, _ in state.broken}
    first = next(d for n, d in enumerate(documents.read(), 1) if d.strip() and n not in broken)
    title = f"{table.documents} documents; maps of the first"
    longest = wish.length or reader.limit
    read = reader.read(first, wish.numbers, longest, title, also=page_folds)
    sheet = Sheet.of(read.reading)
    for layer, means in zip(sheet.about["layers"], table.layers, strict=True):
        for number, head in enumerate(layer["heads"]):
            head["values"] |= {
                name: _short(means.means[name][number]) for name in head["values"] if name in means.means
            }
    save_run(wish.save, [sheet])


def _short(value: Any) -> float:
    return float(f"{float(value):.4g}")


def _print(console: Console, state: State, table: HeadTable, whole: bool) -> None:
    facts = f"{table.documents} documents in one profile; {state.cut} cut to fit, {state.empty} empty, "
    console.print(Text(facts + f"{len(state.broken)} could not be read."))
    for number, reason in state.broken:
        console.print(Text(f"! document {number}: {reason}", style="yellow"))
    console.print()
    console.print(_heads(table) if whole else _highest(table))
    console.print(Text(LEGEND, style="dim"))
    console.print(Text(CAVEAT if whole else f"{CAVEAT} Every head: --table.", style="dim"))


def _highest(table: HeadTable) -> Table:
    """For each statistic the heads that have most of it."""
    shown = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column()
    for name in (name for name in SHOWN if name in table.layers[0].means):
        heads = [(float(v), f"{layer.number}.{h}") for layer in table.layers for h, v in enumerate(layer.means[name])]
        line = Text("highest in ", "dim")
        for value, head in sorted(heads, reverse=True)[:NUM_HIGHEST]:
            line.append(f"{head}=", "bold").append(f"{value:.2f}  ", "cyan")
        shown.add_row(name, line)
    return shown


def _heads(table: HeadTable) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    names = [name for name in SHOWN if name in table.layers[0].means]
    for title in ("L", "H", *names):
        shown.add_column(title, justify="right", style="bold" if title == "H" else "")
    for layer in table.layers:
        for head in range(len(layer.means[names[0]])):
            cells = (f"{float(layer.means[name][head]):.2f}" for name in names)
            shown.add_row(str(layer.number) if head == 0 else "", str(head), *cells)
    return shown
