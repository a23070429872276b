"""How much of a test set is in the training set already: the nearest training sentence of each test sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from regard.checks import checked
from regard.data.corpus import Corpus
from regard.data.words import cut, word_characters
from regard.errors import RegardError

__all__ = ["NEAR", "NOVEL", "Nearest", "nearest", "without_near"]

#: Test sentences below this are called novel.
NOVEL = 0.3
#: Test sentences above this are called near-duplicates.
NEAR = 0.5
#: What `without_near` counts them as.
NEAR_REASON = "of test too near to training"


@dataclass(frozen=True, eq=False)
class Nearest:
    """For every test sentence, the place of the most similar training sentence, and how similar it is, (tests,).

    >>> from regard.data import nearest
    >>> found = nearest(["he went home", "the dog sees a cat"], ["the dog sees a cat", "zebras"])
    >>> found.index[0].item(), found.similarity.tolist(), found.copies(["er ging heim", "der Hund sieht eine Katze"])[0]
    (1, [1.0, 0.0], 'der Hund sieht eine Katze')
    """

    index: np.ndarray
    similarity: np.ndarray

    def novel(self, below: float = NOVEL) -> list[int]:
        """The test sentences that nothing in training is like."""
        return np.flatnonzero(self.similarity < below).tolist()

    def copies(self, targets: list[str]) -> list[str]:
        """The retrieval baseline: the training targets of the nearest sources, as translations."""
        return [targets[place] for place in self.index.tolist()]


@checked
def nearest(train: Sequence[str], test: Sequence[str]) -> Nearest:
    """Similarity is Jaccard's: J(a, b) = |A ∩ B| / |A ∪ B|, A and B the words and the pairs of neighbouring words.

    Words are runs of letters and digits in lower case; text without spaces is cut as for alignments. Of equally similar
    sentences, the first is taken; a test sentence without a common word has similarity 0.

    >>> found = nearest(["the dog sees a cat", "he went home"], ["The dog sees a bird.", "zebras"])
    >>> found.index.tolist(), found.similarity.round(2).tolist(), found.novel()
    ([0, 0], [0.64, 0.0], [1])
    """
    if not len(train):
        raise RegardError("nearest: there are no training sentences. Give at least one.")
    numbers: dict[tuple[str, ...], int] = {}
    rows = [
        np.array([numbers.setdefault(gram, len(numbers)) for gram in _grams(text)], dtype=np.int64) for text in train
    ]
    sizes = np.array([len(row) for row in rows])
    # where each n-gram occurs: the sentences, sorted by n-gram, and where those of one begin
    columns = np.array([number for row in rows for number in row], dtype=np.int64)
    order = np.argsort(columns, kind="stable")
    sentences = np.repeat(np.arange(len(train)), sizes)[order]
    starts = np.searchsorted(columns[order], np.arange(len(numbers) + 1))

    index, similarity = np.zeros(len(test), dtype=np.int64), np.zeros(len(test))
    for place, text in enumerate(test):
        grams = _grams(text)
        found = [sentences[starts[n] : starts[n + 1]] for n in (numbers.get(gram) for gram in grams) if n is not None]
        if found:
            common = np.bincount(np.concatenate(found), minlength=len(train))
            scores = common / np.maximum(sizes + len(grams) - common, 1)
            index[place] = scores.argmax()
            similarity[place] = scores[index[place]]
    return Nearest(index, similarity)


@checked
def without_near(corpus: Corpus, above: float = NEAR) -> Corpus:
    """The corpus without the test pairs whose source is nearly a training source; they are counted as skipped.

    >>> from regard.data import Corpus, Pair, without_near
    >>> train, test = (Pair("a b c", "x"),), (Pair("a b c", "y"), Pair("d", "z"))
    >>> without_near(Corpus("letters", "small", "small", train, train, test)).describe()
    'letters: 1 training, 1 validation, 1 test pairs; left out: 1 of test too near to training.'
    """
    sources = ([pair.source for pair in split] for split in (corpus.train, corpus.test))
    keep = nearest(*sources).similarity <= above
    test = tuple(pair for pair, kept in zip(corpus.test, keep.tolist(), strict=True) if kept)
    if not test:
        raise RegardError(
            f"without_near: every test source is more similar than {above} to a training source, so none would be "
            "left. Keep them, or test on other text."
        )
    left_out = corpus.skipped.get(NEAR_REASON, 0) + len(corpus.test) - len(test)
    return replace(corpus, test=test, skipped={**corpus.skipped, NEAR_REASON: left_out})


def _grams(text: str) -> list[tuple[str, ...]]:
    """Words and pairs of neighbours, each once, in the order of the text."""
    words = cut(word_characters(text.lower()))
    return list(dict.fromkeys([*((word,) for word in words), *pairwise(words)]))
