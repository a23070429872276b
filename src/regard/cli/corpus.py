"""`regard analyze --corpus` prints the statistics of every head over all documents of a corpus."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from regard.base.cluster import check_engine
from regard.base.errors import RegardError
from regard.base.whole_files import short_number
from regard.cli.analyze import check_outputs
from regard.cli.options import AnalyzeOptions
from regard.cli.outputs import shown_steps
from regard.hf.text_reader import TextReader
from regard.profiling.corpus import NotSaved, profile_corpus
from regard.profiling.corpus_profile import CorpusProfile
from regard.profiling.documents import Documents, open_corpus
from regard.profiling.examples import examples_to_json
from regard.stats import CAVEAT
from regard.stats.numbering import head_name
from regard.stats.profile import HeadTable
from regard.viewer import Sheet, page_reductions, save_run

#: Heads named for a statistic in the summary.
NUM_HIGHEST = 5
#: Explains the numbers.
LEGEND = (
    "L0.H2 is head 2 of layer 0. Entropy is in nats, reach in tokens, evenness a share of the largest entropy; the "
    "others are shares of the weight, and of |weight| where weights have signs."
)
#: Options that a corpus refuses, by their names on the command line.
OF_SINGLE_TEXTS = {
    **{name: name for name in ("figures", "probe")},
    **{"word": "words", "verify-all": "verify_all", "all-figures": "all_figures"},
}
#: Statistics that are printed.
SHOWN = ("entropy", "evenness", "reach", "first", "special", "previous", "next", "punctuation", "same")


def run(options: AnalyzeOptions) -> None:
    """Profile the corpus, print the table and the documents that were left out, and save a page."""
    _check(options)
    documents, errors = open_corpus(options.texts[0], options.field), Console(stderr=True)
    with shown_steps(errors, f"Loading {options.model}"):
        reader = TextReader.load(options.model)
    unsaved = None
    try:
        profile = _profile_with_bar(reader, documents, options, errors)
    except NotSaved as error:  # its numbers are printed first
        profile, unsaved = error.profile, error
    if profile.table is None:
        reasons = f" The first: {profile.broken[0][1]}" if profile.broken else " All documents are empty."
        raise RegardError(f"analyze: no document of {options.texts[0]} could be read.{reasons}")
    if options.as_json:
        print(json.dumps(profile.to_json() | {"caveat": CAVEAT}, ensure_ascii=False, indent=1), flush=True)
    else:
        _print(Console(), profile, profile.table, options.table)
    if unsaved is not None:
        raise unsaved
    if options.save is not None:
        _save_page(options.save, options, reader, documents, profile, profile.table)


def _check(options: AnalyzeOptions) -> None:
    """Refuse options that do not go with --corpus, and outputs that cannot be written, before the model is loaded."""
    if len(options.texts) != 1 or options.texts[0] == "-":
        raise RegardError("analyze: --corpus takes one file or folder. Put the documents into one file, one per line.")
    for name, attribute in OF_SINGLE_TEXTS.items():
        if getattr(options, attribute):
            raise RegardError(f"analyze: --{name} is for single texts, not for a corpus. Leave it out.")
    check_engine("analyze", options.engine)
    check_outputs(options)
    if options.workers is not None and options.engine == "local":
        raise RegardError("analyze: --workers are those of --engine ray. Leave it out, or name that engine.")


def _profile_with_bar(
    reader: TextReader, documents: Documents, options: AnalyzeOptions, errors: Console
) -> CorpusProfile:
    """Profile the corpus, with a bar of the documents that are done; `errors` says where a stopped run continues."""
    columns = (TextColumn("Reading"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task("", total=None)

        def progress(done: int, count: int) -> None:
            """Show how many documents are done. A first call with some done tells that an earlier run continues."""
            if bar.tasks[task].total is None and done:
                errors.print(f"Continues after {done} of {count} documents.", markup=False)
            bar.update(task, completed=done, total=count)

        execution = {"engine": options.engine, "workers": options.workers, "progress": progress}
        return profile_corpus(reader, documents, options.numbers, options.length, options.save, **execution)


def _save_page(
    folder: Path,
    options: AnalyzeOptions,
    reader: TextReader,
    documents: Documents,
    profile: CorpusProfile,
    table: HeadTable,
) -> None:
    """A page for `regard view`: the statistics of the corpus, over the maps of its first readable document."""
    broken = {number for number, _ in profile.broken}
    first = next(text for number, text in enumerate(documents.read(), 1) if text.strip() and number not in broken)
    title = f"{table.documents} documents; maps of the first"
    result = reader.read(first, options.numbers, options.length or reader.limit, title, also=page_reductions)
    sheet = Sheet.of(result.reading)
    for layer, means in zip(sheet.about["layers"], table.layers, strict=True):
        for number, head in enumerate(layer["heads"]):
            head["values"] |= {
                name: short_number(means.means[name][number]) for name in head["values"] if name in means.means
            }
    if profile.examples is not None:
        for layer, heads in zip(sheet.about["layers"], examples_to_json(profile.examples), strict=True):
            for head, examples in zip(layer["heads"], heads, strict=True):
                head["examples"] = examples
        sheet.about["documents"] = table.documents
    save_run(folder, [sheet])


def _print(console: Console, profile: CorpusProfile, table: HeadTable, every_head: bool) -> None:
    """Print the counts of documents, those that could not be read, and a table of statistics.

    The table has every head with `every_head`, else the heads with the highest values.
    """
    counts = f"{table.documents} documents in one profile; {profile.cut} truncated, {profile.empty} empty, "
    console.print(Text(counts + f"{len(profile.broken)} could not be read."))
    for number, reason in profile.broken:
        console.print(Text(f"! document {number}: {reason}", style="yellow"))
    console.print()
    console.print(_heads(table) if every_head else _highest(table))
    console.print(Text(LEGEND, style="dim"))
    console.print(Text(CAVEAT if every_head else f"{CAVEAT} Every head: --table.", style="dim"))


def _highest(table: HeadTable) -> Table:
    """For each statistic the heads with the highest values."""
    shown = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column()
    for name in (name for name in SHOWN if name in table.layers[0].means):
        heads = [
            (float(v), head_name(layer.number, h)) for layer in table.layers for h, v in enumerate(layer.means[name])
        ]
        line = Text("highest in ", "dim")
        for value, head in sorted(heads, reverse=True)[:NUM_HIGHEST]:
            line.append(f"{head}=", "bold").append(f"{value:.2f}  ", "cyan")
        shown.add_row(name, line)
    return shown


def _heads(table: HeadTable) -> Table:
    """All statistics of every head."""
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    names = [name for name in SHOWN if name in table.layers[0].means]
    for title in ("L", "H", *names):
        shown.add_column(title, justify="right", style="bold" if title == "H" else "")
    for layer in table.layers:
        for head in range(len(layer.means[names[0]])):
            cells = (f"{float(layer.means[name][head]):.2f}" for name in names)
            shown.add_row(str(layer.number) if head == 0 else "", str(head), *cells)
    return shown
