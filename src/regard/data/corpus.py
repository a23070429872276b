"""Corpora: pairs of sentences in three splits, invented, embedded in the package, or brought by the user."""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from regard.checks import checked
from regard.data.words import cut
from regard.errors import RegardError, first_few, nearest

if TYPE_CHECKING:
    from regard.data.tokenizer import Tokenizer

__all__ = ["Corpus", "Pair", "encode_pairs", "load_corpus", "split_pairs"]

#: Fewer pairs than this cannot be split into three.
FEWEST = 10
#: Most words and characters of a side, where no other bound is given.
MOST_WORDS, MOST_CHARACTERS = 1000, 10_000
Path = str | os.PathLike[str]


@dataclass(frozen=True)
class Pair:
    """A sentence and its translation.

    `id` says where they are from (a verse, a line); `gold` holds (source word, target word) where the
    true alignment is known.

    >>> from regard.data import Pair
    >>> Pair("the house", "das kleine Haus", gold=frozenset({(0, 0), (1, 2)})).swapped.gold == {(0, 0), (2, 1)}
    True
    """

    source: str
    target: str
    id: str = ""
    gold: frozenset[tuple[int, int]] | None = None

    @property
    def swapped(self) -> Pair:
        """The pair in the other direction."""
        gold = None if self.gold is None else frozenset((j, i) for i, j in self.gold)
        return Pair(self.target, self.source, self.id, gold)

    @property
    def words(self) -> int:
        """Words of the longer side."""
        return max(len(cut(self.source)), len(cut(self.target)))


@dataclass(frozen=True)
class Corpus:
    """Pairs in three splits; `skipped` counts what was left out, by reason.

    >>> from regard.data import Corpus, Pair
    >>> one, two, three = (Pair(word, word.upper()) for word in "abc")
    >>> corpus = Corpus("letters", "small", "capital", (one,), (two,), (three,))
    >>> corpus.swapped.train[0].source, corpus.swapped.swapped.hash == corpus.hash
    ('A', True)
    """

    name: str
    source_language: str
    target_language: str
    train: tuple[Pair, ...]
    valid: tuple[Pair, ...]
    test: tuple[Pair, ...]
    skipped: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def hash(self) -> str:
        """sha256 of every sentence, in order and by split: two reports with the same hash saw the same data."""
        digest = hashlib.sha256()
        for split in (self.train, self.valid, self.test):
            digest.update(len(split).to_bytes(8, "big"))
            for text in (text for pair in split for text in (pair.source, pair.target)):
                content = text.encode("utf-8", "surrogatepass")
                digest.update(len(content).to_bytes(8, "big") + content)
        return digest.hexdigest()

    @property
    def swapped(self) -> Corpus:
        """The corpus in the other direction, with the same splits."""
        train, valid, test = (tuple(pair.swapped for pair in split) for split in (self.train, self.valid, self.test))
        mirrored = replace(self, source_language=self.target_language, target_language=self.source_language)
        return replace(mirrored, train=train, valid=valid, test=test)

    def describe(self) -> str:
        """One line: sizes, and what was left out and why."""
        sizes = f"{self.name}: {len(self.train)} training, {len(self.valid)} validation, {len(self.test)} test pairs"
        left_out = ", ".join(f"{count} {reason}" for reason, count in self.skipped.items() if count)
        return f"{sizes}; left out: {left_out}." if left_out else f"{sizes}."


@checked
def load_corpus(
    spec: Path | Sequence[Path] | Mapping[str, Path | Sequence[Path]],
    *,
    size: int = 20_000,
    valid: int | None = None,
    test: int | None = None,
    max_words: int | None = None,
    seed: int = 0,
    fields: tuple[str, str] = ("source", "target"),
    languages: tuple[str, str] = ("source", "target"),
) -> Corpus:
    """A corpus by name or from files.

    - "copy", "reverse", "grammar": `size` invented pairs, drawn from `seed`.
    - "bible-en-fr": embedded, at most 20 words; "bible-en-es" and others once `regard data` has built
      them. Their splits are fixed by verse. Any direction: "bible-fr-en".
    - two text files of one sentence a line; one .tsv; one .jsonl with `fields`; a folder that
      `datasets` saved. Split by a hash of (`seed`, source), so that a source is in one split alone:
      `valid` and `test` pairs, a tenth each but at most 1,000 unless said.
    - {"train": files, "valid": files, "test": files}: splits of the user's own.

    Pairs of more than `max_words` words on a side are left out, and counted in `skipped`. Without it the bounds are
    1,000 words and 10,000 characters: a longer line is a fault of the file, and `skipped` names it.

    >>> corpus = load_corpus("reverse", size=100)
    >>> corpus.describe()
    'reverse: 80 training, 10 validation, 10 test pairs.'
    """
    if isinstance(spec, Mapping):
        return _own_splits(spec, max_words, fields, languages)
    if isinstance(spec, str) and (found := re.fullmatch(r"bible-([a-z]{2})-([a-z]{2})", spec)):
        from regard.data.bible import load_bible

        return load_bible(found[1], found[2], max_words)
    name, skipped = _name(spec), Counter()
    if isinstance(spec, str) and spec in _tasks():
        from regard.data.synthetic import synthetic_pairs

        pairs, languages = synthetic_pairs(spec, size, seed), (spec, spec)
    else:
        pairs, skipped = _read(spec, fields)
    pairs, long = _short(pairs, max_words)
    train, valid_pairs, test_pairs = split_pairs(pairs, valid, test, seed)
    return Corpus(name, *languages, train, valid_pairs, test_pairs, dict(skipped + long))


