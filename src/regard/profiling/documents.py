"""`open_corpus` opens the documents of a corpus: lines, .jsonl, .parquet, a folder of `datasets`, or texts."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from regard.base.errors import MissingPackage, RegardError
from regard.base.texts.streams import inner_suffix
from regard.base.texts.text_files import JSON_LINES, decoded, fields_of, json_records, raw_lines, saved_dataset

#: The operation that error messages name.
OPERATION = "profile_corpus"


@dataclass(frozen=True)
class Documents:
    """A corpus that was read once: its number of documents, a hash of them, and a function that reads them again."""

    count: int
    hash: str
    read: Callable[[], Iterator[str]]

    def start_at(self, number: int) -> Iterator[str]:
        """The documents from this number on, counted from 0."""
        return itertools.islice(self.read(), number, None)


def open_corpus(source: str | Path | Iterable[str], field: str = "text") -> Documents:
    """Open a corpus by its kind and read it once, so that its mistakes are known before the model runs."""
    documents = _reader_of(Path(source), field) if isinstance(source, str | Path) else _given(source)
    count, digest = 0, hashlib.sha256()
    for document in documents():
        count += 1
        is_text = not isinstance(document, Unreadable)
        content = document.encode("utf-8", "surrogatepass") if is_text else document.content
        digest.update(len(content).to_bytes(8, "big") + content)
    return Documents(count, digest.hexdigest(), documents)


def _given(texts: Iterable[str]) -> Callable[[], Iterator[str]]:
    """A function that reads the given texts, as often as it is called."""
    texts = list(texts)
    wrong = next((text for text in texts if not isinstance(text, str)), None)
    if wrong is not None:
        raise RegardError(f"{OPERATION}: documents are texts or the name of a file, got {type(wrong).__name__}.")
    return partial(iter, texts)


def _reader_of(path: Path, field: str) -> Callable[[], Iterator[str]]:
    """A function that reads the documents of a file or a folder, by its kind. `field` has the text of a record."""
    if path.is_dir():
        return _datasets(path, field)
    if not path.is_file():
        raise RegardError(
            f"{OPERATION}: there is no file {path}. A corpus is a UTF-8 text file of one document a line, a .jsonl or "
            ".parquet file, or a folder written by save_to_disk."
        )
    if inner_suffix(path) in JSON_LINES:
        return partial(_json_lines, path, field)
    if path.suffix.lower() == ".parquet":
        return _parquet(path, field)
    return partial(_plain_lines, path)


class Unreadable(str):
    """A document that cannot be read: the text is the reason, `content` are the bytes.

    >>> Unreadable.of("line 2 is not UTF-8 text", bytes([0xE9])).content.hex()
    'e9'
    """

    content: bytes

    @staticmethod
    def of(reason: str, content: bytes) -> Unreadable:
        """A document with this reason and these bytes."""
        document = Unreadable(reason)
        document.content = content
        return document


def _plain_lines(path: Path) -> Iterator[str]:
    """Each line is a document; a line that is not UTF-8 becomes `Unreadable`."""
    for number, line in raw_lines(path, OPERATION):
        try:
            yield decoded(line, number, os.fspath(path), OPERATION).rstrip("\r\n")
        except RegardError as error:
            yield Unreadable.of(str(error).removeprefix(f"{OPERATION}: "), line)


def _json_lines(path: Path, field: str) -> Iterator[str]:
    """The text in the field `field` of each record."""
    for number, record in json_records(path, OPERATION):
        if record is None:  # an empty line
            continue
        text = record.get(field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise RegardError(
                f"{OPERATION}: line {number} of {path} has no text in the field {field!r}. "
                f"Name the field with `field` (--field); its fields: {fields_of(record)}."
            )
        yield text


def _datasets(folder: Path, field: str) -> Callable[[], Iterator[str]]:
    """A function that reads the column `field` of a folder of `datasets`; a missing text is an empty document."""
    data = saved_dataset(folder, OPERATION)
    if field not in data.column_names:
        raise RegardError(
            f"{OPERATION}: {folder} has no column {field!r}. Name it with `field` (--field); its columns: "
            f"{', '.join(data.column_names)}."
        )
    return lambda: (record[field] or "" for record in data)


def _parquet(path: Path, field: str) -> Callable[[], Iterator[str]]:
    """A function that reads the column `field` of a Parquet file; a missing text is an empty document."""
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError:
        raise MissingPackage(f"{OPERATION} of {path}", "pyarrow", "corpus") from None
    try:
        columns = ParquetFile(path).schema_arrow
    except (ArrowInvalid, OSError) as error:
        raise RegardError(f"{OPERATION}: {path} is no whole Parquet file ({error}).") from None
    if field not in columns.names or str(columns.field(field).type) not in ("string", "large_string"):
        raise RegardError(
            f"{OPERATION}: {path} has no column {field!r} of strings. Name it with `field` (--field); its columns: "
            f"{', '.join(columns.names)}."
        )

    def read() -> Iterator[str]:
        for batch in ParquetFile(path).iter_batches(batch_size=256, columns=[field]):
            yield from (text or "" for text in batch.column(0).to_pylist())

    return read
