"""Writes a file completely or not at all: an interrupted or failed write leaves the old file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from regard.errors import RegardError

__all__ = ["DRAFT", "whole_file"]

#: Prefix of the names of folders and files that are being written.
DRAFT = ".regard-"


@contextmanager
def whole_file(path: Path, operation: str, remedy: str = "") -> Iterator[Path]:
    """A draft in a folder beside `path`, to be written inside the with-block; then it is renamed to `path`.

    An OSError becomes a RegardError that names the `operation`, the file and the `remedy`.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with whole_file(Path(folder) / "facts.json", "save") as draft:
    ...         length = draft.write_text("{}")
    ...     os.listdir(folder)
    ['facts.json']
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=DRAFT) as folder:
            draft = Path(folder) / path.name
            yield draft
            os.replace(draft, path)
    except OSError as error:
        raise RegardError(f"{operation}: {path} cannot be written: {error.strerror or error}.{remedy}") from error
