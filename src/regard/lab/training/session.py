"""`train`: one training, from a configuration to a system that translates; `resume_training` continues a saved one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.lab.data.corpus import Corpus
from regard.lab.data.tokenizer import Tokenizer
from regard.lab.models import Translator
from regard.lab.runs.config import Config, read_config
from regard.lab.runs.guards import alone
from regard.lab.runs.run import COMPARISON, STATE, WEIGHTS
from regard.lab.training.fitting import Outcome, fit, quiet
from regard.lab.training.preparation import Prepared, prepare, reconfigured
from regard.lab.training.ranks import process_number
from regard.lab.training.stream import TrainingProgress


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained system: `regard.lab.evaluate` measures it, `regard.lab.load_run(folder)` reads it later.

    Args:
        prepared: The task, the corpus and the tokenizers.
        outcome: How the training ended.
        folder: Of the run; None if nothing was written.

    >>> from regard import lab
    >>> keys = ["data.corpus=copy", "data.size=60", "tokenizer.kind=words", "model.width=8", "training.steps=1"]
    >>> trained = lab.train(lab.read_config(overrides=keys))
    >>> trained.corpus.name, trained.outcome.progress.step, trained.folder is None
    ('copy', 1, True)
    >>> trained.model.source_size == len(trained.source_tokenizer)
    True
    """

    prepared: Prepared
    outcome: Outcome
    folder: Path | None = None

    @property
    def model(self) -> Translator:
        return self.prepared.task.model

    @property
    def corpus(self) -> Corpus:
        return self.prepared.corpus

    @property
    def source_tokenizer(self) -> Tokenizer:
        return self.prepared.source_tokenizer

    @property
    def target_tokenizer(self) -> Tokenizer:
        return self.prepared.target_tokenizer


@checked
def train(
    config: Config,
    out: str | Path | None = None,
    *,
    on_start: Callable[[Prepared], object] = lambda prepared: None,
    on_step: Callable[[TrainingProgress], object] = lambda progress: None,
) -> Trained:
    """Train a system until its budget is used up, or until Ctrl-C; `regard train` on the command line.

    Args:
        config: Of the run, from `read_config` or `make_config`.
        out: The folder of the run; None keeps everything in memory.
        on_start: Called when corpus, vocabularies and model are ready.
        on_step: Called after every step with the state of the training.

    >>> from regard import lab
    >>> config = lab.make_config({
    ...     "data": {"corpus": "copy", "size": 60},
    ...     "tokenizer": {"kind": "words"},
    ...     "model": {"system": "luong_dot", "width": 8},
    ...     "training": {"steps": 2},
    ... })
    >>> trained = lab.train(config)  # lab.train(config, "runs/copy") writes the run
    >>> trained.outcome.reason, lab.evaluate(trained, trained.corpus.test).num_sentences
    ('budget', 6)
    """
    return _trained(config, None if out is None else Path(out), False, on_start, on_step)


@checked
def resume_training(
    out: str | Path,
    overrides: Iterable[str] = (),
    *,
    on_start: Callable[[Prepared], object] = lambda prepared: None,
    on_step: Callable[[TrainingProgress], object] = lambda progress: None,
) -> Trained:
    """Continue the training of a run from its last saved state; `regard train --out DIR --resume`.

    Raises an error if the folder has no saved state, if its tokenizers or its configuration were changed by hand, or
    for an override that the saved state does not allow, such as another corpus, tokenizer or model.

    Args:
        out: The folder of the run.
        overrides: Keys of the configuration that change, as "training.minutes=30".
        on_start: Called when corpus, vocabularies and model are ready.
        on_step: Called after every step with the state of the training.

    >>> import tempfile
    >>> from regard import lab
    >>> keys = ["data.corpus=copy", "data.size=60", "tokenizer.kind=words", "model.width=8", "training.steps=1"]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first = lab.train(lab.read_config(overrides=keys), folder)
    ...     resumed = lab.resume_training(folder, ["training.steps=3"])
    >>> first.outcome.progress.step, resumed.outcome.progress.step
    (1, 3)
    """
    folder = Path(out)
    config = reconfigured(folder, lambda sections: read_config(None, overrides, sections))
    return _trained(config, folder, True, on_start, on_step)


def _trained(
    config: Config,
    folder: Path | None,
    resume: bool,
    on_start: Callable[[Prepared], object],
    on_step: Callable[[TrainingProgress], object],
) -> Trained:
    """Prepare a task and train it, from its saved state with `resume`.

    Only the first process writes, so only it locks and checks the folder.
    """
    is_writer = folder is not None and process_number(config.training) == 0
    with alone(folder, "train") if folder is not None and is_writer else nullcontext():
        if folder is not None and is_writer and not resume:
            _check_new(folder)
        with quiet():
            prepared = prepare(config, folder)
        on_start(prepared)
        return Trained(prepared, fit(prepared.task, resume=resume, on_step=on_step), folder)


def _check_new(folder: Path) -> None:
    """Refuse the folder of a comparison or of another run."""
    if (folder / COMPARISON).exists():
        raise RegardError(
            f"train: {folder} holds a comparison, whose vocabularies a run would overwrite. Give another --out."
        )
    if (folder / WEIGHTS).exists() or (folder / STATE).exists():
        raise RegardError(
            f"train: {folder} already holds a run, and trained weights are not overwritten. Continue it with "
            f"`regard train --out {folder} --resume`, or give another --out."
        )
