"""`regard compare`: train systems on the same pairs with the same budget, and write a report."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from regard.base.cluster import check_engine
from regard.base.errors import RegardError
from regard.cli.options import StudyOptions
from regard.cli.outputs import check_folder
from regard.lab.commands.study import command_of, describes_study, study_of
from regard.lab.commands.train import clock

if TYPE_CHECKING:
    from regard.lab import Comparison, Study
    from regard.lab.comparison.processes import Processors, Start
    from regard.lab.comparison.workers import Progress

#: Load, beyond the cores that trials leave, above which a machine counts as busy.
BUSY = 1.0


def run(settings: StudyOptions) -> None:
    """Run a comparison, or continue one, and write the report."""
    check_engine("compare", settings.engine)
    check_folder("compare", "--out", settings.out)
    from regard.lab import Comparison
    from regard.lab.comparison.processes import processors

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    study, folder = _study(settings)
    if settings.report:
        return _report(console, Comparison.read(folder))
    with processors(settings.engine, settings.processes) as where:
        with console.status("Reading the corpus, learning its vocabularies, searching for near-duplicates"):
            command = command_of(settings, folder)
            comparison, corpus = Comparison.open(study, folder, command=command, hardware=where.hardware)
        _introduce(console, comparison, where, corpus.describe())
        _compare(console, comparison, where.count, where.start)
    _conclude(console, comparison)


def _study(settings: StudyOptions) -> tuple[Study, Path]:
    """The study and its folder.

    The study is read from the folder with --report, or if --out holds one and no option describes another. Otherwise
    the options describe it.
    """
    from regard.lab.comparison.study import STUDY, read_study

    if settings.out is not None and not describes_study(settings) and (settings.out / STUDY).exists():
        return read_study(settings.out), settings.out
    study = study_of(settings)
    folder = settings.out or Path("comparisons") / study.name
    return (read_study(folder), folder) if settings.report else (study, folder)


def _introduce(console: Console, comparison: Comparison, where: Processors, corpus: str) -> None:
    """Print the corpus, the number of trials, the time that they take, the budget and the warnings.

    `corpus` is the line of `Corpus.describe`.
    """
    study, progress = comparison.study, comparison.progress
    console.print(corpus, markup=False)
    waiting = sum(one.state == "waiting" for one in progress)
    unit, amount = study.config.training.budget
    rounds = -(-waiting // where.count)  # rounded up
    about = f", about {clock(60 * amount * rounds)} of training" if unit == "minutes" and waiting else ""
    done = f" ({len(progress) - waiting} of them finished already)" if waiting < len(progress) else ""
    console.print(
        f"{_counted(study.systems, 'system')} x {_counted(study.seeds, 'seed')}{done}, {where.count} at a time{about}.",
        markup=False,
    )
    console.print(study.equal, markup=False)
    for warning in _warnings(study, where):
        console.print(warning, markup=False, style="yellow")


def _counted(things: Sequence[object], name: str) -> str:
    """The number of things and their name, as "1 seed" or "3 seeds"."""
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def _warnings(study: Study, where: Processors) -> Iterable[str]:
    """Warnings about this machine, if it is busy: trials have equal processor time, but share caches and memory."""
    if study.config.training.budget[0] != "minutes" or "machine" not in where.hardware:
        return
    processes, count = where.count, where.hardware["cores"]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if processes > count:
        yield (
            f"{processes} processes share {count} cores: none is done sooner for it, and they crowd each other's "
            f"caches. Use --processes {count}."
        )
    elif load + processes > count + BUSY:
        yield (
            f"The machine is busy (load {load:.1f} on {count} cores): it will take longer than said. Only processor "
            "time counts, but caches and memory are shared, so use --steps or wait where speed matters."
        )


def _compare(console: Console, comparison: Comparison, processes: int, start: Start) -> None:
    """Run the waiting trials, with a table of all trials; after Ctrl-C print how to continue."""
    try:
        with _shown(console, comparison.progress) as show:
            comparison.run(processes, show, start)
    except KeyboardInterrupt:
        finished, folder = comparison.num_finished, shlex.quote(str(comparison.folder))
        console.print(
            f"Stopped with {finished} of {len(comparison.progress)} trials finished; everything is saved. Go on with:"
        )
        console.print(f"  regard compare --out {folder}", markup=False)
        console.print("A report of what is finished so far:")
        console.print(f"  regard compare --out {folder} --report", markup=False)
        raise


@contextmanager
def _shown(console: Console, progress: Sequence[Progress]) -> Any:
    """A live table on a terminal; otherwise a line for every trial that starts or ends.

    Yields the function that shows the present state of `progress`.
    """
    if console.is_terminal:
        with Live(table(progress), console=console, refresh_per_second=2) as live:
            yield lambda: live.update(table(progress))
        return
    yield _lines(console, progress)


def _lines(console: Console, progress: Sequence[Progress]) -> Callable[[], None]:
    """A function that prints a line for every trial that began to train or ended since its last call.

    `states` holds the state of every trial at that call, by the name of the trial.
    """
    states = {one.trial.name: one.state for one in progress}

    def show() -> None:
        for one in progress:
            before, states[one.trial.name] = states[one.trial.name], one.state
            if one.ended and before != one.state:
                steps = one.numbers.get("step")
                after = "" if steps is None else f" after {steps:,.0f} steps"
                done = f", BLEU {one.numbers['bleu']:.1f}{after}" if one.state == "finished" else ""
                note = done or f" {one.message}".rstrip()
                console.print(f"{one.trial.name}: {one.state}{note}", markup=False)
            elif before == "preparing" and one.state == "training":
                console.print(f"{one.trial.name}: training", markup=False)

    return show


def table(progress: Sequence[Progress]) -> Table:
    """All trials: state, step, loss, BLEU and time left."""
    progress_table = Table(box=None, padding=(0, 2, 0, 0))
    progress_table.add_column("system")
    for column in ("seed", "state", "step", "loss", "BLEU", "left"):
        progress_table.add_column(column, justify="left" if column == "state" else "right")
    styles = {"finished": "green", "failed": "red", "stopped": "yellow", "waiting": "dim"}
    for one in progress:
        numbers = one.numbers
        state = f"{one.state} {100 * (numbers.get('share') or 0):.0f}%" if one.state == "training" else one.state
        seconds = numbers.get("left") if one.state == "training" else None
        left = "" if seconds is None else clock(seconds)
        cells = (
            _number(numbers.get("step"), ",.0f"),
            _number(numbers.get("loss"), ".2f"),
            _number(numbers.get("bleu"), ".1f"),
        )
        progress_table.add_row(
            one.trial.entry.title, str(one.trial.seed), state, *cells, left, style=styles.get(one.state)
        )
    return progress_table


def _number(value: float | None, form: str) -> str:
    """The cell of a number in a format such as ".1f"; empty for None."""
    return "" if value is None else format(value, form)


def _conclude(console: Console, comparison: Comparison) -> None:
    """Print the failed trials, and write the report of the finished ones."""
    failed = comparison.unfinished
    for one in failed:
        console.print(f"{one.trial.name} {one.state}: {one.message} (log: {one.log})", markup=False, style="red")
    if comparison.num_finished:
        _report(console, comparison)
    if failed:
        raise RegardError(
            f"compare: {len(failed)} of {len(comparison.progress)} trials did not finish. Read their logs, then go on "
            f"with: regard compare --out {shlex.quote(str(comparison.folder))}"
        )


def _report(console: Console, comparison: Comparison) -> None:
    """Write the report of the finished trials, and print the path of its page."""
    with console.status("Writing the report"):
        path = comparison.report()
    console.print(f"Report: {path}", markup=False)
