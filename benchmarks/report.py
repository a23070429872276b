"""The report of `python -m benchmarks`: a table in the terminal, a JSON file, a picture."""

from __future__ import annotations

import json
import platform
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.measure import Goal
from benchmarks.roofline import Machine
from benchmarks.runner import Line, Row
from regard.base.errors import RegardError
from regard.base.whole_files import write_whole
from regard.version import __version__

#: The largest factor between prediction and measurement that is not reported.
PREDICTED = 2.0


@dataclass
class Report:
    """All rows of a run, with machine, command, commit and versions."""

    machine: Machine
    command: str
    commit: str
    rows: list[Row] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False

    @staticmethod
    def begun(machine: Machine, command: str, commit: str) -> Report:
        versions = {"regard": __version__, "torch": torch.__version__, "python": platform.python_version()}
        return Report(machine, command, commit, versions=versions)

    @property
    def goals(self) -> list[Goal]:
        return [g for row in self.rows for g in row.all_goals]

    @property
    def conditions(self) -> str:
        """Command, commit, versions and machine in three lines."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.command}\n{versions}, commit {self.commit or 'unknown'}\n{self.machine}"

    @property
    def summary(self) -> str:
        """One sentence: how many goals hold."""
        missed = sum(not g.holds for g in self.goals)
        sentences = f"{len(self.goals) - missed} of {len(self.goals)} goals hold."
        untimed = sum(bool(row.broken) for row in self.rows)
        sentences += f" {untimed} cases were not timed." if untimed else ""
        return sentences + (" Interrupted: only the finished cases are shown." if self.interrupted else "")

    def save(self, path: Path) -> None:
        """All numbers as JSON."""
        write_whole(path, json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> Report:
        """The report of a file that `save` wrote."""
        fields = json.loads(path.read_text())
        fields["machine"] = Machine(**fields["machine"])
        fields["rows"] = [_row(row) for row in fields["rows"]]
        return Report(**fields)


def _row(fields: dict[str, Any]) -> Row:
    lines = [Line(**{**line, "goals": [Goal(**g) for g in line["goals"]]}) for line in fields["lines"]]
    return Row(**{**fields, "goals": [Goal(**g) for g in fields["goals"]], "lines": lines})


def print_rows(rows: list[Row], console: Console) -> None:
    """Print each case with time and memory of Regard, then its peers."""
    group = None
    for row in rows:
        if row.group != group:
            group = row.group
            console.print(Text(f"\n{group}", style="bold underline"))
        console.print(Text(row.work, style="bold"))
        console.print(Text(f"  {row.broken}", style="red") if row.broken else _table(row))


def _table(row: Row) -> Table:
    """Regard first, then a line per peer, with goals in the last column."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False, expand=True)
    table.add_column(ratio=4)
    for width in (8, 10, 14):
        table.add_column(justify="right", width=width, no_wrap=True)
    table.add_column(ratio=5)
    name = Text(f"  regard{', ' + row.engine if row.engine else ''}")
    if about := _rates(row):
        name.append(f"\n    {about}", "dim")
    table.add_row(name, seconds(row.seconds), mebibytes(row.memory), "", _verdicts(row.goals))
    for line in row.lines:
        name = Text(f"  {line.name}")
        if line.theirs is not None:
            name.append(f" ({line.version})", "dim")
        if line.note:
            name.append(f"\n    {line.note}", "dim" if line.theirs is not None else "yellow")
        ratio = "" if line.ratio is None else _times(line.ratio)
        table.add_row(name, seconds(line.theirs), mebibytes(line.memory), ratio, _verdicts(line.goals))
    return table


def _times(ratio: float) -> str:
    return f"{_digits(ratio)} x faster" if ratio >= 1 else f"{_digits(1 / ratio)} x slower"


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def _rates(row: Row) -> str:
    sentences = []
    if row.multiply_adds is not None:
        sentences.append(f"{row.multiply_adds:.0f} % of the multiply-adds")
    if row.products is not None:
        sentences.append(f"{row.products:.0f} % of the matmul rate")
    if row.reading is not None:
        sentences.append(f"{row.reading:.0f} % of the reading rate")
    if row.predicted is not None:
        off = row.misjudged
        sentences.append(
            f"predicted {seconds(row.predicted)}" + (f", off {off:.1f} x" if off and off > PREDICTED else "")
        )
    return ", ".join(sentences)


def _verdicts(goals: list[Goal]) -> Text:
    lines = Text()
    for goal in goals:
        if lines:
            lines.append("\n")
        verdict = ("holds", "green") if goal.holds else ("MISSED", "red")
        lines.append_text(Text.assemble(verdict, f" {goal.measured:.3g}: {goal.wanted}"))
    return lines


def seconds(value: float | None) -> str:
    """A time with three digits.

    >>> seconds(0.01234), seconds(2.5), seconds(None)
    ('12.3 ms', '2.5 s', '')
    """
    if value is None:
        return ""
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


def mebibytes(value: float | None) -> str:
    """An amount of memory."""
    return "" if value is None else f"{value:,.0f} MiB"


def picture(rows: list[Row], path: Path) -> None:
    """Write a PNG of time and memory against length, on logarithmic axes: Regard solid, peers dashed."""
    series = _series(rows)
    if not series:
        raise RegardError(
            "bench: no measured group has several lengths, so there is nothing to draw. Try --only window."
        )
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4 * len(series)), layout="constrained")
    panels = figure.subplots(len(series), 2, squeeze=False)
    for (name, curves), (left, right) in zip(series.items(), panels, strict=True):
        for place, axes, label in ((0, left, "seconds"), (1, right, "MiB")):
            for who, points in curves.items():
                drawn = [(n, values[place]) for n, *values in sorted(points) if values[place]]
                if drawn:
                    axes.plot(*zip(*drawn, strict=True), "o-" if who == "regard" else "o--", label=who, markersize=3)
            axes.set(xscale="log", yscale="log", title=name, xlabel="tokens", ylabel=label)
            axes.grid(True, which="major", alpha=0.3)
        left.legend(fontsize="small")
    content = BytesIO()
    figure.savefig(content, format="png", dpi=120)
    write_whole(path, content.getvalue())


def _series(rows: list[Row]) -> dict[str, dict[str, list[tuple[int, float | None, float | None]]]]:
    """(length, seconds, MiB) by series and side. A series has at least two lengths."""
    series: dict[str, dict[str, list[tuple[int, float | None, float | None]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.series and row.seconds is not None:
            series[row.series]["regard"].append((row.length, row.seconds, row.memory))
            for line in row.lines:
                if line.theirs is not None:
                    series[row.series][line.name].append((row.length, line.theirs, line.memory))
    return {name: curves for name, curves in series.items() if len({n for n, *_ in curves["regard"]}) > 1}
