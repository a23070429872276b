"""Trials side by side: one process and one thread each, watched, stopped together, never lost."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regard.seq2seq.comparison.processes import LocalProcess, Start
from regard.seq2seq.comparison.study import EVALUATION, Trial
from regard.seq2seq.comparison.trials import FAILED, STOPPED
from regard.seq2seq.runs.files import read_json
from regard.seq2seq.runs.guards import polite_signals

LOG = "log.txt"
#: What takes one trial to its end, followed by the folder, the label and the seed.
COMMAND = (sys.executable, "-m", "regard.seq2seq.comparison.trials")
#: Seconds between two looks at the processes.
PAUSE = 0.2
#: Seconds that a process has to end its step and save when it is asked to stop.
PATIENCE = 60.0


@dataclass(eq=False)
class Progress:
    """The state of a trial.

    Args:
        trial: The trial.
        state: "waiting", "preparing", "training", "inspecting", "pruning", "testing", "finished", "failed" or
            "stopped".
        numbers: "step", "share" of the budget, seconds "left", "loss" and "bleu", as far as they are known.
        message: Why it failed.
    """

    trial: Trial
    state: str = "waiting"
    numbers: dict[str, float | None] = field(default_factory=dict)
    message: str = ""

    @property
    def ended(self) -> bool:
        return self.state in ("finished", "failed", "stopped")

    @property
    def log(self) -> Path:
        """What the process wrote, all attempts one after the other."""
        return self.trial.path / LOG

    def tell(self, state: str, numbers: dict[str, float | None]) -> None:
        """Take in what the process said; "finished" is only what its exit says."""
        self.state = "testing" if state == "finished" else state
        self.numbers |= {name: value for name, value in numbers.items() if value is not None}


def progress_of(trials: Sequence[Trial]) -> list[Progress]:
    """Where trials stand before any is started."""
    return [_found(trial) if trial.finished else Progress(trial) for trial in trials]


def run_trials(
    folder: Path,
    progress: Sequence[Progress],
    processes: int,
    show: Callable[[], object] = lambda: None,
    start: Start = LocalProcess,
) -> None:
    """Run all that wait, `processes` at a time, until each has ended; one that dies does not stop the others.

    Ctrl-C, a polite kill or the loss of the terminal asks all to stop after their step, waits until they have saved,
    and is raised as KeyboardInterrupt; a second one ends them at once.

    Args:
        folder: Of the comparison.
        progress: What is run, in this order; changed as the trials go on.
        processes: How many at a time.
        show: Called now and then, and whenever a trial starts or ends.
        start: What starts a process; here, unless it is given.
    """
    running: list[_Worker] = []
    asked: list[int] = []

    def stop(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    with polite_signals(stop):
        try:
            while not asked and (running or any(one.state == "waiting" for one in progress)):
                for one in progress:
                    if one.state == "waiting" and len(running) < processes:
                        running.append(_Worker(folder, one, start))
                time.sleep(PAUSE)
                running = [worker for worker in running if not worker.look()]
                show()
            if asked:
                raise KeyboardInterrupt
        except BaseException:
            _stop(running, show)
            raise


class _Worker:
    """The process of one trial."""

    def __init__(self, folder: Path, progress: Progress, start: Start) -> None:
        self.progress, self._rest = progress, b""
        trial = progress.trial
        progress.state = "preparing"
        trial.path.mkdir(parents=True, exist_ok=True)
        (trial.path / FAILED).unlink(missing_ok=True)
        command = [*COMMAND, str(folder.resolve()), trial.entry.label, str(trial.seed)]
        self._process = start(command, progress.log.resolve())

    def look(self) -> bool:
        """Take in what it said; True if it has ended."""
        code, said = self._process.look()
        *lines, self._rest = (self._rest + said).split(b"\n")
        for line in lines:
            facts = json.loads(line)
            self.progress.tell(facts.pop("state"), facts)
        if code is None:
            return False
        self._conclude(code)
        return True

    def ask_to_stop(self) -> None:
        self._process.ask_to_stop()

    def end(self) -> None:
        """At once, whatever it is doing."""
        self._process.end()
        self.look()

    def _conclude(self, code: int) -> None:
        """What the exit of the process means."""
        one = self.progress
        if code == 0 and one.trial.finished:
            done = _found(one.trial)
            one.state, one.numbers = done.state, one.numbers | done.numbers
        elif code in (STOPPED, -signal.SIGTERM, -signal.SIGINT):
            one.state = "stopped"
        else:
            one.state, one.message = "failed", _reason(one, code)
            _note_failure(one, code)


def _found(trial: Trial) -> Progress:
    """The progress of a trial that is finished already."""
    bleu = read_json(trial.path / EVALUATION)["bleu"]["score"]
    return Progress(trial, "finished", {"bleu": bleu, "share": 1.0})


def _stop(running: list[_Worker], show: Callable[[], object]) -> None:
    """Ask all to stop, and wait until they have; who interrupts again, or waits too long, ends them at once."""
    for worker in running:
        worker.ask_to_stop()
    end = time.monotonic() + PATIENCE
    try:
        while running and time.monotonic() < end:
            time.sleep(PAUSE)
            running = [worker for worker in running if not worker.look()]
            show()
    finally:
        for worker in running:
            worker.end()


def _reason(one: Progress, code: int) -> str:
    """Why a trial died: what it said itself, the last line of its log, or the signal."""
    if (one.trial.path / FAILED).exists():
        return str(read_json(one.trial.path / FAILED).get("message", ""))
    if code < 0:
        name = signal.Signals(-code).name
        memory = "; the system may have run out of memory" if name == "SIGKILL" else ""
        return f"ended by {name}{memory}"
    lines = [line for line in one.log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else f"ended with status {code}"


def _note_failure(one: Progress, code: int) -> None:
    with contextlib.suppress(OSError):
        (one.trial.path / FAILED).write_text(json.dumps({"code": code, "message": one.message}) + "\n")
