"""`evaluate_run` and `compare_runs`: the quality of trained runs on pairs of their own corpus."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from regard.base.checks import checked
from regard.base.errors import RegardError, nearest
from regard.base.whole_files import write_whole
from regard.lab.comparison.study import EVALUATION, STUDY, TRIALS, read_study
from regard.lab.comparison.trials import TRAINED
from regard.lab.data.corpus import Corpus, Pair
from regard.lab.data.retrieval import without_near
from regard.lab.decoding import TranslationOptions
from regard.lab.evaluation import Evaluation, evaluate
from regard.lab.evaluation.bootstrap import PairedComparison
from regard.lab.evaluation.metrics import bleu_tokenizer, check_tokenizer
from regard.lab.evaluation.scores import Training, paired_comparison
from regard.lab.runs.config import make_config
from regard.lab.runs.run import CONFIG, Run
from regard.lab.training.preparation import read_corpus

SPLITS = ("test", "valid", "train")

#: Called with the run, the number of translated sentences, and the number of all.
Report = Callable[[Run, int, int], object]


@dataclass(frozen=True)
class PairSelection:
    """The pairs of a corpus that runs are evaluated on.

    Args:
        split: "test", "valid" or "train".
        first: Only so many pairs; None: all.
        without_near: Leave out sources that are nearly the same as a training source.

    >>> from regard.lab.data import load_corpus
    >>> from regard.lab import PairSelection
    >>> corpus = load_corpus("copy", size=60)
    >>> pairs, num_left_out = PairSelection("valid", first=2).pairs(corpus)
    >>> pairs == corpus.valid[:2], num_left_out
    (True, 0)
    """

    split: str = "test"
    first: int | None = None
    without_near: bool = False

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise RegardError(f"evaluate: there is no split {self.split!r}. {nearest(self.split, SPLITS)}")

    def pairs(self, corpus: Corpus) -> tuple[tuple[Pair, ...], int]:
        """The pairs, and how many near-duplicates of training sources were left out."""
        pairs = getattr(corpus, self.split)[: self.first]
        if not self.without_near:
            return pairs, 0
        # `without_near` filters the test split
        distinct = without_near(replace(corpus, test=pairs)).test
        return distinct, len(pairs) - len(distinct)


@checked
def evaluate_run(
    run: Run,
    selection: PairSelection | None = None,
    *,
    bleu_tokenizer: str | None = None,
    progress: Report = lambda run, done, total: None,
    **options: Any,
) -> Evaluation:
    """Evaluate a run on pairs of its corpus, and write the result into its folder; `regard evaluate`.

    Args:
        run: From `regard.lab.load_run`.
        selection: The pairs; by default the test split.
        bleu_tokenizer: Tokenizer of sacrebleu for BLEU; by default that of the run.
        progress: Called after each sentence.
        options: Of the translation, by default those of the run: `beam` and other fields of `Search`, `batch`,
            `reading`.

    >>> import tempfile
    >>> from regard import lab
    >>> keys = ["data.corpus=copy", "data.size=60", "tokenizer.kind=words", "model.width=8", "training.steps=1"]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     trained = lab.train(lab.read_config(overrides=keys), folder)
    ...     evaluation = lab.evaluate_run(lab.load_run(folder), lab.PairSelection(first=4), beam=1)
    >>> evaluation.num_sentences, 0 <= evaluation.bleu.score <= 100
    (4, True)
    """
    task = _Task.of(run, selection or PairSelection(), bleu_tokenizer, options)
    return task.evaluate(run, progress)


@dataclass(frozen=True)
class RunComparison:
    """Two runs on the same sentences: the evaluation of each, and the paired bootstrap between them.

    `paired.difference` is the BLEU of the first run minus that of the second.

    >>> from regard.lab import score
    >>> from regard.lab.evaluation.scores import paired_comparison
    >>> references, sources = ["the dog sees a cat", "a cat sees the dog"], ["a", "b"]
    >>> evaluations = score(references, references, sources), score(["no", "yes"], references, sources)
    >>> compared = RunComparison(evaluations, paired_comparison(*evaluations, references))
    >>> round(compared.paired.difference, 6)  # 100 - 0
    100.0
    >>> compared.paired.p_value == 1 / 1001  # the first is better in each of 1,000 resamples
    True
    """

    evaluations: tuple[Evaluation, Evaluation]
    paired: PairedComparison


@checked
def compare_runs(
    run: Run,
    other: Run,
    selection: PairSelection | None = None,
    *,
    bleu_tokenizer: str | None = None,
    progress: Report = lambda run, done, total: None,
    **options: Any,
) -> RunComparison:
    """Evaluate two runs of one corpus on the same pairs; the arguments are those of `evaluate_run`.

    Raises an error if the runs were trained on different corpora.

    >>> import tempfile
    >>> from regard import lab
    >>> keys = ["data.corpus=copy", "data.size=60", "tokenizer.kind=words", "model.width=8", "training.steps=1"]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     paths = {name: f"{folder}/{name}" for name in ("none", "bahdanau")}
    ...     for name, path in paths.items():
    ...         trained = lab.train(lab.read_config(overrides=[*keys, f"model.system={name}"]), path)
    ...     runs = [lab.load_run(path) for path in paths.values()]
    ...     compared = lab.compare_runs(*runs, lab.PairSelection(first=4), beam=1)
    >>> [evaluation.num_sentences for evaluation in compared.evaluations]
    [4, 4]
    """
    task = _Task.of(run, selection or PairSelection(), bleu_tokenizer, options)
    if corpus_of(other).hash != task.corpus.hash:
        raise RegardError(
            f"evaluate: {run.path} and {other.path} were trained on different corpora, so test sentences of one may be "
            "training sentences of the other. Compare runs of the same corpus."
        )
    evaluations = task.evaluate(run, progress), task.evaluate(other, progress)
    return RunComparison(evaluations, paired_comparison(*evaluations, [pair.target for pair in task.pairs]))


@checked
def corpus_of(run: Run) -> Corpus:
    """The corpus that a run was trained on. Raises an error if the corpus has changed since.

    >>> from regard import lab
    >>> run = lab.load_pretrained("bahdanau-en-fr")
    >>> corpus = lab.corpus_of(run)
    >>> corpus.name, corpus.hash == run.settings["hash"]
    ('bible-en-fr', True)
    """
    if not run.config:
        raise RegardError(f"evaluate: {run.path / CONFIG} is missing, so the corpus of the run is not known.")
    comparison = run.path.resolve().parent.parent
    is_trial = run.path.resolve().parent.name == TRIALS and (comparison / STUDY).exists()
    corpus = read_study(comparison).corpus() if is_trial else read_corpus(make_config(run.config).data)
    corpus_hash = run.settings.get("hash")
    if corpus_hash is not None and corpus_hash != corpus.hash:
        raise RegardError(
            f"evaluate: the corpus {corpus.name} is not the one that {run.path} was trained on (its hash differs), so "
            "test sentences may be among its training sentences. Restore the files of that time, or train again."
        )
    return corpus


@dataclass(frozen=True)
class _Task:
    """Pairs to evaluate runs on, with one tokenizer for BLEU.

    `num_left_out` is the number of near-duplicates that are not among the pairs. `options` are those of
    `evaluate_run`, which each run completes by its own.
    """

    selection: PairSelection
    corpus: Corpus
    pairs: Sequence[Pair]
    num_left_out: int
    tokenizer: str
    options: dict[str, Any]

    @staticmethod
    def of(run: Run, selection: PairSelection, tokenizer: str | None, options: dict[str, Any]) -> _Task:
        """The chosen pairs of the run's corpus.

        The tokenizer is the given one, or that of the run, or else that of the script of the training targets.
        """
        if tokenizer is not None:
            check_tokenizer(tokenizer)
        corpus = corpus_of(run)
        tokenizer = tokenizer or run.bleu_tokenizer or bleu_tokenizer(pair.target for pair in corpus.train)
        return _Task(selection, corpus, *selection.pairs(corpus), tokenizer, options)

    def evaluate(self, run: Run, progress: Report) -> Evaluation:
        """Evaluate a run, and write the result into its folder."""
        batching = {name: self.options[name] for name in ("batch", "reading") if name in self.options}
        search = run.search(**{name: value for name, value in self.options.items() if name not in batching})
        training = Training.of(self.corpus.train, self.pairs, self.tokenizer)
        total = len(self.pairs)
        measured = evaluate(
            run,
            self.pairs,
            TranslationOptions(search, **batching),
            training,
            tokenizer=self.tokenizer,
            progress=lambda done: progress(run, done, total),
        )
        measured = replace(measured, left_out=self.num_left_out)
        # A trial of a comparison keeps the evaluation.json of its report.
        is_whole = self.selection == PairSelection() and not (run.path / TRAINED).exists()
        path = run.path / (EVALUATION if is_whole else f"evaluation-{self.selection.split}.json")
        write_whole(path, json.dumps(measured.to_json(), ensure_ascii=False, indent=1) + "\n")
        return measured
