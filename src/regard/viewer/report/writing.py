"""Write the report of a comparison beside what it is about."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from regard.errors import RegardError
from regard.seq2seq.runs.files import write_whole
from regard.viewer.report.alignments import alignment_figures
from regard.viewer.report.blocks import Block, Figures, Folded
from regard.viewer.report.folder import read_study
from regard.viewer.report.html import to_html
from regard.viewer.report.markdown import FIGURES, to_markdown
from regard.viewer.report.numbers import numbers
from regard.viewer.report.sections import document
from regard.viewer.report.svg import Figure


def write_report(folder: str | os.PathLike[str]) -> Path:
    """Write report.md, report.html, report.json and figures/ for the folder of a comparison; gives the page.

    What has finished so far is shown, and what is missing is named, so it may be called at any time; the same
    folder always gives the same files.
    """
    path = Path(folder)
    study = read_study(path)
    report = numbers(study)
    whole = document(report, alignment_figures(study))
    wanted = {f"{figure.name}.svg": figure for figure in figures(whole.blocks)}
    try:
        for name, figure in wanted.items():
            write_whole(path / FIGURES / name, figure.alone)
        for old in set((path / FIGURES).glob("*.svg")) - {path / FIGURES / name for name in wanted}:
            old.unlink()
        write_whole(path / "report.md", to_markdown(whole))
        write_whole(path / "report.json", json.dumps(report, ensure_ascii=False, indent=1, allow_nan=False) + "\n")
        write_whole(path / "report.html", to_html(whole))
    except OSError as error:
        raise RegardError(f"write_report: {path} cannot be written: {error.strerror or error}.") from error
    return path / "report.html"


def figures(blocks: Iterable[Block]) -> list[Figure]:
    """All figures of some blocks, also of those that are folded."""
    found: list[Figure] = []
    for block in blocks:
        if isinstance(block, Figures):
            found += block.figures
        elif isinstance(block, Folded):
            found += figures(block.blocks)
    return found
