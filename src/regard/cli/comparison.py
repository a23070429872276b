"""`regard compare`: systems trained side by side on the same pairs with the same budget, and a report."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from regard.cli.outputs import check_folder
from regard.cli.study import Wish, command_of, study_of
from regard.cli.train import _lab, clock
from regard.cluster import check_engine, cluster, workers_that_fit
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.seq2seq.comparison.study import Study
    from regard.seq2seq.comparison.workers import Progress, Start

#: Load, beyond the cores that trials leave, above which a machine counts as busy.
BUSY = 1.0


def run(wish: Wish) -> None:
    """Compare, or go on comparing, and write the report."""
    check_engine("compare", wish.engine)
    check_folder("compare", "--out", wish.out)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with _lab():
        from regard.seq2seq.comparison.study import cores, open_study

        study, folder = _wished(wish)
    if wish.report:
        return _report(console, folder, _progress(study, folder))
    processes = wish.processes or cores()
    with console.status("Reading the corpus, learning its vocabularies, looking for near sentences"):
        corpus = open_study(study, folder, command=command_of(wish, folder), processes=processes)
    progress = _progress(study, folder)
    with _starting(wish) as (start, most):
        processes = processes if wish.processes or wish.engine == "local" else most
        _introduce(console, study, progress, processes, corpus.describe())
        _compare(console, folder, progress, processes, start)
    _conclude(console, folder, progress)


def _wished(wish: Wish) -> tuple[Study, Path]:
    """The comparison and its folder; a folder alone is the comparison that it holds."""
    from regard.seq2seq.comparison.study import STUDY, read_study

    if wish.out is not None and not wish.says_what and (wish.out / STUDY).exists():
        return read_study(wish.out), wish.out
    study = study_of(wish)
    folder = wish.out or Path("comparisons") / study.name
    if wish.report:
        return read_study(folder), folder
    return study, folder


def _progress(study: Study, folder: Path) -> list[Progress]:
    from regard.seq2seq.comparison.workers import progress_of

    return progress_of(study.trials(folder))


def _introduce(console: Console, study: Study, progress: Sequence[Progress], processes: int, corpus: str) -> None:
    console.print(corpus, markup=False)
    waiting = sum(one.state == "waiting" for one in progress)
    unit, amount = study.config.training.budget
    rounds = -(-waiting // processes)
    about = f", about {clock(60 * amount * rounds)} of training" if unit == "minutes" and waiting else ""
    done = f" ({len(progress) - waiting} of them finished already)" if waiting < len(progress) else ""
    console.print(
        f"{_counted(study.systems, 'system')} x {_counted(study.seeds, 'seed')}{done}, {processes} at a time{about}.",
        markup=False,
    )
    console.print(study.equal, markup=False)
    for warning in _warnings(study, processes):
        console.print(warning, markup=False, style="yellow")


def _counted(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def _warnings(study: Study, processes: int) -> Iterable[str]:
    """What makes equal time less equal: time is a processor's, but caches and memory are shared."""
    from regard.seq2seq.comparison.study import cores

    if study.config.training.budget[0] != "minutes":
        return
    count = cores()
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


@contextmanager
def _starting(wish: Wish) -> Iterator[tuple[Start, int]]:
    """What starts a trial, and how many processors there are for them."""
    from regard.seq2seq.comparison.processes import ClusterProcess, LocalProcess
    from regard.seq2seq.comparison.study import cores

    if wish.engine == "local":
        yield LocalProcess, cores()
        return
    with cluster("compare") as ray:
        yield partial(ClusterProcess, ray), workers_that_fit(ray, "compare", wish.processes, 1)


def _compare(console: Console, folder: Path, progress: list[Progress], processes: int, start: Start) -> None:
    """Run what waits, with a table of all trials; on Ctrl-C say how to go on."""
    from regard.seq2seq.comparison.workers import run_trials
    from regard.seq2seq.runs.guards import alone

    try:
        with alone(folder, "compare"), _shown(console, progress) as show:
            run_trials(folder, progress, processes, show, start)
    except KeyboardInterrupt:
        finished = sum(one.state == "finished" for one in progress)
        console.print(f"Stopped with {finished} of {len(progress)} trials finished; everything is saved. Go on with:")
        console.print(f"  regard compare --out {shlex.quote(str(folder))}", markup=False)
        console.print("A report of what is finished so far:")
        console.print(f"  regard compare --out {shlex.quote(str(folder))} --report", markup=False)
        raise


@contextmanager
def _shown(console: Console, progress: list[Progress]) -> Any:
    """A live table on a terminal; elsewhere a line for every trial that starts, or ends."""
    if console.is_terminal:
        with Live(table(progress), console=console, refresh_per_second=2) as live:
            yield lambda: live.update(table(progress))
        return
    yield _lines(console, progress)


def _lines(console: Console, progress: list[Progress]) -> Callable[[], None]:
    said = {one.trial.name: one.state for one in progress}

    def show() -> None:
        for one in progress:
            before, said[one.trial.name] = said[one.trial.name], one.state
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
    made = Table(box=None, padding=(0, 2, 0, 0))
    made.add_column("system")
    for column in ("seed", "state", "step", "loss", "BLEU", "left"):
        made.add_column(column, justify="left" if column == "state" else "right")
    styles = {"finished": "green", "failed": "red", "stopped": "yellow", "waiting": "dim"}
    for one in progress:
        known = one.numbers
        state = f"{one.state} {100 * (known.get('share') or 0):.0f}%" if one.state == "training" else one.state
        seconds = known.get("left") if one.state == "training" else None
        left = "" if seconds is None else clock(seconds)
        cells = (
            _number(known.get("step"), ",.0f"),
            _number(known.get("loss"), ".2f"),
            _number(known.get("bleu"), ".1f"),
        )
        made.add_row(one.trial.entry.title, str(one.trial.seed), state, *cells, left, style=styles.get(one.state))
    return made


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _conclude(console: Console, folder: Path, progress: Sequence[Progress]) -> None:
    """The report, and what failed."""
    failed = [one for one in progress if one.state != "finished"]
    for one in failed:
        console.print(f"{one.trial.name} {one.state}: {one.message} (log: {one.log})", markup=False, style="red")
    if len(failed) < len(progress):
        _report(console, folder, progress)
    if failed:
        raise RegardError(
            f"compare: {len(failed)} of {len(progress)} trials did not end. Look at their logs, then go on with: "
            f"regard compare --out {shlex.quote(str(folder))}"
        )


def _report(console: Console, folder: Path, progress: Sequence[Progress]) -> None:
    if not any(one.state == "finished" for one in progress):
        raise RegardError(f"compare: no trial in {folder} is finished, so there is nothing to report yet.")
    try:
        from regard.viewer.report import write_report
    except ImportError:
        raise RegardError("The report needs matplotlib: pip install 'regard[lab]'") from None
    with console.status("Writing the report"):
        path = write_report(folder)
    console.print(f"Report: {path}", markup=False)
