"""Every mechanism beside its alternatives in other libraries: measures them in turns, in one run."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from benchmarks.case import BenchSettings, Case
from benchmarks.cases import cases
from benchmarks.peers.package import PACKAGES
from benchmarks.report import Report, picture, print_rows
from benchmarks.roofline import commit, measured
from benchmarks.runner import Runner
from regard.base.errors import RegardError, nearest
from regard.cli.outputs import check_drawing, check_file

#: Seconds per peer, and for all cases without --full. Cases after that are listed, not measured.
PAIR, ALL = 1.0, 540.0
PAIR_OF_FULL = 12.0
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class BenchOptions:
    """The options of the command; `only` are the names of groups, None for all."""

    only: tuple[str, ...] | None = None
    full: bool = False
    device: str = "cpu"
    json: Path | None = None
    picture: Path | None = None

    @property
    def command(self) -> str:
        parts = [
            "python -m benchmarks",
            "--full" if self.full else "",
            f"--only {','.join(self.only)}" if self.only else "",
            f"--device {self.device}" if self.device != "cpu" else "",
        ]
        return " ".join(part for part in parts if part)


def run(settings: BenchOptions) -> None:
    """Measure the cases and print the report. After Ctrl-C it prints the finished cases."""
    chosen, setting = _chosen(settings)
    check_file("bench", "--json", settings.json)
    check_file("bench", "--picture", settings.picture, ".png")
    if settings.picture is not None:
        check_drawing("bench", "--picture")
    console = Console(stderr=True)
    stop = None if settings.full else time.monotonic() + ALL
    console.print(Text("Measuring the speed of matrix products and copies on this machine", style="dim"))
    machine = measured(setting.device, setting.dtype)
    report = Report.begun(machine, settings.command, commit())
    report.versions |= {p.name: str(p).removeprefix(f"{p.name} ") for p in PACKAGES if not p.missing}
    runner = Runner(machine, setting, PAIR_OF_FULL if settings.full else PAIR, stop)
    try:
        _measure(runner, chosen, report, console)
    except KeyboardInterrupt:
        report.interrupted = True
    order = {case.work: number for number, case in enumerate(chosen)}
    report.rows.sort(key=lambda row: order[row.work])
    _print_report(report, settings)
    if report.interrupted:
        raise KeyboardInterrupt


def show_cases(settings: BenchOptions) -> None:
    """Print groups, cases and peers, and the peers that are not installed."""
    chosen, _ = _chosen(settings)
    console, group = Console(), None
    for case in chosen:
        if case.group != group:
            group = case.group
            console.print(Text(f"\n{group}", style="bold"))
        peers = ", ".join(side.name for side in case.peers)
        console.print(Text.assemble(f"  {case.work}", (f"  against {peers}" if peers else "", "dim")))
    console.print()
    for package in PACKAGES:
        console.print(Text(package.missing or str(package), style="yellow" if package.missing else "dim"))


def _chosen(settings: BenchOptions) -> tuple[list[Case], BenchSettings]:
    if settings.device not in DEVICES:
        raise RegardError(f"bench: there is no device {settings.device!r}. {nearest(settings.device, DEVICES)}")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise RegardError("bench: torch finds no CUDA device on this machine. Use --device cpu.")
    setting = BenchSettings(settings.device, settings.full)
    return cases(setting, settings.only or ()), setting


def _measure(runner: Runner, chosen: list[Case], report: Report, console: Console) -> None:
    columns = TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(chosen))

        def show(case: Case) -> None:
            progress.update(task, description=f"{case.group}: {case.work}")
            if not console.is_terminal:
                console.print(f"{case.group}: {case.work}")

        for row in runner.run(interleaved(chosen), show):
            report.rows.append(row)
            progress.advance(task)


def interleaved(chosen: list[Case]) -> list[Case]:
    """The first case of every group, then the second of every group: if time runs out, every group has results."""
    groups: dict[str, list[Case]] = {}
    for case in chosen:
        groups.setdefault(case.group, []).append(case)
    return [case for layer in zip_longest(*groups.values()) for case in layer if case is not None]


def _print_report(report: Report, settings: BenchOptions) -> None:
    console = Console()
    print_rows(report.rows, console)
    console.print(Text(f"\n{report.conditions}", style="dim"))
    console.print(Text(report.summary))
    if settings.json:
        report.save(settings.json)
        print(f"Wrote {settings.json}", file=sys.stderr)
    if settings.picture and report.rows:
        picture(report.rows, settings.picture)
        print(f"Wrote {settings.picture}", file=sys.stderr)
