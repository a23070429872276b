"""`regard evaluate`: evaluate a run on held-out sentences, alone or against another run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from regard.cli.options import EvaluateOptions
from regard.cli.outputs import check_folder
from regard.lab.commands.translate import load
from regard.lab.data.retrieval import NEAR
from regard.lab.evaluation.bootstrap import PairedComparison
from regard.lab.evaluation.metrics import check_tokenizer
from regard.lab.evaluation.scores import Bucket, Evaluation

if TYPE_CHECKING:
    from regard.lab import Run


def run(settings: EvaluateOptions) -> None:
    """Evaluate the run, which writes the result into its folder, and print the table or JSON."""
    from regard.lab import PairSelection, compare_runs, evaluate_run

    selection = PairSelection(settings.split, settings.limit, settings.without_near)
    if settings.bleu_tokenizer is not None:
        check_tokenizer(settings.bleu_tokenizer)
    trained = load(settings.run, None)
    check_folder("evaluate", "the run", trained.path)
    options = {
        "beam": settings.beam,
        "batch": settings.batch,
        "reading": settings.reading,
        "bleu_tokenizer": settings.bleu_tokenizer,
    }
    paired = None
    with _bars() as progress:
        if settings.against is None:
            measured = evaluate_run(trained, selection, progress=progress, **options)
        else:
            compared = compare_runs(trained, load(settings.against, None), selection, progress=progress, **options)
            measured, paired = compared.evaluations[0], compared.paired
    if settings.as_json:
        print(json.dumps(measured.to_json(), ensure_ascii=False, indent=1))
        return
    print_evaluation(Console(), measured, str(trained.path))
    if paired is not None:
        print_comparison(Console(), paired, settings.run, settings.against or "")


@contextmanager
def _bars() -> Iterator[Callable[[Run, int, int], None]]:
    """A bar for each run that translates, as the `progress` of `evaluate_run`."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks: dict[Path, TaskID] = {}

        def show(run: Run, done: int, total: int) -> None:
            """Update the bar of a run; the first call of a run makes its bar."""
            if run.path not in tasks:
                tasks[run.path] = progress.add_task(f"Translating with {run.path.name}", total=total)
            progress.update(tasks[run.path], completed=done)

        yield show


def print_evaluation(console: Console, measured: Evaluation, title: str) -> None:
    """Print the evaluation as tables."""
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
    """The rows of the table of an evaluation: name, value, note."""
    low, high = measured.interval
    rows = [("sentences", f"{measured.num_sentences}", f"{measured.skipped} skipped" if measured.skipped else "")]
    if measured.left_out:
        rows.append(("left out", f"{measured.left_out}", f"sources with similarity above {NEAR} to a training source"))
    note = f"95 % interval {low:.1f} to {high:.1f}; tokenizer {measured.tokenizer}"
    rows.append(("BLEU", f"{measured.bleu.score:.2f}", note))
    if (novel := measured.novel) is not None:
        rows.append(("BLEU, novel", f"{novel.bleu:.2f}", f"{novel.count} sources unlike every training source"))
    if measured.retrieval:
        # the first of these buckets has all sentences
        rows.append(("BLEU, copied", f"{measured.retrieval[0].bleu:.2f}", "the target of the nearest training source"))
    rows.append(("chrF", f"{measured.chrf.score:.2f}", ""))
    rows.append(("TER", f"{measured.ter.score:.2f}", "lower is better"))
    rows.append(("exact match", f"{measured.exact:.3f}", ""))
    rows.append(("length ratio", f"{measured.length_ratio:.3f}", "tokens of the translations / of the references"))
    if measured.perplexity is not None:
        rows.append(("perplexity", f"{measured.perplexity:.2f}", "of the reference pieces"))
    if measured.alignment_error_rate is not None:
        note = f"of the attention at the {measured.reading}"
        rows.append(("alignment error", f"{measured.alignment_error_rate:.3f}", note))
    if measured.sentences_per_second is not None:
        beam = (measured.search or {}).get("beam")
        rows.append(("sentences / s", f"{measured.sentences_per_second:.1f}", f"beam {beam}"))
    return rows


def bucket_table(name: str, buckets: Sequence[Bucket], retrieval: Sequence[Bucket] = ()) -> Table:
    """BLEU by bucket, with counts and intervals, and the BLEU of copying from the training text.

    `name` is the head of the first column. `retrieval` are the buckets of copying; without them that column is missing.
    """
    table = Table(name, box=None, padding=(0, 2, 0, 0))
    for column in ("sentences", "BLEU", "95 % interval", *(["copied"] if retrieval else [])):
        table.add_column(column, justify="right")
    copied = {each.label: f"{each.bleu:.1f}" for each in retrieval}
    for each in buckets:
        numbers = (str(each.count), f"{each.bleu:.1f}", f"{each.low:.1f} to {each.high:.1f}")
        table.add_row(each.label, *numbers, *([copied.get(each.label, "")] if retrieval else []))
    return table


def frequency_table(measured: Evaluation) -> Table:
    """The quality of words by their frequency in the training targets."""
    table = Table("seen in training", box=None, padding=(0, 2, 0, 0))
    for column in ("words", "recall", "precision", "F1"):
        table.add_column(column, justify="right")
    for each in measured.by_frequency:
        table.add_row(each.label, str(each.expected), *(f"{x:.3f}" for x in (each.recall, each.precision, each.f1)))
    return table


def print_comparison(console: Console, found: PairedComparison, mine: str, theirs: str) -> None:
    """Print the comparison of two runs on the same sentences; `mine` and `theirs` are their names."""
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
