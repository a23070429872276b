"""Writes the report of a comparison into the folder of the comparison."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from regard.base.errors import RegardError
from regard.base.whole_files import write_whole
from regard.lab.report.alignments import alignment_figures
from regard.lab.report.elements import Block, Figures, Folded
from regard.lab.report.folder import read_study
from regard.lab.report.html import to_html
from regard.lab.report.markdown import FIGURES, to_markdown
from regard.lab.report.numbers import numbers
from regard.lab.report.sections import document
from regard.lab.report.svg import Figure


def write_report(folder: str | os.PathLike[str]) -> Path:
    """Write report.md, report.html, report.json and figures/ into the folder of a comparison; return the page's path.

    It can be called at any time: it shows the finished trials, and names the missing trials. The same folder always
    gives the same files.
    """
    path = Path(folder)
    study = read_study(path)
    report = numbers(study)
    whole = document(report, alignment_figures(study))
    named_figures = {f"{figure.name}.svg": figure for figure in figures(whole.blocks)}
    try:
        for name, figure in named_figures.items():
            write_whole(path / FIGURES / name, figure.alone)
        for old in set((path / FIGURES).glob("*.svg")) - {path / FIGURES / name for name in named_figures}:
            old.unlink()
        write_whole(path / "report.md", to_markdown(whole))
        write_whole(path / "report.json", json.dumps(report, ensure_ascii=False, indent=1, allow_nan=False) + "\n")
        write_whole(path / "report.html", to_html(whole))
    except OSError as error:
        raise RegardError(f"write_report: {path} cannot be written: {error.strerror or error}.") from error
    return path / "report.html"


def figures(blocks: Iterable[Block]) -> list[Figure]:
    """All figures of blocks, also inside folded blocks."""
    all_figures: list[Figure] = []
    for block in blocks:
        if isinstance(block, Figures):
            all_figures += block.figures
        elif isinstance(block, Folded):
            all_figures += figures(block.blocks)
    return all_figures
