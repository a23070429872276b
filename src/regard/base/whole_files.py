"""Writes files completely or not at all: after an interrupted or failed write, the old file is still there."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, SupportsFloat

from regard.base.errors import RegardError

__all__ = ["DRAFT", "append", "remove_drafts", "short_number", "whole_file", "write_json", "write_whole"]

#: Prefix of the names of files and folders that are being written.
DRAFT = ".regard-"


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a draft beside the file, then rename it. If the process is killed or the disk is full, the old file stays.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_whole(Path(folder) / "facts.json", "{}")
    ...     os.listdir(folder)
    ['facts.json']
    """
    data = content.encode() if isinstance(content, str) else content
    draft = None
    try:
        path = _target(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=DRAFT)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # a rename that reaches the disk before its data would leave a truncated file
        _rename(draft, path)
    except OSError as error:
        raise _not_written(path, len(data), error) from error
    finally:
        if draft is not None and os.path.exists(draft):
            os.remove(draft)


def write_json(path: Path, data: Any, *, allow_nan: bool = True) -> None:
    """Write data as indented JSON, completely or not at all."""
    write_whole(path, json.dumps(data, ensure_ascii=False, indent=1, allow_nan=allow_nan) + "\n")


def short_number(value: SupportsFloat) -> float:
    """A number with four digits, so that the JSON is short.

    >>> short_number(2 / 3)
    0.6667
    """
    return float(f"{float(value):.4g}")


@contextmanager
def whole_file(path: Path, operation: str) -> Iterator[Path]:
    """A draft that another library writes inside the with-block; then it is renamed to `path`.

    An OSError becomes a RegardError that names the `operation` and the file.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with whole_file(Path(folder) / "facts.json", "save") as draft:
    ...         length = draft.write_text("{}")
    ...     os.listdir(folder)
    ['facts.json']
    """
    try:
        path = _target(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=DRAFT) as folder:
            draft = Path(folder) / path.name
            yield draft
            _rename(draft, path)
    except OSError as error:
        raise RegardError(f"{operation}: {path} cannot be written: {error.strerror or error}.") from error


def _target(path: Path) -> Path:
    """The file that is replaced: behind a link, the one that it names.

    Devices and pipes are refused, and names that no file can have.
    """
    try:
        os.stat(path)
    except ValueError:
        raise RegardError(f"{str(path)!r} cannot be written: no file can have this name.") from None
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link that names itself, which `resolve` does not read
            raise
    path = path.resolve() if path.is_symlink() else path
    if path.exists() and not path.is_file() and not path.is_dir():
        raise RegardError(f"{path} cannot be written: it is a device or a pipe, and no file. Give the name of a file.")
    return path


def _rename(draft: Path | str, path: Path) -> None:
    """Give a finished draft the name of the file, and the mode of the file that it replaces.

    A new file can be read by all; mkstemp and safetensors make files that only their owner can read.
    """
    os.chmod(draft, path.stat().st_mode & 0o777 if path.exists() else 0o644)
    os.replace(draft, path)


def append(path: Path, text: str) -> None:
    """Append to a file, unbuffered. If the process is killed meanwhile, the last line lacks its line feed."""
    data = text.encode()
    try:
        with path.open("ab", buffering=0) as file:
            file.write(data)
    except OSError as error:
        raise _not_written(path, len(data), error) from error


def remove_drafts(folder: Path) -> None:
    """Remove the drafts of killed processes in a folder and in its subfolders: files of `write_whole`, and folders of
    `whole_file`.
    """
    for draft in (*folder.glob(f"{DRAFT}*"), *folder.glob(f"*/{DRAFT}*")):
        if draft.is_dir():
            shutil.rmtree(draft, ignore_errors=True)
        else:
            draft.unlink(missing_ok=True)


def _not_written(path: Path, size: int, error: OSError) -> RegardError:
    """The error for a file of `size` bytes: the reason, whether the old file stays, and what to do on a full disk."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = " Make room, and run it again (a training continues with --resume)." if full else ""
    is_old = error.errno != errno.ENAMETOOLONG and path.is_file()
    kept = f" The old content of {path.name} is kept." if is_old else ""
    return RegardError(f"{path} ({size:,} bytes) cannot be written: {error.strerror or error}.{kept}{remedy}")
