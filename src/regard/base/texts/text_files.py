"""Reads text files line by line, JSON, JSON lines and folders of `datasets`. Errors give the line number."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from regard.base.errors import MissingPackage, RegardError
from regard.base.texts.streams import utf8_stream

__all__ = [
    "JSON_LINES",
    "decoded",
    "fields_of",
    "has_half_character",
    "json_records",
    "lines",
    "looks_like_path",
    "raw_lines",
    "read_json",
    "saved_dataset",
]

JSON_LINES = (".jsonl", ".ndjson")
#: Endings that make several words the name of a file.
TEXTS = (".txt", ".text", ".md", ".tsv", ".csv", ".json", *JSON_LINES)


def looks_like_path(text: str) -> bool:
    """Whether an argument looks like the path of a file, so that a mistyped path is not read as a text.

    >>> [looks_like_path(text) for text in ("test.fr", "texts/a", "my notes.txt", "Go on.", "Who? Me.", "3.14")]
    [True, True, True, False, False, False]
    """
    ending = os.path.splitext(text)[1]
    if any(character.isspace() for character in text):
        return ending.lower() in TEXTS
    return os.sep in text or (ending.isascii() and ending[1:].isalnum() and not ending[1:].isdecimal())


def lines(path: Path, operation: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers from 1. Only a line feed ends a line, not the other line breaks of Unicode.

    The file is UTF-8, or UTF-16 with a byte order mark, and may be compressed by gzip, bzip2, xz or zstd.
    """
    for number, line in raw_lines(path, operation):
        yield number, decoded(line, number, os.fspath(path), operation).rstrip("\r\n")


def raw_lines(path: Path, operation: str) -> Iterator[tuple[int, bytes]]:
    """Lines as bytes with their numbers from 1. They may hold invalid UTF-8."""
    try:
        with open(path, "rb") as file:
            yield from enumerate(utf8_stream(file, os.fspath(path), operation), 1)
    except OSError as error:
        raise RegardError(f"{operation}: {path} cannot be read: {error.strerror or error}.") from None


def decoded(line: bytes, number: int, name: str, operation: str) -> str:
    """The text of one line in UTF-8. The first line may begin with a byte order mark."""
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        place = error.start + len(line) - len(error.object)  # "utf-8-sig" counts bytes after the mark
        raise RegardError(
            f"{operation}: line {number} of {name} is not UTF-8 text (byte {place + 1} of the line is "
            f"0x{line[place]:02x}). Convert it to UTF-8; from Latin-1 with: iconv -f latin1 -t utf-8"
        ) from None


def json_records(path: Path, operation: str) -> Iterator[tuple[int, Any]]:
    """The values of a file with one JSON value per line, with their line numbers; None for an empty line."""
    for number, line in lines(path, operation):
        if not line.strip():
            yield number, None
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise RegardError(
                f"{operation}: line {number} of {path} is not JSON ({error}). Give one object per line."
            ) from None
        if record is None:
            raise RegardError(
                f"{operation}: line {number} of {path} is null, so it has no text. Give one object per line; an empty "
                "line has no record."
            )
        yield number, record


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file; the error for a missing or truncated file names it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RegardError(f"{path} is missing, so the folder of the run is incomplete.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RegardError(f"{path} cannot be read or is truncated ({error}). Copy it again.") from None
    if not isinstance(data, dict):
        raise RegardError(f"{path} is not a JSON object. Copy it again.")
    return data


def has_half_character(text: str) -> bool:
    """Whether a text has half a character: one surrogate without the other, as JSON may hold."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def fields_of(record: Any) -> str:
    """The names of the fields of a record, for a message."""
    return ", ".join(record) if isinstance(record, dict) else f"none, it is a {type(record).__name__}"


def saved_dataset(folder: Path, operation: str, remedy: str = "") -> Any:
    """The split that `datasets` saved in a folder. If there are several, the error suggests one, and the `remedy`."""
    try:
        from datasets import load_from_disk  # type: ignore[import-not-found]
    except ImportError:
        raise MissingPackage(f"{operation} of the folder {folder}", "datasets", "corpus") from None
    try:
        data: Any = load_from_disk(os.fspath(folder))
    except Exception as error:  # datasets and pyarrow raise errors of their own classes
        raise RegardError(f"{operation}: {folder} is not a folder that save_to_disk wrote. ({error})") from None
    if isinstance(data, dict):
        first = folder / next(iter(data), "")
        raise RegardError(f"{operation}: {folder} has the splits {', '.join(data)}. Give one, {first}{remedy}.")
    return data
