"""The documents of a corpus: a file of one a line, a .jsonl file, or a folder that `datasets` saved."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from regard.errors import RegardError

JSON_LINES = (".jsonl", ".ndjson")


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
            f"see: there is no file {source}. A corpus is a UTF-8 text file of one document a line, a .jsonl file, or "
            "a folder written by save_to_disk."
        )
    elif path.suffix.lower() in JSON_LINES:
        documents = partial(_json_lines, path, field)
    else:
        documents = partial(_plain_lines, path)
    count, digest = 0, hashlib.sha256()
    for document in documents():
        count += 1
        content = document.encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "big") + content)
    return Documents(count, digest.hexdigest(), documents)


def _plain_lines(path: Path) -> Iterator[str]:
    return (line for _, line in _lines(path))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers; only line feeds end one, whatever else Unicode calls a line break."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise RegardError(
                    f"see: line {number} of {path} is not UTF-8 text (byte {error.start} is "
                    f"0x{line[error.start]:02x}). Convert the file, for example with: iconv -f latin1 -t utf-8"
                ) from None


def _json_lines(path: Path, field: str) -> Iterator[str]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise RegardError(f"see: line {number} of {path} is not JSON ({error}). Give one object a line.") from None
        found = record.get(field) if isinstance(record, dict) else None
        if not isinstance(found, str):
            fields = ", ".join(record) if isinstance(record, dict) else f"none, it is a {type(record).__name__}"
            raise RegardError(
                f"see: line {number} of {path} has no text in the field {field!r}. "
                f"Name the field with --field; its fields: {fields}."
            )
        yield found


def _datasets(folder: Path, field: str) -> Callable[[], Iterator[str]]:
    try:
        from datasets import load_from_disk  # type: ignore[import-not-found]
    except ImportError:
        raise RegardError(
            f"see: {folder} is a folder, and those are read with datasets, which is not installed. "
            "pip install 'regard[corpus]'"
        ) from None
    try:
        data: Any = load_from_disk(os.fspath(folder))
    except Exception as error:  # datasets and pyarrow raise their own kinds
        raise RegardError(f"see: {folder} is no folder that save_to_disk wrote. ({error})") from None
    if isinstance(data, dict):
        raise RegardError(f"see: {folder} has the splits {', '.join(data)}. Give one: {folder / next(iter(data), '')}")
    if field not in data.column_names:
        raise RegardError(
            f"see: {folder} has no column {field!r}. Name it with --field; its columns: {', '.join(data.column_names)}."
        )
    return lambda: (record[field] or "" for record in data)
