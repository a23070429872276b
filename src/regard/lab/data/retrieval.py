"""Finds the nearest training sentence of each test sentence, and test sentences that are nearly in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.lab.data.corpus import Corpus
from regard.lab.data.words import cut, word_characters

__all__ = ["NEAR", "NOVEL", "Nearest", "nearest_pairs", "without_near"]

#: Test sentences below this are called novel.
NOVEL = 0.3
#: Test sentences above this are called near-duplicates.
NEAR = 0.5
#: The reason that `without_near` gives for test pairs left out.
NEAR_REASON = "of test too near to training"


@dataclass(frozen=True, eq=False)
class Nearest:
    """For every test sentence, the number of the most similar training sentence, and their similarity; (tests,) each.

    >>> from regard.lab.data import nearest_pairs
    >>> result = nearest_pairs(["he went home", "the dog sees a cat"], ["the dog sees a cat", "zebras"])
    >>> targets = ["er ging heim", "der Hund sieht eine Katze"]
    >>> result.index[0].item(), result.similarity.tolist(), result.copies(targets)[0]
    (1, [1.0, 0.0], 'der Hund sieht eine Katze')
    """

    index: np.ndarray
    similarity: np.ndarray

    def novel(self, below: float = NOVEL) -> list[int]:
        """The numbers of the test sentences whose similarity to every training sentence is less than `below`."""
        return np.flatnonzero(self.similarity < below).tolist()

    def copies(self, targets: list[str]) -> list[str]:
        """The retrieval baseline: translate a test sentence by the training target of its nearest training source."""
        return [targets[number] for number in self.index.tolist()]


@checked
def nearest_pairs(train: Sequence[str], test: Sequence[str]) -> Nearest:
    """The nearest training sentence of each test sentence, by Jaccard similarity.

    J(a, b) = |A ∩ B| / |A ∪ B|, where A and B are the sets of words and pairs of neighboring words. Words are runs of
    letters and digits in lower case. Scripts without spaces are cut as for alignments. Of equally similar training
    sentences the first is taken. A test sentence without a common word has similarity 0.

    >>> result = nearest_pairs(["the dog sees a cat", "he went home"], ["The dog sees a bird.", "zebras"])
    >>> result.index.tolist(), result.similarity.round(2).tolist(), result.novel()
    ([0, 0], [0.64, 0.0], [1])
    """
    if not len(train):
        raise RegardError("nearest: there are no training sentences. Give at least one.")
    numbers: dict[tuple[str, ...], int] = {}  # each n-gram has the number of its first occurrence
    rows = [
        np.array([numbers.setdefault(gram, len(numbers)) for gram in _grams(text)], dtype=np.int64) for text in train
    ]
    sizes = np.array([len(row) for row in rows])
    # an inverted index: the sentences sorted by n-gram, and the start of each n-gram
    columns = np.array([number for row in rows for number in row], dtype=np.int64)
    order = np.argsort(columns, kind="stable")
    sentences = np.repeat(np.arange(len(train)), sizes)[order]
    starts = np.searchsorted(columns[order], np.arange(len(numbers) + 1))

    index, similarity = np.zeros(len(test), dtype=np.int64), np.zeros(len(test))
    for number, text in enumerate(test):
        grams = _grams(text)
        gram_numbers = [numbers[gram] for gram in grams if gram in numbers]
        if gram_numbers:
            matches = np.concatenate([sentences[starts[gram] : starts[gram + 1]] for gram in gram_numbers])
            common = np.bincount(matches, minlength=len(train))
            scores = common / np.maximum(sizes + len(grams) - common, 1)
            index[number] = scores.argmax()
            similarity[number] = scores[index[number]]
    return Nearest(index, similarity)


@checked
def without_near(corpus: Corpus, above: float = NEAR) -> Corpus:
    """The corpus without test pairs whose source has a similarity above `above` to a training source.

    `skipped` counts them. The similarity is that of `nearest_pairs`.

    >>> from regard.lab.data import Corpus, Pair, without_near
    >>> train, test = (Pair("a b c", "x"),), (Pair("a b c", "y"), Pair("d", "z"))
    >>> without_near(Corpus("letters", "small", "small", train, train, test)).describe()
    'letters: 1 training, 1 validation, 1 test pairs; left out: 1 of test too near to training.'
    """
    sources = ([pair.source for pair in split] for split in (corpus.train, corpus.test))
    keep = nearest_pairs(*sources).similarity <= above
    test = tuple(pair for pair, kept in zip(corpus.test, keep.tolist(), strict=True) if kept)
    if not test:
        raise RegardError(
            f"without_near: every test source has a similarity above {above} to a training source, so no test pair "
            "would be left. Keep these pairs, or test on other text."
        )
    left_out = corpus.skipped.get(NEAR_REASON, 0) + len(corpus.test) - len(test)
    return replace(corpus, test=test, skipped={**corpus.skipped, NEAR_REASON: left_out})


def _grams(text: str) -> list[tuple[str, ...]]:
    """The words and the pairs of neighboring words, without repetitions, in the order of the text."""
    words = cut(word_characters(text.lower()))
    return list(dict.fromkeys([*((word,) for word in words), *pairwise(words)]))
