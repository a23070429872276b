"""`CorpusProfile`: the statistics of all documents read so far in one table, saved so that a stopped run can resume."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from regard.base.errors import RegardError, first_line
from regard.base.whole_files import write_whole
from regard.hf.text_reader import TextReader
from regard.profiling.documents import Unreadable
from regard.profiling.examples import Examples, examples_of, examples_to_json, merged_examples, read_examples
from regard.stats.profile import HeadTable

#: The file of a profile inside its folder.
FILE = "corpus.json"


@dataclass(frozen=True, eq=False)
class DocumentResult:
    """The table of one document. Without a table, `reason` says why it could not be read; "" if it is empty.

    `cut` is whether the document was longer than the model or `length` allows, so that only its beginning was read.
    """

    table: HeadTable | None = None
    cut: bool = False
    reason: str = ""
    examples: Examples = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`; `from_json` restores the same numbers, bit by bit."""
        table = None if self.table is None else self.table.to_json()
        return {
            "table": table,
            "cut": self.cut,
            "reason": self.reason,
            "examples": examples_to_json(self.examples),
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> DocumentResult:
        """The result that `to_json` wrote."""
        table = None if data["table"] is None else HeadTable.from_json(data["table"])
        return DocumentResult(table, data["cut"], data["reason"], read_examples(data["examples"]))


def measure_document(reader: TextReader, document: str, layers: list[int] | None, length: int | None) -> DocumentResult:
    """Measure the first `length` tokens of one document (None: as many as the model takes).

    An error of the model becomes the reason of the result.
    """
    if isinstance(document, Unreadable):
        return DocumentResult(reason=str(document))
    if not document.strip():
        return DocumentResult()
    try:
        profile, cut = reader.profile(document, layers, length)
        return DocumentResult(HeadTable.of(profile), cut, examples=examples_of(profile))
    except Exception as error:  # one document must not end a run over a million; the profile lists all of them
        return DocumentResult(reason=f"{type(error).__name__}: {first_line(error)}")


@dataclass(frozen=True)
class CorpusKey:
    """What identifies a run: a saved profile continues only with the same corpus, model, length and layers.

    `corpus` is a hash of the documents. `weights` is the model's fingerprint: two models may have the same name.
    """

    corpus: str
    model: str
    length: int | None
    layers: list[int] | None
    weights: str = ""


@dataclass(frozen=True, eq=False)
class CorpusProfile:
    """The result of `profile_corpus`: `table` holds the statistics of all heads over all documents read so far.

    `done` documents were read. Of these `cut` were truncated, `empty` were empty, and `broken` lists the number
    (from 1) and the reason of each document that could not be read. `table` is None while no document could be read.
    `examples[layer][head]` are the strongest links of a head, from different documents, each with the words around it.
    `examples` is None if a version of Regard without examples began the run.

    >>> import regard as rg
    >>> reader = rg.TextReader.load("minilm")
    >>> result = rg.profile_corpus(reader, ["The cat sat.", ""], layers=[0])
    >>> result.done, result.empty, result.table.documents
    (2, 1, 1)
    """

    key: CorpusKey
    done: int = 0
    cut: int = 0
    empty: int = 0
    broken: list[tuple[int, str]] = field(default_factory=list)
    table: HeadTable | None = None
    examples: Examples | None = field(default_factory=list)

    def _repr_html_(self) -> str | None:
        return None if self.table is None else self.table._repr_html_()

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`."""
        table = None if self.table is None else self.table.to_json()
        counts = {name: getattr(self, name) for name in ("done", "cut", "empty", "broken")}
        examples = None if self.examples is None else examples_to_json(self.examples)
        return counts | {"key": asdict(self.key), "table": table, "examples": examples}

    def with_document(self, result: DocumentResult) -> CorpusProfile:
        """A new profile with one more document, so that no interrupt leaves a document counted but not merged."""
        done = self.done + 1
        if result.reason:
            return replace(self, done=done, broken=[*self.broken, (done, result.reason)])
        if result.table is None:
            return replace(self, done=done, empty=self.empty + 1)
        table = result.table if self.table is None else self.table.merge(result.table)
        examples = None if self.examples is None else merged_examples(self.examples, result.examples, done)
        return replace(self, done=done, cut=self.cut + result.cut, table=table, examples=examples)

    def save(self, folder: Path | None) -> None:
        """Write the profile to a file of the folder, completely or not at all.

        Nothing is written without a folder, or while the table is None.
        """
        if folder is None or self.table is None:
            return
        write_whole(folder / FILE, json.dumps(self.to_json()))

    @staticmethod
    def resume(key: CorpusKey, folder: Path | None) -> CorpusProfile:
        """The profile that an earlier run with the same key saved in the folder, or an empty one."""
        path = None if folder is None else folder / FILE
        if path is None or not path.exists():
            return CorpusProfile(key)
        saved = _loaded(path)
        differing = [name for name, value in asdict(key).items() if asdict(saved.key)[name] != value]
        if differing:
            raise RegardError(
                f"profile_corpus: {path} is the state of another run, not of the same {' and '.join(differing)}. Give "
                "another folder (--save), or delete the file to start again."
            )
        return saved


def _loaded(path: Path) -> CorpusProfile:
    """The profile that `save` wrote to this file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        table = None if data["table"] is None else HeadTable.from_json(data["table"])
        broken = [(int(number), str(reason)) for number, reason in data["broken"]]
        done, cut, empty = (int(data[name]) for name in ("done", "cut", "empty"))
        _check_counts(done, cut, empty, [number for number, _ in broken], table)
        examples = None if data.get("examples") is None else read_examples(data["examples"])  # an old run has none
        return CorpusProfile(CorpusKey(**data["key"]), done, cut, empty, broken, table, examples)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RegardError(
            f"profile_corpus: {path} is no state of a corpus run ({error}). Give another folder (--save)."
        ) from None


def _check_counts(done: int, cut: int, empty: int, broken: list[int], table: HeadTable | None) -> None:
    """Refuse counts that no run has: each document was measured, empty or broken, and only measured ones are cut."""
    measured = 0 if table is None else table.documents
    is_number = all(0 < number <= done for number in broken)
    if min(cut, empty, measured - cut) < 0 or done != measured + empty + len(broken) or not is_number:
        raise ValueError(f"of {done} documents {measured} were measured, {empty} empty and {len(broken)} broken")
