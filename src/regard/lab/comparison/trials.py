"""`run_trial`: trains, inspects and tests one system of a comparison, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING

from regard.base.errors import RegardError
from regard.base.whole_files import write_json

if TYPE_CHECKING:
    from regard.lab.comparison.study import Study, Trial
    from regard.lab.data.corpus import Corpus
    from regard.lab.runs.run import Run
    from regard.lab.training.stream import TrainingProgress

TRAINED, LOOKING, PRUNING, FAILED = "trained.json", "looking.json", "pruning.json", "failed.json"
#: Least seconds between two messages about the progress of a training.
OFTEN = 0.5
#: Test sentences in a batch.
BATCH = 100
#: Exit status of a trial that was stopped and can be continued.
STOPPED = 130

#: Sends a state and numbers to the process that started the trial.
Tell = Callable[..., None]


def run_trial(folder: Path, label: str, seed: int, tell: Tell = lambda state, **numbers: None) -> bool:
    """Run a trial, or continue it, to its end. False if it was stopped before.

    Args:
        folder: Of the comparison, which `open_study` has made.
        label: The label of the system.
        seed: The seed of the trial.
        tell: Called with a state ("preparing", "training", "inspecting", "pruning", "testing") and numbers.
    """
    from regard.lab.comparison.study import read_study
    from regard.lab.runs.guards import alone

    tell("preparing")
    study = read_study(folder)
    trial = find_trial(study, folder, label, seed)
    if trial.finished:
        return True
    with alone(trial.path, "compare"):
        return _taken(study, trial, folder, tell)


def _taken(study: Study, trial: Trial, folder: Path, tell: Tell) -> bool:
    """Run the parts of a trial that are not done: training, inspection, pruning, test. False if it was stopped."""
    from regard.lab.comparison.study import similarities_of
    from regard.lab.runs.run import load_run

    corpus = _corpus(study, folder)
    if not (trial.path / TRAINED).exists() and not _trained(study, trial, corpus, folder, tell):
        return False
    run = load_run(trial.path)
    similarities = similarities_of(folder)
    _look(run, corpus, similarities, tell)
    if study.sweep == "prune":
        _prune(run, corpus, tell)
    _test(study, run, corpus, similarities, tell)
    return True


def find_trial(study: Study, folder: Path, label: str, seed: int) -> Trial:
    """The trial of a system and a seed."""
    for trial in study.trials(folder):
        if (trial.entry.label, trial.seed) == (label, seed):
            return trial
    raise RegardError(f"compare: {folder} has no trial of {label} with seed {seed}.")


def peak_memory() -> float:
    """Peak memory of this process in MiB.

    It is read from /proc, where there is one: getrusage also counts the program that this process was before exec.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 2**20 if sys.platform == "darwin" else peak / 1024


def _corpus(study: Study, folder: Path) -> Corpus:
    """The corpus of the study; an error if it has changed since the comparison was begun."""
    from regard.base.texts.text_files import read_json
    from regard.lab.comparison.study import STUDY

    corpus = study.corpus()
    if corpus.hash != read_json(folder / STUDY)["data_hash"]:
        raise RegardError(
            f"compare: the corpus {corpus.name} has changed since {folder} was begun (its hash differs). Restore the "
            "files of that time, or compare into a new folder."
        )
    return corpus


def _trained(study: Study, trial: Trial, corpus: Corpus, folder: Path, tell: Tell) -> bool:
    """Train to the end of the budget, and write the facts of the training; False if it was stopped before."""
    from regard.lab.data.tokenizer import load_tokenizer
    from regard.lab.runs.run import SOURCE, STATE, TARGET
    from regard.lab.training.fitting import fit, quiet
    from regard.lab.training.preparation import prepare

    before = peak_memory()
    with quiet():
        shared = load_tokenizer(folder / SOURCE), load_tokenizer(folder / TARGET)
        config = study.config_of(trial.entry, trial.seed)
        prepared = prepare(config, trial.path, corpus=corpus, tokenizers=shared)
    outcome = fit(prepared.task, resume=(trial.path / STATE).exists(), on_step=_telling(tell))
    if outcome.reason == "interrupted":
        return False
    progress = outcome.progress
    tell("training", step=progress.step, share=1.0)
    facts = {
        "reason": outcome.reason,
        "steps": progress.step,
        "epochs": progress.epoch,
        "seconds": progress.seconds,
        "tokens": progress.tokens,
        "pairs": progress.pairs,
        "peak_memory_mib": round(peak_memory(), 1),
        "memory_before_mib": round(before, 1),
    }
    write_json(trial.path / TRAINED, facts)
    return True


