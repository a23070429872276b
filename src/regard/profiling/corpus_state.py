"""How far a corpus is folded into one profile: what came of each document, and the state of a run that was stopped."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from regard.errors import RegardError
from regard.hf.text_reader import Reader
from regard.profiling.documents import Unreadable
from regard.stats import HeadTable

STATE = "corpus.json"
#: Documents after which the state is written.
EVERY = 20


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came of one document: its table; or the reason why it could not be read, which is "" for an empty one."""

    table: HeadTable | None = None
    cut: bool = False
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """For `json.dumps`; `from_json` gives back the same numbers, bit by bit."""
        table = None if self.table is None else self.table.to_json()
        return {"table": table, "cut": self.cut, "reason": self.reason}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Outcome:
        """What `to_json` wrote."""
        table = None if data["table"] is None else HeadTable.from_json(data["table"])
        return Outcome(table, data["cut"], data["reason"])


def measure(reader: Reader, document: str, layers: list[int] | None, length: int | None) -> Outcome:
    """One document of a corpus."""
    if isinstance(document, Unreadable):
        return Outcome(reason=str(document))
    if not document.strip():
        return Outcome()
    try:
        profile, cut = reader.profile(document, layers, length)
        return Outcome(HeadTable.of(profile), cut)
    except Exception as error:  # one document must not end a run over a million; all are listed at its end
        said = (str(error).strip().splitlines() or [""])[0][:200]
        return Outcome(reason=f"{type(error).__name__}: {said}")


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

    def after(self, outcome: Outcome) -> State:
        """The state after one more document."""
        done = self.done + 1
        if outcome.reason:
            return replace(self, done=done, broken=[*self.broken, (done, outcome.reason)])
        if outcome.table is None:
            return replace(self, done=done, empty=self.empty + 1)
        table = outcome.table if self.table is None else self.table.merge(outcome.table)
        return replace(self, done=done, cut=self.cut + outcome.cut, table=table)

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


def fold(
    outcomes: Iterable[Outcome], state: State, folder: Path | None, told: Callable[[int], None] = lambda _: None
) -> State:
    """Add the outcomes of the remaining documents to the state; if this is interrupted, the state is saved."""
    try:
        for outcome in outcomes:
            state = state.after(outcome)
            told(state.done)
            if state.done % EVERY == 0:
                state.save(folder)
    except BaseException:
        state.save(folder)
        raise
    return state
