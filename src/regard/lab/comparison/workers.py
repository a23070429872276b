"""`run_trials`: runs trials at the same time, one process with one thread for each, and stops them together."""

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

from regard.base.texts.text_files import read_json
from regard.lab.comparison.processes import LocalProcess, Start
from regard.lab.comparison.study import EVALUATION, Trial
from regard.lab.comparison.trials import FAILED, STOPPED
from regard.lab.runs.guards import stop_signals

LOG = "log.txt"
#: The command that runs one trial; the folder, the label and the seed follow it.
COMMAND = (sys.executable, "-m", "regard.lab.comparison.trials")
#: Seconds between two checks of the processes.
PAUSE = 0.2
#: Seconds that a stopped process has to finish its step and to save.
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
        """The error output of the process, of all attempts."""
        return self.trial.path / LOG

    def tell(self, state: str, numbers: dict[str, float | None]) -> None:
        """Take over a message of the process. Only its exit status makes a trial "finished"."""
        self.state = "testing" if state == "finished" else state
        self.numbers |= {name: value for name, value in numbers.items() if value is not None}


def progress_of(trials: Sequence[Trial]) -> list[Progress]:
    """The state of trials before any is started."""
    return [_finished(trial) if trial.finished else Progress(trial) for trial in trials]


def run_trials(
    folder: Path,
    progress: Sequence[Progress],
    processes: int,
    show: Callable[[], object] = lambda: None,
    start: Start = LocalProcess,
) -> None:
    """Run all waiting trials, `processes` at a time. A trial that fails does not stop the others.

    SIGINT, SIGTERM or SIGHUP stops all trials after their step, waits until they have saved, and raises
    KeyboardInterrupt. A second signal ends them at once.

    Args:
        folder: Of the comparison.
        progress: The trials, in their order; updated while they run.
        processes: Trials that run at the same time.
        show: Called now and then, and whenever a trial starts or ends.
        start: Starts a process; by default on this machine.
    """
    running: list[_Worker] = []
    signals: list[int] = []

    def stop(number: int, frame: Any) -> None:
        """Note the first signal, which the loop looks at; at the second one raise KeyboardInterrupt here."""
        if signals:
            raise KeyboardInterrupt
        signals.append(number)

    with stop_signals(stop):
        try:
            while not signals and (running or any(one.state == "waiting" for one in progress)):
                for one in progress:
                    if one.state == "waiting" and len(running) < processes:
                        running.append(_Worker(folder, one, start))
                time.sleep(PAUSE)
                running = [worker for worker in running if not worker.look()]
                show()
            if signals:
                raise KeyboardInterrupt
        except BaseException:
            _stop(running, show)
            raise


class _Worker:
    """The process of one trial. To make a `_Worker` starts it, and removes the error of an earlier attempt."""

    def __init__(self, folder: Path, progress: Progress, start: Start) -> None:
        self.progress, self._rest = progress, b""
        trial = progress.trial
        progress.state = "preparing"
        trial.path.mkdir(parents=True, exist_ok=True)
        (trial.path / FAILED).unlink(missing_ok=True)
        command = [*COMMAND, str(folder.resolve()), trial.entry.label, str(trial.seed)]
        self._process = start(command, progress.log.resolve())

    def look(self) -> bool:
        """Read the messages of the process; True if it has ended."""
        code, output = self._process.look()
        *lines, self._rest = (self._rest + output).split(b"\n")  # the last line may be incomplete
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
        """End the process at once."""
        self._process.end()
        self.look()

    def _conclude(self, code: int) -> None:
        """Set the state of the trial from the exit status `code` of its process."""
        one = self.progress
        if code == 0 and one.trial.finished:
            done = _finished(one.trial)
            one.state, one.numbers = done.state, one.numbers | done.numbers
        elif code in (STOPPED, -signal.SIGTERM, -signal.SIGINT):
            one.state = "stopped"
        else:
            one.state, one.message = "failed", _reason(one, code)
            with contextlib.suppress(OSError):
                (one.trial.path / FAILED).write_text(json.dumps({"code": code, "message": one.message}) + "\n")


def _finished(trial: Trial) -> Progress:
    """The progress of a finished trial."""
    bleu = read_json(trial.path / EVALUATION)["bleu"]["score"]
    return Progress(trial, "finished", {"bleu": bleu, "share": 1.0})


def _stop(running: list[_Worker], show: Callable[[], object]) -> None:
    """Stop all processes and wait for them; after another signal, or after `PATIENCE` seconds, end them at once."""
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
    """Why a trial failed: its own message, the signal, or the last line of its log. `code` is its exit status."""
    if (one.trial.path / FAILED).exists():
        return str(read_json(one.trial.path / FAILED).get("message", ""))
    if code < 0:
        name = signal.Signals(-code).name
        memory = "; the system may have run out of memory" if name == "SIGKILL" else ""
        return f"ended by {name}{memory}"
    lines = [line for line in one.log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else f"ended with status {code}"
