"""`regard exercises`: writes notebooks of exercises. Each is made from one text in the folder exercises.

A text has a task, three blocks of code (start, check, solution), and lines that begin with "Hint:".
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

import typer

from regard.base.errors import RegardError, nearest
from regard.base.whole_files import write_whole
from regard.cli.outputs import check_folder

#: The texts of the exercises, one file each.
FOLDER = Path(__file__).parent / "exercises"
_BLOCK = re.compile(r"```python (start|check|solution)\n(.*?)\n```", re.DOTALL)
_HOW = "This notebook needs `pip install regard`. Write the body of the function, and run both cells."
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


@dataclass(frozen=True)
class Exercise:
    """The parts of one exercise: `start` is the empty function, `check` the cell that checks it."""

    name: str
    task: str
    start: str
    check: str
    hints: tuple[str, ...]
    solution: str

    @classmethod
    def read(cls, name: str) -> Exercise:
        """The exercise of the file NAME.md."""
        text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
        code = dict(_BLOCK.findall(text))
        hints = re.findall(r"^Hint: (.*)$", text, re.MULTILINE)
        return cls(name, text.partition("```")[0].strip(), code["start"], code["check"], tuple(hints), code["solution"])

    def notebook(self) -> str:
        """The notebook as JSON, without outputs."""
        hints = [_folded(f"Hint {number}", escape(hint)) for number, hint in enumerate(self.hints, 1)]
        solution = _folded("Solution", f"\n```python\n{self.solution}\n```\n")
        cells = [
            (
                "markdown",
                f"{self.task}\n\n{_HOW}",
            ),
            ("code", self.start),
            ("code", self.check),
            ("markdown", "\n\n".join([*hints, solution])),
        ]
        content = {
            "cells": [_cell(f"cell-{number}", kind, text) for number, (kind, text) in enumerate(cells)],
            "metadata": _METADATA,
            "nbformat": 4,
            "nbformat_minor": 5,
        }
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def names() -> list[str]:
    """The names of all exercises."""
    return sorted(path.stem for path in FOLDER.glob("*.md"))


def write(folder: Path, chosen: list[str], overwrite: bool) -> list[Path]:
    """Write the notebooks of the exercises `chosen`, or of all, and return their files.

    Nothing is written if a file exists, unless `overwrite`.
    """
    for name in chosen:
        if name not in names():
            raise RegardError(f"exercises: there is no exercise {name!r}. {nearest(name, names())}")
    check_folder("exercises", "FOLDER", folder)
    files = {folder / f"{name}.ipynb": name for name in chosen or names()}
    existing = [file.name for file in files if file.exists()]
    if existing and not overwrite:
        raise RegardError(
            f"exercises: {folder} already has {', '.join(existing)}. Nothing was written, because these files may "
            "hold solutions. Give another folder, or --overwrite to lose them."
        )
    for file, name in files.items():
        write_whole(file, Exercise.read(name).notebook())
    return list(files)


def run(folder: Path, chosen: list[str], overwrite: bool) -> None:
    """Write the notebooks and print their files."""
    for file in write(folder, chosen, overwrite):
        typer.echo(file)


def _folded(title: str, text: str) -> str:
    """A part of a cell that a click opens; `text` is HTML or Markdown."""
    return f"<details><summary>{title}</summary>\n{text}\n</details>"


def _cell(name: str, kind: str, text: str) -> dict[str, object]:
    """A cell of a notebook as JSON. Cells have ids, which the format 4.5 asks for."""
    ran = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "id": name, "metadata": {}, **ran, "source": text.splitlines(keepends=True)}
