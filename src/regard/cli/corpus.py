"""`regard see --corpus`: every document folded into one profile, in a run that can be taken up again."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from regard.cli.documents import Documents, open_corpus
from regard.cli.reading import Reader
from regard.cli.see import Wish
from regard.errors import RegardError
from regard.stats import CAVEAT, HeadTable

STATE = "corpus.json"
#: Documents after which the state is written.
EVERY = 20
#: Heads named for a statistic in the summary.
NUM_HIGHEST = 5
#: What the numbers are.
LEGEND = (
    "Heads are layer.head. Entropy is in nats, reach in tokens, evenness a share of the largest entropy; the others "
    "are shares of the weight."
)
#: Statistics that are shown.
SHOWN = ("entropy", "evenness", "reach", "first", "special", "previous", "next", "punctuation", "same")


@dataclass(frozen=True)
class Key:
    """What a state belongs to: numbers of another corpus, model or cut must not be mixed in.

    `weights` is the fingerprint of the model, which tells two models of one name apart.
    """

    corpus: str
    model: str
    length: int | None
    layers: list[int] | None
    weights: str = ""


@dataclass(frozen=True, eq=False)
class State:
    """How far a run is. It is replaced as a whole, so that no interrupt finds a document counted but not folded."""

    key: Key
    done: int = 0
    cut: int = 0
    empty: int = 0
    broken: list[tuple[int, str]] = field(default_factory=list)
    table: HeadTable | None = None

    def to_json(self) -> dict[str, Any]:
        """For `json.dumps`."""
        table = None if self.table is None else self.table.to_json()
        return {name: getattr(self, name) for name in ("done", "cut", "empty", "broken")} | {
            "key": asdict(self.key),
            "table": table,
        }

    def save(self, folder: Path | None) -> None:
        """To a file beside it, then renamed: whoever interrupts finds the old state or the new one."""
        if folder is None or self.table is None:
            return  # a run that could read nothing leaves nothing to go on from
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".regard-") as near:
                draft = Path(near) / STATE
                draft.write_text(json.dumps(self.to_json()), encoding="utf-8")
                os.replace(draft, folder / STATE)
        except OSError as error:
            raise RegardError(f"see: {folder / STATE} cannot be written: {error.strerror or error}.") from error


def resume(key: Key, folder: Path | None) -> State:
    """The state that an earlier run left in the folder, or a fresh one."""
    path = None if folder is None else folder / STATE
    if path is None or not path.exists():
        return State(key)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        theirs = Key(**data["key"])
        table = None if data["table"] is None else HeadTable.from_json(data["table"])
        broken = [(int(number), str(reason)) for number, reason in data["broken"]]
        state = State(theirs, int(data["done"]), int(data["cut"]), int(data["empty"]), broken, table)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RegardError(f"see: {path} is no state of a corpus run ({error}). Give --save another folder.") from None
    other = [name for name, mine in asdict(key).items() if asdict(theirs)[name] != mine]
    if other:
        raise RegardError(
            f"see: {path} is the state of another run, not of the same {' and '.join(other)}. Give --save another "
            "folder, or delete the file to begin anew."
        )
    return state


def run(wish: Wish, field: str) -> None:
    """Fold the corpus, print the table, and say what was left out."""
    _check(wish)
    documents, errors = open_corpus(wish.texts[0], field), Console(stderr=True)
    with errors.status(f"Loading {wish.model}"):
        reader = Reader.load(wish.model)
        weights = reader.fingerprint()
    state = resume(Key(documents.hash, wish.model, wish.length, wish.numbers, weights), wish.save)
    if state.done:
        errors.print(f"Going on after {state.done} of {documents.count} documents.", markup=False)
    state = _with_bar(reader, documents, state, wish.save, errors)
    if state.table is None:
        reasons = f" The first: {state.broken[0][1]}" if state.broken else " All documents are empty."
        raise RegardError(f"see: no document of {wish.texts[0]} could be read.{reasons}")
    if wish.as_json:
        print(json.dumps(state.to_json() | {"caveat": CAVEAT}, ensure_ascii=False, indent=1))
    else:
        _print(Console(), state, state.table, wish.table)


def _check(wish: Wish) -> None:
    if len(wish.texts) != 1 or wish.texts[0] == "-":
        raise RegardError("see: --corpus takes one file or folder. Put the documents into one file, one a line.")
    for name, given in (("word", wish.words), ("figures", wish.figures), ("probe", wish.probe)):
        if given:
            raise RegardError(f"see: --{name} is for single texts and says nothing of a corpus. Leave it out.")


def _with_bar(reader: Reader, documents: Documents, state: State, folder: Path | None, errors: Console) -> State:
    columns = (TextColumn("Reading"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True) as progress:
        task = progress.add_task("", total=documents.count, completed=state.done)
        return fold(reader, documents, state, folder, lambda done: progress.update(task, completed=done))


def fold(
    reader: Reader,
    documents: Documents,
    state: State,
    folder: Path | None,
    told: Callable[[int], None] = lambda _: None,
) -> State:
    """Take the documents that are left into the table; however this ends, what was done is saved."""
    reader.check_length(state.key.length)
    try:
        for document in documents.start_at(state.done):
            state = step(reader, document, state)
            told(state.done)
            if state.done % EVERY == 0:
                state.save(folder)
    finally:
        state.save(folder)
    return state


def step(reader: Reader, document: str, state: State) -> State:
    """The state after one more document."""
    done = state.done + 1
    if not document.strip():
        return replace(state, done=done, empty=state.empty + 1)
    try:
        profile, cut = reader.profile(document, state.key.layers, state.key.length)
        table = HeadTable.of(profile)
    except Exception as error:  # one document must not end a run over a million; all are listed at its end
        said = (str(error).strip().splitlines() or [""])[0][:200]
        return replace(state, done=done, broken=[*state.broken, (done, f"{type(error).__name__}: {said}")])
    table = table if state.table is None else state.table.merge(table)
    return replace(state, done=done, cut=state.cut + cut, table=table)


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
