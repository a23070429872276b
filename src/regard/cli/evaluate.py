"""`regard evaluate`: how good a run is on sentences it was not trained on, alone or against another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from regard.cli.outputs import check_folder
from regard.cli.translate import load, search_of
from regard.data.retrieval import NEAR, without_near
from regard.errors import RegardError, nearest
from regard.seq2seq.comparison.trials import TRAINED
from regard.seq2seq.decoding.translation import Wanted
from regard.seq2seq.evaluation.bootstrap import Comparison
from regard.seq2seq.evaluation.metrics import Metric, bleu_tokenizer, check_tokenizer
from regard.seq2seq.evaluation.scores import Bucket, Evaluation, Training, compare, evaluate
from regard.seq2seq.runs.files import write_whole

if TYPE_CHECKING:
    from regard.data.corpus import Corpus, Pair
    from regard.seq2seq.runs.run import Run

SPLITS = ("test", "valid", "train")


@dataclass(frozen=True)
class Wish:
    """What was asked for on the command line."""

    run: str
    split: str = "test"
    against: str | None = None
    beam: int | None = None
    batch: int = 32
    reading: str = "output"
    limit: int | None = None
    as_json: bool = False
    without_near: bool = False
    bleu_tokenizer: str | None = None


def run(wish: Wish) -> None:
    """Translate the split, print the table, and write it into the folder of the run as JSON."""
    if wish.split not in SPLITS:
        raise RegardError(f"evaluate: there is no split {wish.split!r}. {nearest(wish.split, SPLITS)}")
    if wish.bleu_tokenizer is not None:
        check_tokenizer(wish.bleu_tokenizer)
    mine = load(wish.run, None)
    check_folder("evaluate", "the run", mine.path)
    corpus = corpus_of(mine)
    counted = wish.bleu_tokenizer or mine.bleu_tokenizer or bleu_tokenizer(pair.target for pair in corpus.train)
    wish = replace(wish, bleu_tokenizer=counted)
    pairs = _pairs(wish, corpus)
    measured = _measured(wish, mine, corpus, pairs)
    against = None if wish.against is None else _against(wish, measured, corpus, pairs)
    if wish.as_json:
        print(json.dumps(measured.to_json(), ensure_ascii=False, indent=1))
    else:
        print_evaluation(Console(), measured, str(mine.path))
    if against is not None and not wish.as_json:
        print_comparison(Console(), against, wish.run, wish.against or "")


def _pairs(wish: Wish, corpus: Corpus) -> tuple[Pair, ...]:
    """What is tested."""
    pairs = getattr(corpus, wish.split)[: wish.limit]
    return without_near(replace(corpus, test=pairs)).test if wish.without_near else pairs


def corpus_of(run: Run) -> Corpus:
    """The corpus that a run was trained on; it must still be what it was."""
    from regard.seq2seq.comparison.study import STUDY, TRIALS, read_study
    from regard.seq2seq.runs.config import make_config
    from regard.seq2seq.runs.run import CONFIG
    from regard.seq2seq.training.preparation import read_corpus

    if not run.config:
        raise RegardError(f"evaluate: {run.path / CONFIG} is missing, so the corpus of the run is not known.")
    comparison = run.path.resolve().parent.parent
    of_trial = run.path.resolve().parent.name == TRIALS and (comparison / STUDY).exists()
    corpus = read_study(comparison).corpus() if of_trial else read_corpus(make_config(run.config).data)
    known = run.settings.get("hash")
    if known is not None and known != corpus.hash:
        raise RegardError(
            f"evaluate: the corpus {corpus.name} is not the one that {run.path} was trained on (its hash differs), so "
            "test sentences may have been trained on. Bring back the files of that time, or train anew."
        )
    return corpus


def _measured(wish: Wish, run: Run, corpus: Corpus, pairs: Sequence[Pair]) -> Evaluation:
    wanted = Wanted(search_of(run, beam=wish.beam), batch=wish.batch, reading=wish.reading)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"Translating with {run.path.name}", total=len(pairs))
        measured = evaluate(
            run,
            pairs,
            wanted,
            Training.of(corpus.train, pairs, wish.bleu_tokenizer),
            tokenizer=wish.bleu_tokenizer,
            progress=lambda done: progress.update(task, completed=done),
        )
    if wish.without_near:
        measured = replace(measured, left_out=len(getattr(corpus, wish.split)[: wish.limit]) - len(pairs))
    write_whole(run.path / _file(wish, run), json.dumps(measured.to_json(), ensure_ascii=False, indent=1) + "\n")
    return measured


def _file(wish: Wish, run: Run) -> str:
    """Where the result goes; a trial of a comparison keeps the evaluation.json that its report is made of."""
    is_all = wish.split == "test" and wish.limit is None and not wish.without_near
    is_whole = is_all and not (run.path / TRAINED).exists()
    return "evaluation.json" if is_whole else f"evaluation-{wish.split}.json"


def _against(wish: Wish, measured: Evaluation, corpus: Corpus, pairs: Sequence[Pair]) -> Comparison:
    other = load(wish.against, None)
    if corpus_of(other).hash != corpus.hash:
        raise RegardError(
            f"evaluate: {wish.run} and {wish.against} were trained on different corpora; a test of one may be training "
            "text of the other. Compare runs of the same corpus."
        )
    theirs = _measured(wish, other, corpus, pairs)
    return compare(measured, theirs, [pair.target for pair in pairs])


def print_evaluation(console: Console, measured: Evaluation, title: str) -> None:
    """Everything, for people."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value, note in _rows(measured):
        table.add_row(name, value, note)
    console.print(table)
    console.print(f"sacreBLEU {measured.bleu.signature}", style="dim", soft_wrap=True)
    for name, buckets in (("words of the source", measured.by_length), ("similarity", measured.by_similarity)):
        if buckets:
            console.print()
            console.print(bucket_table(name, buckets, measured.retrieval if name == "similarity" else ()))
    if measured.by_frequency:
        console.print()
        console.print(frequency_table(measured))


