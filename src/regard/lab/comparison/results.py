"""`compare` runs the trials of a study; `Comparison` is its result, with the evaluations and the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.base.checks import checked
from regard.base.errors import MissingPackage, RegardError
from regard.base.texts.text_files import read_json
from regard.lab.comparison.processes import LocalProcess, Start, processors
from regard.lab.comparison.study import EVALUATION, Study, open_study, read_study
from regard.lab.comparison.workers import Progress, progress_of, run_trials
from regard.lab.data.corpus import Corpus
from regard.lab.evaluation import Evaluation
from regard.lab.runs.guards import alone


@dataclass(frozen=True, eq=False)
class Comparison:
    """A comparison of systems in a folder, finished or not.

    Args:
        folder: Of the comparison.
        study: The systems, seeds, corpus and budget.
        progress: The state of every trial; `run` changes it.

    >>> import tempfile
    >>> from regard import lab
    >>> systems = ["none", "bahdanau"]
    >>> study = lab.make_study("copy", systems=systems, budget=("steps", 1), overrides=["data.size=60"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     opened, corpus = lab.Comparison.open(study, folder)  # `compare` also runs the trials
    ...     read = lab.Comparison.read(folder)
    >>> read.num_finished, len(read.unfinished), read.evaluations()
    (0, 2, {'none': [], 'bahdanau': []})
    >>> read.study.systems == study.systems, len(corpus.test)
    (True, 6)
    """

    folder: Path
    study: Study
    progress: Sequence[Progress]

    @staticmethod
    def read(folder: str | Path) -> Comparison:
        """The comparison that a folder holds."""
        study = read_study(Path(folder))
        return Comparison(Path(folder), study, progress_of(study.trials(Path(folder))))

    @staticmethod
    def open(
        study: Study, folder: str | Path, *, command: str = "", hardware: Mapping[str, Any] | None = None
    ) -> tuple[Comparison, Corpus]:
        """Make the folder of a comparison, or check that it holds the same one; with the corpus.

        `command` and `hardware`, by default one process of this machine, are written into the folder, for the report.
        """
        corpus = open_study(study, Path(folder), command=command, hardware=hardware)
        return Comparison(Path(folder), study, progress_of(study.trials(Path(folder)))), corpus

    @property
    def num_finished(self) -> int:
        return sum(one.state == "finished" for one in self.progress)

    @property
    def unfinished(self) -> list[Progress]:
        """The trials that failed, were stopped, or did not start."""
        return [one for one in self.progress if one.state != "finished"]

    def run(self, processes: int, show: Callable[[], object] = lambda: None, start: Start = LocalProcess) -> None:
        """Run all waiting trials, `processes` at a time; see `run_trials`."""
        with alone(self.folder, "compare"):
            run_trials(self.folder, self.progress, processes, show, start)

    def evaluations(self) -> dict[str, list[Evaluation]]:
        """The evaluations of the finished trials on the test pairs, by the label of their system."""
        found: dict[str, list[Evaluation]] = {entry.label: [] for entry in self.study.systems}
        for trial in self.study.trials(self.folder):
            if trial.finished:
                written = read_json(trial.path / EVALUATION)
                written.pop("translations", None)
                found[trial.entry.label].append(Evaluation.from_json(written))
        return found

    def report(self) -> Path:
        """Write the report of the finished trials into the folder; returns the path of its page."""
        if not self.num_finished:
            raise RegardError(f"compare: no trial in {self.folder} is finished, so there is nothing to report yet.")
        try:
            from regard.lab.report import write_report

            return write_report(self.folder)
        except ModuleNotFoundError as error:
            raise MissingPackage("compare", error.name or "matplotlib", "lab") from None


@checked
def compare(
    study: Study,
    out: str | Path,
    *,
    processes: int | None = None,
    engine: str = "local",
    show: Callable[[], object] = lambda: None,
) -> Comparison:
    """Train every system of a study with every seed and evaluate it; `regard compare` on the command line.

    Each trial runs in a process of its own, with one thread. A trial that fails does not stop the others. A folder
    that holds the same comparison is continued: finished trials are not run again.

    Args:
        study: From `make_study`, or a `Study` of your own.
        out: The folder of the comparison.
        processes: Trials that run at the same time; by default one for each core.
        engine: "local", or "ray" for the machines of a Ray cluster.
        show: Called now and then, and whenever a trial starts or ends.

    >>> from regard import lab
    >>> study = lab.make_study("grammar", systems=["none", "bahdanau"], seeds=[1, 2, 3], budget=("minutes", 1))
    >>> comparison = lab.compare(study, "comparisons/grammar")  # doctest: +SKIP
    >>> {label: [found.bleu.score for found in runs] for label, runs in comparison.evaluations().items()}
    ... # doctest: +SKIP
    >>> comparison.report()  # doctest: +SKIP
    """
    with processors(engine, processes) as where:
        comparison, _ = Comparison.open(study, out, hardware=where.hardware)
        comparison.run(where.count, show, where.start)
    return comparison
