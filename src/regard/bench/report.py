"""What `regard bench` says: a table, a file, a picture."""

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

from regard.bench.measure import Goal
from regard.bench.roofline import Machine
from regard.bench.runner import Line, Row
from regard.errors import RegardError
from regard.seq2seq.runs.files import write_whole
from regard.version import __version__

#: Factor by which a prediction may be off.
PREDICTED = 2.0


@dataclass
class Report:
    """All rows of a run, and the conditions under which they were measured."""

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
        """How many goals hold."""
        missed = sum(not g.holds for g in self.goals)
        sentences = f"{len(self.goals) - missed} of {len(self.goals)} goals hold."
        untimed = sum(bool(row.broken) for row in self.rows)
        sentences += f" {untimed} cases were not timed." if untimed else ""
        return sentences + (" Interrupted: this is what was measured until then." if self.interrupted else "")

    def save(self, path: Path) -> None:
        """All numbers as JSON."""
        write_whole(path, json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> Report:
        """What `save` wrote."""
        given = json.loads(path.read_text())
        given["machine"] = Machine(**given["machine"])
        given["rows"] = [_row(row) for row in given["rows"]]
        return Report(**given)


def _row(given: dict[str, Any]) -> Row:
    lines = [Line(**{**line, "goals": [Goal(**g) for g in line["goals"]]}) for line in given["lines"]]
    return Row(**{**given, "goals": [Goal(**g) for g in given["goals"]], "lines": lines})


def print_rows(rows: list[Row], console: Console) -> None:
    """Each work with its own time and memory, and the peers beside it."""
    group = None
    for row in rows:
        if row.group != group:
            group = row.group
            console.print(Text(f"\n{group}", style="bold underline"))
        console.print(Text(row.work, style="bold"))
        console.print(Text(f"  {row.broken}", style="red") if row.broken else _table(row))


def _table(row: Row) -> Table:
    """Ours first, then one line a peer; goals are beside what they are about."""
    found = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False, expand=True)
    found.add_column(ratio=4)
    for width in (8, 10, 14):
        found.add_column(justify="right", width=width, no_wrap=True)
    found.add_column(ratio=5)
    name = Text(f"  regard{', ' + row.engine if row.engine else ''}")
    if about := _rates(row):
        name.append(f"\n    {about}", "dim")
    found.add_row(name, seconds(row.seconds), mebibytes(row.memory), "", _verdicts(row.goals))
    for line in row.lines:
        name = Text(f"  {line.name}")
        if line.theirs is not None:
            name.append(f" ({line.version})", "dim")
        if line.note:
            name.append(f"\n    {line.note}", "dim" if line.theirs is not None else "yellow")
        ratio = "" if line.ratio is None else _times(line.ratio)
        found.add_row(name, seconds(line.theirs), mebibytes(line.memory), ratio, _verdicts(line.goals))
    return found


def _times(ratio: float) -> str:
    return f"{_digits(ratio)} x faster" if ratio >= 1 else f"{_digits(1 / ratio)} x slower"


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def _rates(row: Row) -> str:
    sentences = []
    if row.products is not None:
        sentences.append(f"{row.products:.0f} % of the products' rate")
    if row.copying is not None:
        sentences.append(f"{row.copying:.0f} % of the copy's rate")
    if row.predicted is not None:
        off = row.misjudged
        sentences.append(
            f"predicted {seconds(row.predicted)}" + (f", off {off:.1f} x" if off and off > PREDICTED else "")
        )
    return ", ".join(sentences)


def _verdicts(goals: list[Goal]) -> Text:
    found = Text()
    for goal in goals:
        if found:
            found.append("\n")
        verdict = ("holds", "green") if goal.holds else ("MISSED", "red")
        found.append_text(Text.assemble(verdict, f" {goal.measured:.3g}: {goal.wanted}"))
    return found


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
    """Time and memory against length, ours as lines and peers dashed, on logarithmic axes: a PNG."""
    series = _series(rows)
    if not series:
        raise RegardError("bench: no group that was measured has several lengths. --only window draws one.")
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
    """By series and side: length, seconds, MiB. A series is of two lengths at least."""
    found: dict[str, dict[str, list[tuple[int, float | None, float | None]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.series and row.seconds is not None:
            found[row.series]["regard"].append((row.length, row.seconds, row.memory))
            for line in row.lines:
                if line.theirs is not None:
                    found[row.series][line.name].append((row.length, line.theirs, line.memory))
    return {name: curves for name, curves in found.items() if len({n for n, *_ in curves["regard"]}) > 1}
