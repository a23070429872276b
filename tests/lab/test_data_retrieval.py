"""The nearest training sentence, against comparing every sentence with every other."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.base.errors import RegardError
from regard.lab.data import load_corpus, nearest_pairs, without_near

words = st.sampled_from(["a", "b", "c", "d", "e", "F,", "g."])
sentences = st.lists(st.lists(words, max_size=7).map(" ".join), max_size=12)


def jaccard(one: str, other: str) -> float:
    sides = []
    for words in (re.findall(r"\w+", text.lower()) for text in (one, other)):
        sides.append(set(words) | {f"{words[n]} {words[n + 1]}" for n in range(len(words) - 1)})
    return len(sides[0] & sides[1]) / max(1, len(sides[0] | sides[1]))


@given(sentences.filter(bool), sentences)
def test_nearest_is_the_best_of_all_comparisons(train, test):
    found = nearest_pairs(train, test)
    for place, text in enumerate(test):
        scores = [jaccard(text, other) for other in train]
        assert found.similarity[place] == pytest.approx(max(scores))
        assert found.index[place] == scores.index(max(scores))
    assert found.novel(0.5) == [n for n, text in enumerate(test) if max(jaccard(text, o) for o in train) < 0.5]
    assert found.copies([text.upper() for text in train]) == [train[n].upper() for n in found.index]


def test_near_duplicates_can_be_left_out():
    corpus = load_corpus("grammar", size=400)
    near = replace(corpus, test=(corpus.train[3], *corpus.test))
    apart = without_near(near)
    assert corpus.train[3] not in apart.test and apart.train == corpus.train
    assert apart.skipped["of test too near to training"] == len(near.test) - len(apart.test) >= 1
    similar = nearest_pairs([p.source for p in corpus.train], [p.source for p in apart.test]).similarity
    assert similar.max() <= 0.5
    with pytest.raises(RegardError, match="no test pair would be left"):
        without_near(replace(corpus, test=corpus.train[:2]))
    with pytest.raises(RegardError, match="no training sentences"):
        nearest_pairs([], ["a"])
