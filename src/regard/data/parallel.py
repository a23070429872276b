"""Sentence pairs that users bring: two aligned text files, TSV, JSON lines, or a folder that `datasets` saved."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from regard.data.corpus import Pair
from regard.errors import RegardError

__all__ = ["read_pairs", "suspicious_line"]

JSON_LINES = (".jsonl", ".ndjson")
#: Both sides of one line or record.
Sides = tuple[str, str]


def read_pairs(
    spec: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], fields: tuple[str, str] = ("source", "target")
) -> tuple[list[Pair], Counter[str]]:
    """The pairs of one or two files, and how many lines were left out, by reason.

    A pair is left out when a side is empty. The id of a pair is its line.
    """
    paths = [Path(part) for part in ([spec] if isinstance(spec, str | os.PathLike) else spec)]
    if len(paths) not in (1, 2):
        raise RegardError(f"load_corpus: {len(paths)} files are given. Give one, or two with a sentence a line.")
    for path in paths:
        if not path.exists():
            raise RegardError(f"load_corpus: there is no file {path}.")
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
    if len(paths) == 2:
        return _two_files(*paths)
    (path,) = paths
    if path.is_dir():
        return _datasets(path, fields)
    if path.suffix.lower() in JSON_LINES:
        return _json_lines(path, fields)
    return _tab_lines(path)


def _two_files(source: Path, target: Path) -> list[Sides]:
    texts = [[line for _, line in _lines(path)] for path in (source, target)]
    if len(texts[0]) == len(texts[1]):
        return list(zip(*texts, strict=True))
    line = suspicious_line(*texts)
    shown = " | ".join(text[line - 1][:60] if line <= len(text) else "(no line)" for text in texts)
    raise RegardError(
        f"load_corpus: {source} has {len(texts[0])} lines and {target} {len(texts[1])}; line n of one must translate "
        f"line n of the other. The first suspicious line is {line}: {shown} - from there on, the lengths fit better "
        "when the rest is shifted. Add or remove a line there."
    )


def suspicious_line(source: Sequence[str], target: Sequence[str]) -> int:
    """Where two files that should be aligned begin to drift, counted from 1.

    Lengths of translations are proportional: |log(source length / target length) - its usual value| is
    small for true pairs. The line k is found that minimises the sum of this over the lines before k as they are,
    and over those from k on when the longer file is shifted so that both ends meet.

    >>> suspicious_line(["a", "bbbbbbbb", "cccc", "dd"], ["A", "CCCC", "DD"])
    2
    """
    lengths = [np.log1p([len(line.strip()) for line in text]) for text in (source, target)]
    few = min(map(len, lengths))
    if not few:
        return 1
    center = np.median(lengths[0]) - np.median(lengths[1])
    ahead = np.abs(lengths[0][:few] - lengths[1][:few] - center)
    behind = np.abs(lengths[0][-few:] - lengths[1][-few:] - center)
    before = np.concatenate([[0.0], np.cumsum(ahead)])
    after = np.concatenate([np.cumsum(behind[::-1])[::-1], [0.0]])
    return int(np.argmin(before + after)) + 1


def _tab_lines(path: Path) -> Iterator[Sides]:
    for number, line in _lines(path):
        parts = line.split("\t")
        if len(parts) < 2 and line.strip():
            raise RegardError(
                f"load_corpus: line {number} of {path} has no tab. One file is read as source, tab, target (further "
                "columns are left); give two files for one sentence a line, or a .jsonl file."
            )
        yield (parts[0], parts[1]) if len(parts) > 1 else ("", "")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers; only line feeds end one, whatever else Unicode calls a line break."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    text = line.decode("utf-8").rstrip("\r\n")
                except UnicodeDecodeError as error:
                    raise RegardError(
                        f"load_corpus: line {number} of {path} is not UTF-8 text (byte {error.start + 1} of the "
                        f"line is 0x{line[error.start]:02x}). Convert it, for example with: iconv -f latin1 -t utf-8"
                    ) from None
                yield number, text.removeprefix("\ufeff") if number == 1 else text
    except OSError as error:
        raise RegardError(f"load_corpus: {path} cannot be read: {error.strerror or error}.") from None


def _json_lines(path: Path, fields: tuple[str, str]) -> Iterator[Sides]:
    for number, line in _lines(path):
        if not line.strip():
            yield "", ""
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise RegardError(
                f"load_corpus: line {number} of {path} is not JSON ({error}). Give one object a line."
            ) from None
        yield _both(record, fields, f"line {number} of {path}")


def _both(record: Any, fields: tuple[str, str], where: str) -> Sides:
    source, target = (_field(record, name, where) for name in fields)
    return source, target


def _field(record: Any, name: str, where: str) -> str:
    """The text of a field; "translation.en" looks into an object, as the sets of Hugging Face need."""
    found = record
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    if not isinstance(found, str):
        known = ", ".join(record) if isinstance(record, dict) else f"none, it is a {type(record).__name__}"
        raise RegardError(
            f"load_corpus: {where} has no text in the field {name!r}. Its fields: {known}. "
            'Name both with fields=("source", "target"); "translation.en" looks into an object.'
        )
    if any("\ud800" <= character <= "\udfff" for character in found):
        raise RegardError(
            f"load_corpus: {where} has half a character in the field {name!r} (a \\u escape of a surrogate without the "
            "other one). Write the character whole, or leave the record out."
        )
    return found


def _datasets(folder: Path, fields: tuple[str, str]) -> Iterator[Sides]:
    try:
        from datasets import load_from_disk  # type: ignore[import-not-found]
    except ImportError:
        raise RegardError(
            f"load_corpus: {folder} is a folder, and those are read with datasets, which is not installed. "
            "pip install datasets"
        ) from None
    try:
        data: Any = load_from_disk(os.fspath(folder))
    except Exception as error:  # datasets and pyarrow raise their own kinds
        raise RegardError(f"load_corpus: {folder} is no folder that save_to_disk wrote. ({error})") from None
    if isinstance(data, dict):
        raise RegardError(
            f"load_corpus: {folder} has the splits {', '.join(data)}. Give one, {folder / next(iter(data), '')}, or "
            "three, as train, valid and test."
        )
    for number, record in enumerate(data, 1):
        yield _both(record, fields, f"record {number} of {folder}")
