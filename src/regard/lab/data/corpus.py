"""Sentence pairs, and a corpus of them in three splits: training, validation and test."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from regard.base.checks import checked
from regard.lab.data.tokenizer import Tokenizer
from regard.lab.data.words import cut

__all__ = ["Corpus", "Pair", "encode_pairs"]


@dataclass(frozen=True)
class Pair:
    """A sentence and its translation.

    `id` names the place that the pair comes from, such as a verse or a line number. `gold` holds the true alignment,
    where it is known, as pairs (number of the source word, number of the target word).

    >>> from regard.lab.data import Pair
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
        """The number of words of the longer side."""
        return max(len(cut(self.source)), len(cut(self.target)))


@dataclass(frozen=True)
class Corpus:
    """Sentence pairs in three splits. `skipped` maps a reason to the number of pairs that were left out for it.

    >>> from regard.lab.data import Corpus, Pair
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
        """SHA-256 of all sentences, in order and by split. Two reports with the same hash used the same data."""
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
        """One line: the sizes of the splits, and the number of pairs left out, by reason."""
        sizes = f"{self.name}: {len(self.train)} training, {len(self.valid)} validation, {len(self.test)} test pairs"
        left_out = ", ".join(f"{count} {reason}" for reason, count in self.skipped.items() if count)
        return f"{sizes}; left out: {left_out}." if left_out else f"{sizes}."


@checked
def encode_pairs(pairs: Iterable[Pair], source: Tokenizer, target: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """Both sides of every pair as ids, the input of `Batches`.

    >>> from regard.lab.data import Pair, WordTokenizer, encode_pairs
    >>> small, capital = WordTokenizer(["a", "b"]), WordTokenizer(["A", "B"])
    >>> encode_pairs([Pair("a b", "B")], small, capital)
    [([4, 5], [5])]
    """
    return [(source.encode(pair.source), target.encode(pair.target)) for pair in pairs]