def _rows(measured: Evaluation) -> list[tuple[str, str, str]]:
    low, high = measured.interval
    rows = [("sentences", f"{measured.num_sentences}", f"{measured.skipped} skipped" if measured.skipped else "")]
    if measured.left_out:
        rows.append(("left out", f"{measured.left_out}", f"sources more than {NEAR} similar to one of the training"))
    note = f"95 % interval {low:.1f} to {high:.1f}; tokenizer {measured.tokenizer}"
    rows.append(("BLEU", f"{measured.bleu.score:.2f}", note))
    if (novel := measured.novel) is not None:
        rows.append(("BLEU, novel", f"{novel.bleu:.2f}", f"{novel.count} sources unlike any of the training"))
    if measured.retrieval:
        rows.append(("BLEU, copied", f"{measured.retrieval[0].bleu:.2f}", "the target of the nearest training source"))
    rows += [(name, f"{metric.score:.2f}", note) for name, metric, note in _others(measured)]
    rows.append(("exact match", f"{measured.exact:.3f}", ""))
    rows.append(("length ratio", f"{measured.length_ratio:.3f}", "tokens of the translations / of the references"))
    if measured.perplexity is not None:
        rows.append(("perplexity", f"{measured.perplexity:.2f}", "of the reference pieces"))
    if measured.alignment_error_rate is not None:
        note = f"of the attention, read at the {measured.reading}"
        rows.append(("alignment error", f"{measured.alignment_error_rate:.3f}", note))
    if measured.sentences_per_second is not None:
        beam = (measured.search or {}).get("beam")
        rows.append(("sentences / s", f"{measured.sentences_per_second:.1f}", f"beam {beam}"))
    return rows


def _others(measured: Evaluation) -> list[tuple[str, Metric, str]]:
    return [("chrF", measured.chrf, ""), ("TER", measured.ter, "lower is better")]


def bucket_table(name: str, buckets: Sequence[Bucket], retrieval: Sequence[Bucket] = ()) -> Table:
    """BLEU by bucket, with counts and intervals, and beside it that of copying from the training text."""
    table = Table(name, box=None, padding=(0, 2, 0, 0))
    for column in ("sentences", "BLEU", "95 % interval", *(["copied"] if retrieval else [])):
        table.add_column(column, justify="right")
    copied = {each.label: f"{each.bleu:.1f}" for each in retrieval}
    for each in buckets:
        numbers = (str(each.count), f"{each.bleu:.1f}", f"{each.low:.1f} to {each.high:.1f}")
        table.add_row(each.label, *numbers, *([copied.get(each.label, "")] if retrieval else []))
    return table


def frequency_table(measured: Evaluation) -> Table:
    """How well words are translated, by how often they were in the training targets."""
    table = Table("seen in training", box=None, padding=(0, 2, 0, 0))
    for column in ("words", "recall", "precision", "F1"):
        table.add_column(column, justify="right")
    for each in measured.by_frequency:
        table.add_row(each.label, str(each.expected), *(f"{x:.3f}" for x in (each.recall, each.precision, each.f1)))
    return table


def print_comparison(console: Console, found: Comparison, mine: str, theirs: str) -> None:
    """Two systems on the same sentences."""
    low, high = found.interval
    console.print()
    console.print(f"{mine}: BLEU {found.bleu[0]:.2f}; {theirs}: BLEU {found.bleu[1]:.2f}", markup=False)
    console.print(
        f"difference {found.difference:+.2f}, 95 % interval {low:+.2f} to {high:+.2f}, p = {found.p_value:.3f} "
        f"(paired bootstrap of the sentences, {found.resamples} resamples)",
        markup=False,
    )
    console.print(
        "This compares two single trainings; another seed of either may reverse it. See regard compare --seeds 3."
    )