@checked
def split_pairs(
    pairs: Sequence[Pair], valid: int | None = None, test: int | None = None, seed: int = 0
) -> tuple[tuple[Pair, ...], tuple[Pair, ...], tuple[Pair, ...]]:
    """Training, validation and test pairs, by a hash of (`seed`, source).

    All pairs of one source fall into one split, whatever their order, and adding pairs moves few of the others. Sources
    that differ only in spaces, or in how Unicode writes the same letters, count as equal.

    >>> from regard.data import Pair, split_pairs
    >>> splits = split_pairs([Pair(f"source {n % 50}", f"target {n}") for n in range(100)])
    >>> [len(split) for split in splits]
    [80, 10, 10]
    >>> len(set.intersection(*({pair.source for pair in split} for split in splits)))
    0
    """
    share = min(1000, len(pairs) // 10)
    valid, test = share if valid is None else valid, share if test is None else test
    if len(pairs) < FEWEST or min(valid, test) < 1 or valid + test >= len(pairs):
        raise RegardError(
            f"load_corpus: {len(pairs)} pairs are too few for {valid} of validation and {test} of test and some to "
            f"learn from. Give at least {FEWEST} pairs, and hold out fewer of them, but at least 1 for each."
        )
    groups: dict[str, list[int]] = {}
    for number, pair in enumerate(pairs):
        groups.setdefault(_normalized(pair.source), []).append(number)
    ranked = sorted(
        groups.values(), key=lambda numbers: stable_draw(seed, min(pairs[n].source.strip() for n in numbers))
    )
    held: list[set[int]] = [set(), set()]
    for numbers in ranked:
        for chosen, wanted in zip(held, (test, valid), strict=True):
            if len(chosen) + len(numbers) <= wanted:
                chosen.update(numbers)
                break
    in_test, in_valid = held
    held_out = in_test | in_valid
    if not in_valid or not in_test:
        raise RegardError(
            f"load_corpus: {len(pairs)} pairs have {len(groups)} different sources, too few to hold {valid} and {test} "
            "pairs out without a source on both sides. Give more text, or splits of your own."
        )
    return (
        tuple(pair for number, pair in enumerate(pairs) if number not in held_out),
        tuple(pairs[number] for number in sorted(in_valid)),
        tuple(pairs[number] for number in sorted(in_test)),
    )


def _normalized(text: str) -> str:
    """A text without the differences that a tokenizer ignores: in spaces, and in how Unicode writes a letter."""
    return " ".join(text.split()) if text.isascii() else " ".join(unicodedata.normalize("NFKC", text).split())


@checked
def encode_pairs(pairs: Iterable[Pair], source: Tokenizer, target: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """Both sides of every pair as ids, what `Batches` takes.

    >>> from regard.data import Pair, Words, encode_pairs
    >>> small, capital = Words(["a", "b"]), Words(["A", "B"])
    >>> encode_pairs([Pair("a b", "B")], small, capital)
    [([4, 5], [5])]
    """
    return [(source.encode(pair.source), target.encode(pair.target)) for pair in pairs]


def stable_draw(seed: int, text: str) -> bytes:
    """A number by chance that belongs to a text: the same on every machine."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16, key=str(seed).encode()).digest()


def _short(pairs: list[Pair], max_words: int | None) -> tuple[list[Pair], Counter[str]]:
    if max_words is None:
        return _without_overlong(pairs)
    kept = [pair for pair in pairs if pair.words <= max_words]
    return kept, Counter({f"longer than {max_words} words": len(pairs) - len(kept)})


def _without_overlong(pairs: list[Pair]) -> tuple[list[Pair], Counter[str]]:
    """Leave out lines that are no sentences: a batch is padded to its longest line, and could fill the memory."""

    def fits(pair: Pair) -> bool:
        characters = max(len(pair.source), len(pair.target))
        return characters <= MOST_WORDS or (characters <= MOST_CHARACTERS and pair.words <= MOST_WORDS)

    kept = [pair for pair in pairs if fits(pair)]
    if len(kept) == len(pairs):
        return pairs, Counter()
    lines = line_names(pair for pair in pairs if not fits(pair))
    reason = f"longer than {MOST_WORDS:,} words or {MOST_CHARACTERS:,} characters{lines}"
    return kept, Counter({reason: len(pairs) - len(kept)})


def line_names(pairs: Iterable[Pair]) -> str:
    """The lines that pairs are from, in brackets; empty if they have none.

    >>> line_names([Pair("a", "b", "17"), Pair("a", "b", "30")])
    ' (17, 30)'
    """
    names = first_few(pair.id for pair in pairs if pair.id)
    return f" ({names})" if names else ""


def fitting(corpus: Corpus, source: Tokenizer, target: Tokenizer, most: int) -> Corpus:
    """The corpus without training and validation pairs of more than `most` pieces on a side; `skipped` names them.

    >>> from regard.data import Words
    >>> words, pairs = Words(["a"]), (Pair("a", "a"), Pair("a a a", "a", "2"))
    >>> fitting(Corpus("letters", "x", "y", pairs, pairs[:1], pairs), words, words, most=2).describe()
    'letters: 1 training, 1 validation, 2 test pairs; left out: 1 of more than 2 pieces (2).'
    """
    kept = [fitting_pairs(split, source, target, most) for split in (corpus.train, corpus.valid)]
    whole = corpus.train + corpus.valid
    if sum(map(len, kept)) == len(whole):
        return corpus
    if not kept[0]:
        raise RegardError(f"load_corpus: every training pair of {corpus.name} has more than {most} pieces on a side.")
    inside = {*map(id, (pair for split in kept for pair in split))}
    outside = [pair for pair in whole if id(pair) not in inside]
    skipped = {**corpus.skipped, f"of more than {most:,} pieces{line_names(outside)}": len(outside)}
    return replace(corpus, train=kept[0], valid=kept[1], skipped=skipped)


def fitting_pairs(pairs: Iterable[Pair], source: Tokenizer, target: Tokenizer, most: int) -> tuple[Pair, ...]:
    """The pairs with at most `most` pieces on each side."""

    def fits(text: str, tokenizer: Tokenizer) -> bool:
        return (
            len(text) < most or len(tokenizer.encode(text)) <= most
        )  # each piece has a character, except a first space

    return tuple(pair for pair in pairs if fits(pair.source, source) and fits(pair.target, target))


def _tasks() -> Iterable[str]:
    from regard.data.synthetic import TASKS

    return TASKS


def _read(spec: Path | Sequence[Path], fields: tuple[str, str]) -> tuple[list[Pair], Counter[str]]:
    from regard.data.parallel import read_pairs

    if isinstance(spec, str) and not os.path.exists(spec) and not os.path.splitext(spec)[1]:
        known = (*_tasks(), "bible-en-fr")
        raise RegardError(f"load_corpus: there is no corpus, file or folder {spec!r}. {nearest(spec, known)}")
    return read_pairs(spec, fields)


def _own_splits(
    spec: Mapping[str, Path | Sequence[Path]],
    max_words: int | None,
    fields: tuple[str, str],
    languages: tuple[str, str],
) -> Corpus:
    names = ("train", "valid", "test")
    if set(spec) != set(names):
        raise RegardError(f"load_corpus: own splits are named train, valid and test; these are {', '.join(spec)}.")
    splits, skipped = {}, Counter()
    for name in names:
        pairs, left_out = _read(spec[name], fields)
        pairs, long = _short(pairs, max_words)
        if not pairs:
            raise RegardError(f"load_corpus: the split {name} ({_name(spec[name])}) has no pair that can be used.")
        splits[name], skipped = tuple(pairs), skipped + left_out + long
    return Corpus(_name(spec["train"]), *languages, **splits, skipped=dict(skipped))


def _name(spec: Path | Sequence[Path]) -> str:
    parts = [spec] if isinstance(spec, str | os.PathLike) else spec
    return " + ".join(os.path.basename(os.fspath(part).rstrip("/")) for part in parts)
