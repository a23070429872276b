"""`regard lecture`: writes one lecture as one file, and prints its name."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import typer

from regard.base.errors import errors_named
from regard.cli.outputs import check_file
from regard.viewer.lecture import write_lecture


def run(name: str, out: Path | None, open_: bool) -> None:
    """Write the lecture `name` to `out`, or to NAME.html in the current folder."""
    path = Path(f"{Path(name).name}.html") if out is None else out
    check_file("lecture", "--out", path, ".html")
    with errors_named("write_lecture", "lecture"):
        written = write_lecture(path, name)
    typer.echo(written)
    if open_:
        webbrowser.open(path.resolve().as_uri())
