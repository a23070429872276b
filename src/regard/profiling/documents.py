"""The documents of a corpus: a file of one a line, a .jsonl or .parquet file, or a folder that `datasets` saved."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from regard.data.files import JSON_LINES, decoded, fields_of, json_records, raw_lines, saved_dataset
from regard.data.streams import inner_suffix
from regard.errors import RegardError

#: What mistakes are said to have been made in.
OPERATION = "see"


@dataclass(frozen=True)
class Documents:
    """A corpus that was read through once: how many documents it has, a hash of them, and a way to read them again."""

    count: int
    hash: str
    read: Callable[[], Iterator[str]]

    def start_at(self, number: int) -> Iterator[str]:
        """The documents from one on."""
        for index, document in enumerate(self.read()):
            if index >= number:
                yield document


def open_corpus(source: str, field: str = "text") -> Documents:
    """Find out what a corpus is, and read it once, so that what is wrong with it is said before the work begins."""
    path = Path(source)
    if path.is_dir():
        documents = _datasets(path, field)
    elif not path.is_file():
        raise RegardError(
            f"see: there is no file {source}. A corpus is a UTF-8 text file of one document a line, a .jsonl or "
            ".parquet file, or a folder written by save_to_disk."
        )
    elif inner_suffix(path) in JSON_LINES:
        documents = partial(_json_lines, path, field)
    elif path.suffix.lower() == ".parquet":
        documents = _parquet(path, field)
    else:
        documents = partial(_plain_lines, path)
    count, digest = 0, hashlib.sha256()
    for document in documents():
        count += 1
        is_text = not isinstance(document, Unreadable)
        content = document.encode("utf-8", "surrogatepass") if is_text else document.content
        digest.update(len(content).to_bytes(8, "big") + content)
    return Documents(count, digest.hexdigest(), documents)


class Unreadable(str):
    """Stands for a document that cannot be read: the text is the reason, `content` its bytes.

    >>> Unreadable.of("line 2 is not UTF-8 text", bytes([0xE9])).content.hex()
    'e9'
    """

    content: bytes

    @staticmethod
    def of(reason: str, content: bytes) -> Unreadable:
        """From the reason and the bytes."""
        document = Unreadable(reason)
        document.content = content
        return document


def _plain_lines(path: Path) -> Iterator[str]:
    """Every line; a line that is not UTF-8 becomes `Unreadable`, and the corpus goes on."""
    for number, line in raw_lines(path, OPERATION):
        try:
            yield decoded(line, number, os.fspath(path), OPERATION).rstrip("\r\n")
        except RegardError as error:
            yield Unreadable.of(str(error).removeprefix(f"{OPERATION}: "), line)


def _json_lines(path: Path, field: str) -> Iterator[str]:
    for number, record in json_records(path, OPERATION):
        if record is None:
            continue
        found = record.get(field) if isinstance(record, dict) else None
        if not isinstance(found, str):
            raise RegardError(
                f"see: line {number} of {path} has no text in the field {field!r}. "
                f"Name the field with --field; its fields: {fields_of(record)}."
            )
        yield found


def _datasets(folder: Path, field: str) -> Callable[[], Iterator[str]]:
    data = saved_dataset(folder, OPERATION)
    if field not in data.column_names:
        raise RegardError(
            f"see: {folder} has no column {field!r}. Name it with --field; its columns: {', '.join(data.column_names)}."
        )
    return lambda: (record[field] or "" for record in data)


def _parquet(path: Path, field: str) -> Callable[[], Iterator[str]]:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError:
        raise RegardError(f"see: {path} is read with pyarrow. Install it: pip install 'regard[corpus]'.") from None
    try:
        columns = ParquetFile(path).schema_arrow
    except (ArrowInvalid, OSError) as error:
        raise RegardError(f"see: {path} is no whole Parquet file ({error}).") from None
    if field not in columns.names or str(columns.field(field).type) not in ("string", "large_string"):
        raise RegardError(
            f"see: {path} has no column {field!r} of strings. Name it with --field; its columns: "
            f"{', '.join(columns.names)}."
        )

    def read() -> Iterator[str]:
        for batch in ParquetFile(path).iter_batches(batch_size=256, columns=[field]):
            yield from (text or "" for text in batch.column(0).to_pylist())

    return read
