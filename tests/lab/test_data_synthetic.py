"""The invented tasks, checked by a translator of our own that shares only the word lists with the grammar."""

from __future__ import annotations

import pytest

from regard.base.errors import RegardError
from regard.lab.data import WordTokenizer, load_corpus, synthetic_pairs
from regard.lab.data.synthetic import ADJECTIVES, ADVERBS, ARTICLES, BEINGS, LEXICON, PLACES, PREPOSITIONS, TASKS, VERBS

every = pytest.mark.parametrize("task", TASKS)
ARTICLE_STEMS = {word: stem for one, many, stem in ARTICLES for word in (one, many)}
VERB_STEMS = {word: stem for one, many, stem in VERBS for word in (one, many)}
STEMS = dict(ADJECTIVES)
NOUNS = {one: (stem, {"sun": "o", "moon": "a"}[kind]) for one, _, stem, kind in (*BEINGS, *PLACES)}
NOUNS |= {many: (stem, {"sun": "oi", "moon": "ai"}[kind]) for _, many, stem, kind in (*BEINGS, *PLACES)}


def noun_phrase(words: list[str]) -> tuple[list[str], str]:
    """Take article, adjectives and noun off the front of the words; their translation, and the ending."""
    article, adjectives = words.pop(0), []
    while words[0] in STEMS:
        adjectives.append(words.pop(0))
    stem, ending = NOUNS[words.pop(0)]
    behind = [STEMS[adjective] + ending for adjective in reversed(adjectives)]
    return [ARTICLE_STEMS[article] + ending, stem + ending, *behind], ending


def translate(sentence: str) -> str:
    """What the four rules make of a sentence, by reading it from left to right."""
    words = sentence.split()
    subject, ending = noun_phrase(words)
    verb = VERB_STEMS[words.pop(0)] + ending
    thing, _ = noun_phrase(words)
    places: list[str] = []
    while words and words[0] in dict(PREPOSITIONS):
        places += [dict(PREPOSITIONS)[words.pop(0)], *noun_phrase(words)[0]]
    adverb = [dict(ADVERBS)[word] for word in words]
    return " ".join([*adverb, *places, *subject, *thing, verb])


def test_the_example_of_the_docstring_follows_the_rules():
    source = "the old red dog sees a bird near the river today"
    assert translate(source) == "todan nir lo sivo lo kano rubo belo una pila vido"


def test_the_grammar_says_what_an_independent_translator_says():
    for pair in synthetic_pairs("grammar", 3000, seed=1):
        assert pair.target == translate(pair.source)


def test_aligned_words_of_the_grammar_translate_each_other():
    for pair in synthetic_pairs("grammar", 1000, seed=2):
        source, target = pair.source.split(), pair.target.split()
        assert all(target[j] in LEXICON[source[i]] for i, j in pair.gold)


def test_copy_and_reverse_are_what_they_are_called():
    for pair in synthetic_pairs("copy", 500):
        assert pair.target == pair.source and pair.gold == {(n, n) for n in range(len(pair.source.split()))}
    for pair in synthetic_pairs("reverse", 500):
        words = pair.source.split()
        assert pair.target.split() == words[::-1]
        assert pair.gold == {(n, len(words) - 1 - n) for n in range(len(words))}


@every
def test_alignments_are_one_to_one(task):
    for pair in synthetic_pairs(task, 500):
        count = len(pair.source.split())
        assert count == len(pair.target.split()) == len(pair.gold)
        assert {i for i, _ in pair.gold} == {j for _, j in pair.gold} == set(range(count))


@every
def test_a_seed_gives_the_same_pairs_all_with_different_sources(task):
    pairs = synthetic_pairs(task, 2000, seed=4)
    assert pairs == synthetic_pairs(task, 2000, seed=4)
    assert pairs[:100] == synthetic_pairs(task, 100, seed=4)
    assert pairs != synthetic_pairs(task, 2000, seed=5)
    assert len({pair.source for pair in pairs}) == len({pair.id for pair in pairs}) == 2000


def test_words_mean_one_thing():
    """No two source words share a translation, so that lexicon lookups decide an alignment."""
    assert sum(map(len, LEXICON.values())) == len(set().union(*LEXICON.values()))


@every
def test_training_has_every_word_of_the_test_split(task):
    corpus = load_corpus(task, size=3000)
    for side in ("source", "target"):
        words = WordTokenizer.train(getattr(pair, side) for pair in corpus.train)
        assert all(1 not in words.encode(getattr(pair, side)) for pair in corpus.test)


def test_mistakes_are_named():
    with pytest.raises(RegardError, match="Did you mean 'grammar'"):
        synthetic_pairs("gramar")
    with pytest.raises(RegardError, match="0 pairs"):
        synthetic_pairs("copy", 0)
