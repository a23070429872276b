"""`regard check`: checks an attention function of a user's file, and exits with 1 if it has a mistake."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import typer

from regard.diagnosis import check
from regard.diagnosis.failures import place_of
from regard.errors import RegardError, nearest


def run(target: str, mask: str | None, scale: float | None, as_json: bool) -> None:
    """Print the report of `target`, "file.py:name", as text or JSON."""
    report = check(load(target), mask=mask, scale=scale)
    typer.echo(json.dumps(report.as_dict(), indent=1) if as_json else str(report))
    if not report.ok:
        raise typer.Exit(1)


def load(target: str) -> Any:
    """The object of a name in a Python file, or in one of its classes. The file is imported, so its code runs."""
    file, colon, name = target.rpartition(":")
    if not colon or not name or not file.endswith(".py"):
        raise RegardError(f"check: {target!r} is not FILE.py:NAME. For example: regard check attention.py:attention.")
    path = Path(file)
    if not path.is_file():
        raise RegardError(f"check: there is no file {file}. Give the path of a Python file, then a colon and a name.")
    value: Any = _imported(path)
    for part in name.split("."):
        if not hasattr(value, part):
            known = [n for n, v in vars(value).items() if callable(v) and not n.startswith("_")]
            raise RegardError(f"check: {file} has no {part!r}. {nearest(part, known)}")
        value = getattr(value, part)
    return value


def _imported(path: Path) -> Any:
    """The module of a file; imports beside it work, as with `python file.py`."""
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        specification.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # of the user's file
        place = "" if isinstance(error, SyntaxError) else place_of(error)
        raise RegardError(f"check: {path} could not be imported: {type(error).__name__}: {error}{place}") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module
