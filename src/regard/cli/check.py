"""`regard check`: checks an attention function of a user's file. Its exit status says what came of it."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from regard.base.errors import RegardError, nearest
from regard.diagnosis import check
from regard.diagnosis.failures import place_of
from regard.diagnosis.progress import USUAL_CALLS, counted_findings
from regard.diagnosis.report import CheckFinding

#: Exit status of a report by its `ok`; 2 is that of an error, such as a function that cannot be called.
STATUS = {True: 0, False: 1, None: 3}


def run(
    target: str,
    like: str | None,
    matrices: list[str],
    mask: str | None,
    scale: float | None,
    limit: float,
    as_json: bool,
) -> None:
    """Print the report of `target`, "file.py:name", as text or JSON. Ctrl-C prints what was found so far.

    `matrices` are texts such as "query=W_q.weight".
    """
    subject = load(target)
    with _shown_progress() as seen:
        try:
            report = check(
                subject,
                like=like,
                matrices=dict(map(_role_and_name, matrices)),
                mask=mask,
                scale=scale,
                limit=limit,
                progress=seen.update,
            )
        except KeyboardInterrupt:
            typer.echo(seen.summary(), err=True)
            raise
    typer.echo(json.dumps(report.as_dict(), indent=1) if as_json else str(report))
    if not report.ok:
        raise typer.Exit(STATUS[report.ok])


def _role_and_name(text: str) -> tuple[str, str]:
    """The role and the name of a parameter in "query=W_q.weight"."""
    role, equals, name = text.partition("=")
    if not (role and equals and name):
        raise RegardError(f"check: --matrix {text!r} is not ROLE=NAME. For example: --matrix query=W_q.weight.")
    return role, name


@dataclass
class _Seen:
    """What a check reported last: its name, the number of finished calls, and the findings so far.

    `show` writes the line of progress.
    """

    show: Callable[[str], object]
    check: str = "import"
    calls: int = 0
    findings: tuple[CheckFinding, ...] = ()
    started: float = field(default_factory=time.monotonic)

    def update(self, check: str, calls: int, findings: tuple[CheckFinding, ...]) -> None:
        """Keep a report, and show it."""
        self.check, self.calls, self.findings = check, calls, findings
        self.show(f"check: {check}, call {calls + 1} of about {max(USUAL_CALLS, calls + 1)}")

    def summary(self) -> str:
        """What was found until the check was stopped, in words."""
        seconds = time.monotonic() - self.started
        return (
            f"Stopped after {seconds:.0f} s and {self.calls} calls, at the check {self.check!r}. Found so far: "
            f"{counted_findings(self.findings)}."
        )


@contextmanager
def _shown_progress() -> Iterator[_Seen]:
    """A line on the terminal: the check that runs, and the time. Where there is no terminal, nothing is shown."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, disable=hidden) as line:
        task = line.add_task("check")
        yield _Seen(lambda text: line.update(task, description=text))


def load(target: str) -> Any:
    """The object that `target`, "file.py:name", names, also "file.py:Class.method".

    The file is imported, so its code runs.
    """
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
