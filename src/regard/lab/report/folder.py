"""Reads the folder of a comparison: its settings, its trials, the test split and the retrieval baseline."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.base.errors import RegardError
from regard.base.texts.text_files import read_json
from regard.lab.evaluation.bootstrap import bleu_counts
from regard.lab.evaluation.scores import Evaluation
from regard.lab.runs.run import METRICS, read_metrics

COMPARISON, TRIALS, RETRIEVAL, TEST = "comparison.json", "trials", "retrieval.json", "test.json"
EVALUATION, LOOKING, PRUNING = "evaluation.json", "looking.json", "pruning.json"
TRAINED, FAILED = "trained.json", "failed.json"


@dataclass(frozen=True, eq=False)
class Trial:
    """One system trained from one seed. `evaluation` is None until the trial has finished.

    `metrics` are the rows of metrics.csv, and `looking`, `pruning`, `trained` and `failed` the files of these names:
    what attention was found to do, the quality without heads, the sums of the training, and an error. {} without one.
    """

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
        """Whether the training has started."""
        return bool(self.metrics)

    @property
    def finished(self) -> bool:
        """Whether the trial has been evaluated."""
        return self.evaluation is not None


@dataclass(frozen=True)
class Sentences:
    """The test split, and the similarity of each source to the nearest training source, if it is known."""

    sources: tuple[str, ...]
    references: tuple[str, ...]
    similarities: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class Study:
    """A comparison: what is compared (`about`), its trials, the test split and the retrieval baseline."""

    path: Path
    about: Mapping[str, Any]
    trials: tuple[Trial, ...]
    retrieval: Mapping[str, Any]
    test: Sentences | None = None

    @cached_property
    def labels(self) -> list[str]:
        """The labels of the systems, in the order of the command."""
        return [system["label"] for system in self.about["systems"]]

    @property
    def baseline(self) -> str:
        """The label of the baseline, or of the first system if the baseline is not part of the comparison."""
        name = self.about.get("baseline")
        systems = [system for system in self.about["systems"] if name in (system["label"], system.get("name"))]
        return systems[0]["label"] if systems else self.labels[0]

    @property
    def novel_below(self) -> float:
        """A source is novel if its similarity to every training source is below this."""
        return float(self.about.get("novel_below", 0.3))

    def of(self, label: str, finished: bool = True) -> list[Trial]:
        """The finished trials of a system; with `finished=False` all its trials."""
        return [trial for trial in self.trials if trial.label == label and (trial.finished or not finished)]

    @cached_property
    def counts(self) -> dict[tuple[str, int], Tensor]:
        """The n-gram counts for BLEU of all test sentences, by (label, seed); empty without known references."""
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
    """Read the folder of a comparison. Missing files are skipped."""
    if not (path / COMPARISON).exists():
        raise RegardError(
            f"write_report: {path} has no {COMPARISON}, so it is not a comparison. Give a folder that `regard compare` "
            "wrote."
        )
    about = read_json(path / COMPARISON)
    if not about.get("systems") or not about.get("seeds"):
        raise RegardError(f"write_report: {path / COMPARISON} has no systems or no seeds, so there is nothing to show.")
    trials = tuple(
        read_trial(path / TRIALS / f"{system['label']}-{seed}", system["label"], seed)
        for system in about["systems"]
        for seed in about["seeds"]
    )
    retrieval = _optional(path / RETRIEVAL)
    return Study(path, about, trials, retrieval, _sentences(path, about, trials, retrieval))


def read_trial(path: Path, label: str, seed: int) -> Trial:
    """Read the folder of one run. Missing files are skipped."""
    fields = _optional(path / EVALUATION)
    evaluation = _evaluation(path / EVALUATION, fields) if fields else None
    others = (_optional(path / name) for name in (LOOKING, PRUNING, TRAINED, FAILED))
    return Trial(label, seed, read_metrics(path / METRICS), evaluation, *others)


def _evaluation(path: Path, fields: Mapping[str, Any]) -> Evaluation:
    """The evaluation in evaluation.json, whose content are `fields`; its texts are "hypotheses" or "translations"."""
    data = dict(fields)
    translations = data.pop("translations", None)
    if translations and not data.get("hypotheses"):
        data["hypotheses"] = translations
    try:
        return Evaluation.from_json({name: data[name] for name in data if name in Evaluation.__dataclass_fields__})
    except RegardError as error:
        raise RegardError(f"write_report: {path} cannot be read: {error}") from None


def _optional(path: Path) -> dict[str, Any]:
    """The content of a JSON file; {} if there is none."""
    return read_json(path) if path.exists() else {}


def _sentences(
    path: Path, about: Mapping[str, Any], trials: Sequence[Trial], retrieval: Mapping[str, Any]
) -> Sentences | None:
    """The test split, if it is the split on which the trials were evaluated."""
    evaluations = [trial.evaluation for trial in trials if trial.evaluation is not None]
    texts = _optional(path / TEST) or (_test_split(about) if evaluations else {})
    if not texts:
        return None
    references = tuple(texts["references"])
    digest = hashlib.sha256("\n".join(references).encode()).hexdigest()
    if any(digest != e.references_hash or len(e.hypotheses) != len(references) for e in evaluations):
        return None
    similarities = tuple(retrieval.get("similarities") or ())
    return Sentences(tuple(texts["sources"]), references, similarities if len(similarities) == len(references) else ())


def _test_split(about: Mapping[str, Any]) -> dict[str, Any]:
    """The test split of a named corpus, for a folder without test.json; empty if it cannot be loaded."""
    from regard.lab.data.loading import load_corpus

    try:
        corpus = load_corpus(about["data"])
    except (RegardError, KeyError, TypeError, OSError):
        return {}
    return {"sources": [pair.source for pair in corpus.test], "references": [pair.target for pair in corpus.test]}
