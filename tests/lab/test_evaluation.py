"""Evaluation: sacrebleu and hand counts as oracles, and bootstraps whose answer is known."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

from regard.base.errors import RegardError
from regard.lab import build
from regard.lab.data import Pair, WordTokenizer
from regard.lab.decoding.search import Search
from regard.lab.decoding.translation import TranslationOptions, translate
from regard.lab.evaluation.bootstrap import bleu, bleu_counts, bleu_interval, paired_bootstrap, resample
from regard.lab.evaluation.scores import (
    Evaluation,
    Training,
    by_frequency,
    evaluate,
    paired_comparison,
    perplexity,
    score,
    word_frequencies,
)

sacrebleu = pytest.importorskip("sacrebleu")
WORDS = ["the", "cat", "dog", "sat", "on", "mat", "saw", ",", "it's", "a", "red", "house", "."]


def texts(size, seed, noise=0.3):
    """References, and hypotheses that are these with words changed, dropped and doubled."""
    generator = random.Random(seed)
    references = [" ".join(generator.choices(WORDS, k=generator.randint(1, 12))) for _ in range(size)]
    hypotheses = []
    for reference in references:
        words = []
        for word in reference.split():
            draw = generator.random()
            words += [] if draw < noise / 3 else [generator.choice(WORDS)] if draw < noise else [word]
        hypotheses.append(" ".join(words))
    return hypotheses, references


CASES = [
    texts(1, 0),
    texts(7, 1),
    texts(60, 2),
    texts(5, 3, noise=1.0),
    ([""], ["a b c d"]),
    (["", "a b c d e"], ["x", "a b c d f"]),
]


@pytest.mark.parametrize(("hypotheses", "references"), CASES)
def test_bleu_from_summed_counts_is_that_of_sacrebleu(hypotheses, references):
    counts = bleu_counts(hypotheses, references)
    assert float(bleu(counts.sum(0))) == pytest.approx(sacrebleu.corpus_bleu(hypotheses, [references]).score, abs=1e-9)


@pytest.mark.parametrize(("hypotheses", "references"), CASES)
def test_scores_are_those_of_sacrebleu_with_its_signature(hypotheses, references):
    found = score(hypotheses, references, references)
    for metric, made in ((found.bleu, sacrebleu.BLEU()), (found.chrf, sacrebleu.CHRF()), (found.ter, sacrebleu.TER())):
        assert metric.score == made.corpus_score(hypotheses, [references]).score
        assert metric.signature == str(made.get_signature()) and "version:" in metric.signature
    assert found.exact == sum(h == r for h, r in zip(hypotheses, references, strict=True)) / len(references)
    assert sum(bucket.count for bucket in found.by_length) == len(references)


def test_every_resample_draws_as_many_sentences_as_there_are():
    weights = resample(17, resamples=40, seed=5)
    assert weights.shape == (40, 17) and (weights.sum(1) == 17).all()
    assert torch.equal(weights, resample(17, resamples=40, seed=5)) and not torch.equal(weights, resample(17, 40, 6))
    assert weights.mean() == 1 and float(resample(50, 2000).var()) == pytest.approx(1 - 1 / 50, rel=0.05)


def test_resampled_corpora_have_the_bleu_of_the_sentences_drawn():
    hypotheses, references = texts(20, 4)
    weights, counts = resample(20, 6), bleu_counts(hypotheses, references)
    for row, found in zip(weights, bleu(weights @ counts), strict=True):
        drawn = [n for n, times in enumerate(row.int().tolist()) for _ in range(times)]
        expected = sacrebleu.corpus_bleu([hypotheses[n] for n in drawn], [[references[n] for n in drawn]]).score
        assert float(found) == pytest.approx(expected, abs=1e-9)


def test_bands():
    hypotheses, references = texts(40, 5)
    low, high = bleu_interval(bleu_counts(hypotheses, references))
    assert low < sacrebleu.corpus_bleu(hypotheses, [references]).score < high
    one = bleu_counts(hypotheses[:1], references[:1])
    assert bleu_interval(one) == (float(bleu(one.sum(0))),) * 2


def test_paired_bootstrap_in_closed_cases():
    hypotheses, references = texts(30, 6)
    mine, perfect = bleu_counts(hypotheses, references), bleu_counts(references, references)
    same = paired_bootstrap(mine, mine, resamples=99)
    assert (same.difference, same.interval, same.p_value) == (0, (0, 0), 1)
    better, worse = paired_bootstrap(perfect, mine, resamples=99), paired_bootstrap(mine, perfect, resamples=99)
    assert better.p_value == worse.p_value == 1 / 100
    assert better.difference == -worse.difference > 0 and better.bleu == worse.bleu[::-1]
    assert better.interval[0] <= better.difference <= better.interval[1]
    with pytest.raises(RegardError, match="of the same sentences"):
        paired_bootstrap(mine, mine[:3])


def test_the_p_value_of_one_sentence_in_which_systems_differ():
    """Resamples without that sentence are ties: (1 - 1/n)^n of them."""
    sentences = ["a b c d e f"] * 10
    mine, theirs = bleu_counts(sentences, sentences), bleu_counts([*sentences[1:], "a b c x e f"], sentences)
    assert paired_bootstrap(mine, theirs, resamples=4000).p_value == pytest.approx(0.9**10, abs=0.03)


def test_resamples_of_several_trainings_draw_sentences_and_seeds():
    """p by sacrebleu, from the corpora that are drawn written out."""
    from regard.lab.evaluation.bootstrap import SEED

    (first, references), (second, _), (third, _) = (texts(12, seed) for seed in (6, 7, 8))
    hypotheses = [[first, second[:6] + first[6:], first], [third[:5] + first[5:], second[:3] + first[3:]]]
    counts = [torch.stack([bleu_counts(said, references) for said in side]) for side in hypotheses]
    sentences = resample(12, 40).long().tolist()
    seeds = [resample(len(side), 40, SEED + n).long().tolist() for n, side in enumerate(hypotheses, 1)]

    def corpus(side, draw):
        drawn = [s for s, times in enumerate(seeds[side][draw]) for _ in range(times)]
        rows = [n for n, times in enumerate(sentences[draw]) for _ in range(times)]
        said = [hypotheses[side][s][n] for s in drawn for n in rows]
        return sacrebleu.corpus_bleu(said, [[references[n] for _ in drawn for n in rows]]).score

    differences = [corpus(0, draw) - corpus(1, draw) for draw in range(40)]
    found = paired_bootstrap(*counts, resamples=40)
    turned = sum(each <= 0 if found.difference > 0 else each >= 0 for each in differences)
    assert 0 < turned < 40 and found.p_value == pytest.approx((turned + 1) / 41)
    one = paired_bootstrap(counts[0][:1], counts[1][:1], resamples=40)
    assert one == paired_bootstrap(counts[0][0], counts[1][0], resamples=40)


def test_chance_alone_is_rarely_significant():
    generator, found = random.Random(0), []
    for _ in range(40):
        first, references = texts(40, generator.random())
        second = [
            " ".join(generator.choice(WORDS) if generator.random() < 0.3 else w for w in r.split()) for r in references
        ]
        other = [
            " ".join(generator.choice(WORDS) if generator.random() < 0.3 else w for w in r.split()) for r in references
        ]
        assert len(first) == len(second)
        found.append(paired_bootstrap(bleu_counts(second, references), bleu_counts(other, references), 200).p_value)
    assert sum(p < 0.05 for p in found) <= 10  # one-sided in the direction seen: twice 5 % are expected


def test_buckets_of_length_and_similarity():
    references = ["a b c d", "e f g h", "i j k l", "m n o p"]
    hypotheses = [references[0], references[1], "i j x y", "z"]
    sources = ["w", "w " * 5, "w " * 6, "w " * 60]
    found = score(hypotheses, references, sources, Training(similarities=[0.1, 0.3, 0.5, 0.6]))
    assert [(each.label, each.count) for each in found.by_length] == [("1-5", 2), ("6-10", 1), ("41-60", 1)]
    assert found.by_length[0].bleu == pytest.approx(100)
    labels = [("novel (below 0.3)", 1), ("0.3 to 0.5", 2), ("near-duplicate (above 0.5)", 1)]
    assert [(each.label, each.count) for each in found.by_similarity] == labels
    middle = sacrebleu.corpus_bleu(hypotheses[1:3], [references[1:3]]).score
    assert found.by_similarity[1].bleu == pytest.approx(middle) and found.novel == found.by_similarity[0]
    assert score(hypotheses, references, sources, Training(similarities=[0.4] * 4)).novel is None
    with pytest.raises(RegardError, match="3 similarities for 4 sentences"):
        score(hypotheses, references, sources, Training(similarities=[0.1] * 3))


def test_words_by_frequency_by_hand():
    training = word_frequencies(["the cat sat.", "the dog", "the mat"])
    assert training["the"] == 3 and training["."] == 1
    found = {bin.label: bin for bin in by_frequency(["the the cat", "bird"], ["the cat mat", "bird bird"], training)}
    assert (found["2-4"].matches, found["2-4"].put_out, found["2-4"].expected) == (1, 2, 1)
    assert (found["1"].precision, found["1"].recall) == (1.0, 0.5)
    assert (found["0"].recall, found["0"].precision, found["0"].f1) == (0.5, 1.0, pytest.approx(2 / 3))


# A whole system

TOKENS = WordTokenizer(["a", "b", "c", "d"])


class System:
    def __init__(self, name="bahdanau"):
        torch.manual_seed(2)
        self.model = build(name, source_size=len(TOKENS), target_size=len(TOKENS), width=8).eval()
        self.source_tokenizer = self.target_tokenizer = TOKENS


PAIRS = [
    Pair("a b", "b a", gold=frozenset({(0, 1), (1, 0)})),
    Pair("c", "c", gold=frozenset({(0, 0)})),
    Pair("d a b", "a"),
]


TRAIN = [Pair("a b", "b a b a"), Pair("d a c", "c d")]


def test_what_the_training_text_says_about_a_test():
    training = Training.of(TRAIN, PAIRS)
    assert training.retrieved == ["b a b a", "c d", "b a b a"] and training.frequencies["b"] == 2
    # Jaccard of words and pairs: the same; 1 of 5 + 1 - 1; {a, b, ab} of {d, a, b, da, ab}
    assert training.similarities == pytest.approx([1, 1 / 5, 3 / 5])
    found = score(["b a", "c", "a"], ["b a", "c", "a"], ["a b", "c", "d a b"], training)
    assert [(each.label, each.count) for each in found.retrieval[:2]] == [("all", 3), ("novel (below 0.3)", 1)]
    expected = sacrebleu.corpus_bleu(training.retrieved, [["b a", "c", "a"]]).score
    assert found.retrieval[0].bleu == pytest.approx(expected)


def test_an_evaluation_goes_through_json_unchanged():
    done = []
    wanted = TranslationOptions(Search(beam=2, max_length=5), batch=2)
    found = evaluate(System(), PAIRS, wanted, Training.of(TRAIN, PAIRS), progress=done.append)
    assert done == [1, 2, 3] and found.num_sentences == 3
    assert found.hypotheses == tuple(
        each.text for each in translate(System().model, TOKENS, TOKENS, ["a b", "c", "d a b"], wanted)
    )
    assert found.sentences_per_second > 0 and found.search["beam"] == 2
    assert 0 <= found.alignment_error_rate <= 1 and found.reading == "output"
    assert Evaluation.from_json(json.loads(json.dumps(found.to_json()))) == found
    with pytest.raises(RegardError, match="this is not an evaluation"):
        Evaluation.from_json({"bleu": {}})


def test_a_model_without_attention_has_no_alignment_error_rate():
    found = evaluate(System("none"), PAIRS, TranslationOptions(Search(beam=1, max_length=3)))
    assert found.alignment_error_rate is None and found.by_similarity == () and found.novel is None


def test_perplexity_is_that_of_each_token_by_itself():
    system, total, count = System(), 0.0, 0
    for pair in PAIRS:
        x, y = TOKENS.encode(pair.source), TOKENS.encode(pair.target)
        with torch.no_grad():
            steps = system.model.logits(system.model(torch.tensor([[*x, 3]]), torch.tensor([[2, *y]])))[0]
        total -= float(steps.log_softmax(-1)[range(len(y) + 1), [*y, 3]].sum())
        count += len(y) + 1
    assert perplexity(system, PAIRS, batch=2) == pytest.approx(math.exp(total / count), rel=1e-5)


def test_two_systems_are_compared_on_the_same_sentences_alone():
    references = ["a b c d", "b c d a"]
    mine, theirs = score(references, references, references), score(["a b", "b"], references, references)
    assert paired_comparison(mine, theirs, references).difference > 0
    other = score(["a"], ["a"], ["a"])
    with pytest.raises(RegardError, match="different sentences"):
        paired_comparison(mine, other, references)


def test_lines_come_back_in_order_and_none_is_cut():
    system, wanted = System(), TranslationOptions(Search(beam=2, max_length=6), batch=2, window=2, limit=4)
    lines = ["a b c d", "", "a", "a b c d a", "b a c", "d", "  ", "c c"]
    found = list(translate(system.model, TOKENS, TOKENS, iter(lines), wanted))
    assert [each.source for each in found] == lines
    assert [each.skipped for each in found] == ["", "empty", "", "5 pieces, the limit is 4", "", "", "empty", ""]
    for line, each in zip(lines, found, strict=True):
        if not each.skipped:
            (alone,) = translate(system.model, TOKENS, TOKENS, [line], wanted)
            assert alone.hypotheses[0].tokens == each.hypotheses[0].tokens and alone.text == each.text
        assert bool(each.hypotheses) == (not each.skipped)


def test_translating_waits_for_no_more_lines_than_a_window():
    system, read = System(), []

    def lines():
        for number in range(6):
            read.append(number)
            yield "a b"

    found = translate(
        system.model, TOKENS, TOKENS, lines(), TranslationOptions(Search(beam=1, max_length=3), batch=1, window=2)
    )
    next(found)
    assert read == [0, 1]


def test_evaluating_nothing():
    with pytest.raises(RegardError, match="no sentence pairs"):
        evaluate(System(), [])
    with pytest.raises(RegardError, match="1 hypotheses and 0 references"):
        score(["a"], [], [])
    with pytest.raises(RegardError, match="batch must be at least 1"):
        TranslationOptions(batch=0)
