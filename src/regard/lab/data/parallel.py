"""Reads sentence pairs from the user's files: two aligned text files, TSV, JSON lines, or a folder of `datasets`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from regard.base.errors import RegardError
from regard.base.texts.streams import inner_suffix
from regard.base.texts.text_files import JSON_LINES, fields_of, has_half_character, json_records, lines, saved_dataset
from regard.lab.data.corpus import Pair
from regard.lab.data.drift import suspicious_line

__all__ = ["read_pairs"]

#: The operation that errors name.
OPERATION = "load_corpus"
#: The source and the target of one line or record.
Sides = tuple[str, str]


def read_pairs(
    spec: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], fields: tuple[str, str] = ("source", "target")
) -> tuple[list[Pair], Counter[str]]:
    """The pairs of one or two files, and the number of lines left out, by reason.

    A pair with an empty side is left out. The id of a pair is its line number.
    """
    paths = [Path(part) for part in ([spec] if isinstance(spec, str | os.PathLike) else spec)]
    if len(paths) not in (1, 2):
        raise RegardError(
            f"{OPERATION}: got {len(paths)} files. Give one file, or two files with one sentence per line."
        )
    for path in paths:
        if not path.exists():
            raise RegardError(f"{OPERATION}: there is no file {path}.")
    skipped: Counter[str] = Counter()
    pairs = []
    for number, (source, target) in enumerate(_sides(paths, fields), 1):
        source, target = source.strip(), target.strip()
        if source and target:
            pairs.append(Pair(source, target, str(number)))
        else:
            skipped["with an empty side"] += 1
    return pairs, skipped


def _sides(paths: list[Path], fields: tuple[str, str]) -> Iterable[Sides]:
    """The source and the target of each line or record, in order; the kind of file decides how they are read."""
    if len(paths) == 2:
        return _two_files(*paths)
    (path,) = paths
    if path.is_dir():
        data = saved_dataset(path, OPERATION, ", or three, as train, valid and test")
        return (_both(record, fields, f"record {number} of {path}") for number, record in enumerate(data, 1))
    if inner_suffix(path) in JSON_LINES:
        return _json_lines(path, fields)
    return _tab_lines(path)


def _two_files(source: Path, target: Path) -> list[Sides]:
    """The lines of two files as pairs. If their numbers differ, the error names the first suspicious line."""
    texts = [[line for _, line in lines(path, OPERATION)] for path in (source, target)]
    for path, text in zip((source, target), texts, strict=True):
        if not text:
            raise RegardError(f"{OPERATION}: {path} is empty. Give one sentence per line.")
    if len(texts[0]) == len(texts[1]):
        return list(zip(*texts, strict=True))
    line = suspicious_line(*texts)
    shown = " | ".join(text[line - 1][:60] if line <= len(text) else "(no line)" for text in texts)
    remedy = (
        "The shorter file ends before it. Add the missing lines, or remove them from the other file."
        if line > min(map(len, texts))
        else "After it, the lengths fit better if one file is shifted. Add or remove a line there."
    )
    raise RegardError(
        f"{OPERATION}: {source} has {len(texts[0])} lines and {target} {len(texts[1])}; line n of one must translate "
        f"line n of the other. The first suspicious line is {line}: {shown}. {remedy}"
    )


def _tab_lines(path: Path) -> Iterator[Sides]:
    """The first two columns of each line; two empty texts for an empty line, so that lines can be counted."""
    for number, line in lines(path, OPERATION):
        parts = line.split("\t")
        if len(parts) < 2 and line.strip():
            raise RegardError(
                f"{OPERATION}: line {number} of {path} has no tab. One file has lines of source, tab, target (further "
                "columns are ignored). Or give two files with one sentence per line, or a .jsonl file."
            )
        yield (parts[0], parts[1]) if len(parts) > 1 else ("", "")


def _json_lines(path: Path, fields: tuple[str, str]) -> Iterator[Sides]:
    """The two fields of each record; two empty texts for an empty line, so that lines can be counted."""
    for number, record in json_records(path, OPERATION):
        yield ("", "") if record is None else _both(record, fields, f"line {number} of {path}")


def _both(record: Any, fields: tuple[str, str], where: str) -> Sides:
    """The texts of two fields of a record; `where` names the record in errors."""
    source, target = (_field(record, name, where) for name in fields)
    return source, target


def _field(record: Any, name: str, where: str) -> str:
    """The text of a field. "translation.en" is the field "en" of the object "translation"."""
    value = record
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if not isinstance(value, str):
        raise RegardError(
            f"{OPERATION}: {where} has no text in the field {name!r}. Its fields: {fields_of(record)}. "
            "Name both fields, in a configuration as data.source_field and data.target_field. "
            '"translation.en" is the field "en" of the object "translation".'
        )
    if has_half_character(value):
        raise RegardError(
            f"{OPERATION}: {where} has half a character in the field {name!r} (a \\u escape of one surrogate "
            "without the other). Write the complete character, or remove the record."
        )
    return value
