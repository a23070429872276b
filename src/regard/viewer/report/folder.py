"""What is in the folder of a comparison so far, read for a report."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.errors import RegardError
from regard.seq2seq.evaluation.bootstrap import bleu_counts
from regard.seq2seq.evaluation.scores import Evaluation
from regard.seq2seq.runs.files import read_json
from regard.seq2seq.runs.run import METRICS, read_metrics

COMPARISON, TRIALS, RETRIEVAL, TEST = "comparison.json", "trials", "retrieval.json", "test.json"
EVALUATION, LOOKING, PRUNING = "evaluation.json", "looking.json", "pruning.json"
TRAINED, FAILED = "trained.json", "failed.json"


@dataclass(frozen=True, eq=False)
class Trial:
    """One system trained from one seed; `evaluation` is None until it has finished."""

    label: str
    seed: int
    metrics: Sequence[Mapping[str, float | None]] = ()
    evaluation: Evaluation | None = None
    looking: Mapping[str, Any] = field(default_factory=dict)
    pruning: Mapping[str, Any] = field(default_factory=dict)
    trained: Mapping[str, Any] = field(default_factory=dict)
    failed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def started(self) -> bool:
        """Whether it has trained at all."""
        return bool(self.metrics)

    @property
    def finished(self) -> bool:
        """Whether it has been evaluated."""
        return self.evaluation is not None


@dataclass(frozen=True)
class Sentences:
    """The test split, and how like the nearest training source every source is where that is known."""

    sources: tuple[str, ...]
    references: tuple[str, ...]
    similarities: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class Study:
    """A comparison as it lies in its folder: what is compared, its trials, the test split and retrieval."""

    path: Path
    about: Mapping[str, Any]
    trials: tuple[Trial, ...]
    retrieval: Mapping[str, Any]
    test: Sentences | None = None

    @cached_property
    def labels(self) -> list[str]:
        """The systems in the order they were asked for."""
        return [system["label"] for system in self.about["systems"]]

    @property
    def baseline(self) -> str:
        """The label of the system that the others are held against; the first where the one named is not there."""
        wanted = self.about.get("baseline")
        named = [each["label"] for each in self.about["systems"] if wanted in (each["label"], each.get("name"))]
        return named[0] if named else self.labels[0]

    @property
    def novel_below(self) -> float:
        """A source is novel if no training source is as similar as this."""
        return float(self.about.get("novel_below", 0.3))

    def of(self, label: str, finished: bool = True) -> list[Trial]:
        """The trials of a system, finished ones unless said."""
        return [trial for trial in self.trials if trial.label == label and (trial.finished or not finished)]

    @cached_property
    def counts(self) -> dict[tuple[str, int], Tensor]:
        """What BLEU needs to know of every test sentence, by (label, seed); none where the references are not known."""
        if self.test is None:
            return {}
        return {
            (trial.label, trial.seed): bleu_counts(
                trial.evaluation.hypotheses, self.test.references, trial.evaluation.tokenizer
            )
            for trial in self.trials
            if trial.evaluation is not None
        }


def read_study(path: Path) -> Study:
    """Read the folder of a comparison; whatever is not there yet is left out."""
    if not (path / COMPARISON).exists():
        raise RegardError(
            f"write_report: {path} has no {COMPARISON}, so it is no comparison. Give the folder that `regard compare` "
            "wrote."
        )
    about = read_json(path / COMPARISON)
    if not about.get("systems") or not about.get("seeds"):
        raise RegardError(
            f"write_report: {path / COMPARISON} names no systems or no seeds, so there is nothing to show."
        )
    trials = tuple(
        read_trial(path / TRIALS / f"{system['label']}-{seed}", system["label"], seed)
        for system in about["systems"]
        for seed in about["seeds"]
    )
    retrieval = _optional(path / RETRIEVAL)
    return Study(path, about, trials, retrieval, _sentences(path, about, trials, retrieval))


def read_trial(path: Path, label: str, seed: int) -> Trial:
    """What is in the folder of one run so far."""
    found = _optional(path / EVALUATION)
    evaluation = _evaluation(path / EVALUATION, found) if found else None
    others = (_optional(path / name) for name in (LOOKING, PRUNING, TRAINED, FAILED))
    return Trial(label, seed, read_metrics(path / METRICS), evaluation, *others)


def _evaluation(path: Path, found: Mapping[str, Any]) -> Evaluation:
    data = dict(found)
    translations = data.pop("translations", None)
    if translations and not data.get("hypotheses"):
        data["hypotheses"] = translations
    try:
        return Evaluation.from_json({name: data[name] for name in data if name in Evaluation.__dataclass_fields__})
    except RegardError as error:
        raise RegardError(f"write_report: {path} cannot be read: {error}") from None


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _sentences(
    path: Path, about: Mapping[str, Any], trials: Sequence[Trial], retrieval: Mapping[str, Any]
) -> Sentences | None:
    """The test split, where it is the one that the trials were evaluated on."""
    done = [trial.evaluation for trial in trials if trial.evaluation is not None]
    texts = _optional(path / TEST) or (_test_split(about) if done else {})
    if not texts:
        return None
    references = tuple(texts["references"])
    digest = hashlib.sha256("\n".join(references).encode()).hexdigest()
    if any(digest != each.references_hash or len(each.hypotheses) != len(references) for each in done):
        return None
    similarities = tuple(retrieval.get("similarities") or ())
    return Sentences(tuple(texts["sources"]), references, similarities if len(similarities) == len(references) else ())


def _test_split(about: Mapping[str, Any]) -> dict[str, Any]:
    """The test split of a corpus that is known by name; nothing where it cannot be loaded any more."""
    from regard.data.loading import load_corpus

    try:
        corpus = load_corpus(about["data"])
    except (RegardError, KeyError, TypeError, OSError):
        return {}
    return {"sources": [pair.source for pair in corpus.test], "references": [pair.target for pair in corpus.test]}