def _telling(tell: Tell) -> Callable[[TrainingProgress], None]:
    """Send the progress of the training, but not more often than every `OFTEN` seconds."""
    from regard.lab.training.stream import TimeLeft

    last, left = [0.0], TimeLeft()

    def on_step(progress: TrainingProgress) -> None:
        """Send the step, the share of the budget, the time left and the latest loss and BLEU."""
        now = time.monotonic()
        if now - last[0] < OFTEN:
            return
        last[0] = now
        # the last known value of each column
        latest = {name: value for row in progress.rows for name, value in row.items() if value is not None}
        tell(
            "training",
            step=progress.step,
            share=progress.share,
            left=left(progress),
            loss=latest.get("train_loss"),
            bleu=latest.get("bleu"),
        )

    return on_step


def _look(run: Run, corpus: Corpus, similarities: list[float], tell: Tell) -> None:
    """Inspect the trained run, once, for the report: attention shares, gradients, alignments of some sentences.

    `similarities` are those of each test source to its nearest training source; they choose these sentences. The
    peak memory of the training is copied, because the report reads it from this file.
    """
    if (run.path / LOOKING).exists():
        return
    from regard.base.texts.text_files import read_json
    from regard.lab.comparison.inspection import inspect

    tell("inspecting")
    peak = read_json(run.path / TRAINED)["peak_memory_mib"]
    write_json(run.path / LOOKING, inspect(run, corpus, similarities) | {"peak_memory_mib": peak})


def _prune(run: Run, corpus: Corpus, tell: Tell) -> None:
    """Measure BLEU without heads, once, in the sweep "prune"."""
    if (run.path / PRUNING).exists():
        return
    from regard.lab.comparison.pruning import pruning

    tell("pruning")
    write_json(run.path / PRUNING, pruning(run, corpus, progress=lambda share: tell("pruning", share=share)))


def _test(study: Study, run: Run, corpus: Corpus, similarities: list[float], tell: Tell) -> None:
    """Translate and evaluate the test pairs.

    It is the last part of a trial, because evaluation.json marks the trial as finished.
    """
    from regard.lab.comparison.study import EVALUATION
    from regard.lab.decoding.search import Search
    from regard.lab.decoding.translation import TranslationOptions
    from regard.lab.evaluation.scores import Training, evaluate, word_frequencies
    from regard.lab.training.preparation import counted_by

    tell("testing")
    counted = study.bleu_tokenizer or counted_by(study.config, corpus)
    training = Training(word_frequencies((pair.target for pair in corpus.train), counted), similarities)
    options = TranslationOptions(Search(beam=study.beam), batch=BATCH)
    measured = evaluate(run, corpus.test, options, training, tokenizer=counted)
    data = measured.to_json() | {"translations": list(measured.hypotheses)}
    write_json(run.path / EVALUATION, data)
    tell("finished", bleu=measured.bleu.score)


def main(arguments: list[str]) -> int:
    """`python -m regard.lab.comparison.trials FOLDER LABEL SEED`: prints lines of JSON; all else goes to stderr."""
    folder, label, seed = Path(arguments[0]), arguments[1], int(arguments[2])
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # all other output to stdout goes to stderr, also that of libraries
    path = folder / "trials" / f"{label}-{seed}"
    try:
        return 0 if run_trial(folder, label, seed, _teller(channel)) else STOPPED
    except KeyboardInterrupt:
        return STOPPED
    except RegardError as error:
        print(error, file=sys.stderr)
        write_json(path / FAILED, {"code": 1, "message": str(error)})
        return 1


def _teller(channel: IO[str]) -> Tell:
    """Send messages over a pipe; if the other end is closed, stop as after SIGTERM."""

    def tell(state: str, **numbers: float | None) -> None:
        try:
            channel.write(json.dumps({"state": state, **numbers}) + "\n")
            channel.flush()
        except OSError:
            os.kill(os.getpid(), signal.SIGTERM)

    return tell


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    raise SystemExit(main(sys.argv[1:]))
