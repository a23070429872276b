"""Alignments: by hand, and through a model whose attention is set by the test."""

from __future__ import annotations

import math

import pytest
import torch

from regard.base.errors import RegardError
from regard.lab import build
from regard.lab.data import WordTokenizer, train_tokenizer
from regard.lab.data.vocabulary import BOS, EOS, UNK
from regard.lab.decoding.alignment import (
    Alignment,
    align,
    alignment_error_rate,
    attention_of,
    merge_pieces,
    read_pharaoh,
    write_pharaoh,
    written_words,
)
from regard.lab.decoding.search import Search
from regard.lab.decoding.translation import TranslationOptions, translate
from regard.lab.evaluation.dependence import attention_shares, punctuation, source_gradients


class InPieces(WordTokenizer):
    """Words written in pieces that end in +: "ab+ cd" is one word."""

    def word_numbers(self, ids):
        numbers, word, inside = [], -1, False
        for piece in self.pieces(ids):
            word += not inside
            numbers.append(word)
            inside = piece.endswith("+")
        return numbers

    def decode(self, ids):
        return super().decode(ids).replace("+ ", "")


SOURCE = InPieces(["a", "b+", "c", "d", ",", "."])
TARGET = InPieces(["w", "x+", "y", "z"])


class System:
    """A model with tokenizers, as a run has them."""

    def __init__(self, model):
        self.model, self.source_tokenizer, self.target_tokenizer = model, SOURCE, TARGET


def bahdanau():
    torch.manual_seed(1)
    return build("bahdanau", source_size=len(SOURCE), target_size=len(TARGET), width=8).eval()


def test_pieces_become_words_by_sums_over_the_source_and_means_over_the_target():
    weights = torch.tensor([[0.1, 0.2, 0.3], [0.5, 0.1, 0.2], [0.0, 0.9, 0.1]])
    merged = merge_pieces(weights, [0, 0, 1], [0, 1, 1])
    torch.testing.assert_close(merged, torch.tensor([[0.3, (0.5 + 0.3) / 2], [0.0, 1.0]]))
    assert torch.equal(merge_pieces(weights, [0, 1, 2], [0, 1, 2]), weights)
    assert merge_pieces(weights[:0, :0], [], []).shape == (0, 0)
    with pytest.raises(RegardError, match=r"must be \(2, 3\)"):
        merge_pieces(weights, [0, 0], [0, 1, 1])


@pytest.mark.parametrize(("reading", "first"), [("output", 0), ("input", 1)])
def test_a_word_is_read_where_it_is_put_out_or_where_it_is_taken_in(reading, first):
    model = bahdanau()
    sources = [SOURCE.encode("a b+ c"), SOURCE.encode("d")]
    targets = [TARGET.encode("x+ y z w"), TARGET.encode("w")]
    found = align(model, (SOURCE, TARGET), sources, targets, reading=reading)
    for x, y, alignment in zip(sources, targets, found, strict=True):
        maps = attention_of(model, torch.tensor([[*x, EOS]]), torch.tensor([[BOS, *y]]))
        rows = maps["bridge"].dense()[0].mean(0)[first : first + len(y), : len(x)]
        expected = merge_pieces(rows, TARGET.word_numbers(y), SOURCE.word_numbers(x))
        torch.testing.assert_close(alignment.weights, expected)
        assert alignment.reading == reading
    assert found[0].source == ("a", "bc") and found[0].target == ("xy", "z", "w")
    assert found[1].links() == {(0, 0)}


def test_links():
    alignment = Alignment(("a", "b", "c"), ("x", "y"), torch.tensor([[0.2, 0.7, 0.1], [0.45, 0.1, 0.45]]))
    assert alignment.links() == {(1, 0), (0, 1)}
    assert alignment.links(threshold=0.45) == {(1, 0), (0, 1), (2, 1)}
    assert Alignment((), (), torch.zeros(0, 0)).links() == frozenset()


def test_pharaoh_there_and_back():
    links = frozenset({(10, 2), (0, 0), (2, 1)})
    assert write_pharaoh(links) == "0-0 2-1 10-2"
    assert read_pharaoh(write_pharaoh(links)) == links
    assert read_pharaoh("") == frozenset() and write_pharaoh([]) == ""
    for wrong in ("1", "1-", "a-b", "1_2"):
        with pytest.raises(RegardError, match="is not a link"):
            read_pharaoh(f"0-0 {wrong}")


def test_alignment_error_rate_by_hand():
    sure, possible = frozenset({(0, 0), (1, 1)}), frozenset({(0, 0), (1, 1), (2, 1)})
    found = frozenset({(0, 0), (2, 1), (2, 2)})
    # |A ∩ S| = 1, |A ∩ P| = 2, |A| = 3, |S| = 2
    assert alignment_error_rate([found], [sure], [possible]) == pytest.approx(1 - 3 / 5)
    # possible links hold the sure ones even where they are not listed again
    assert alignment_error_rate([found], [sure], [possible - sure]) == pytest.approx(1 - 3 / 5)
    # without possible links it is 1 - F1
    precision, recall = 1 / 3, 1 / 2
    assert alignment_error_rate([found], [sure]) == pytest.approx(1 - 2 * precision * recall / (precision + recall))
    # sums over sentences, not means: 1 - (1 + 1 + 2 + 2) / (3 + 2 + 2 + 2)
    assert alignment_error_rate([found, sure], [sure, sure]) == pytest.approx(1 - 6 / 9)
    assert math.isnan(alignment_error_rate([frozenset()], [frozenset()]))
    with pytest.raises(RegardError, match="1 predicted, 2 sure"):
        alignment_error_rate([found], [sure, sure])


def test_what_cannot_be_aligned():
    model = bahdanau()
    with pytest.raises(RegardError, match="no reading 'inptu'"):
        align(model, (SOURCE, TARGET), [[4]], [[4]], reading="inptu")
    with pytest.raises(RegardError, match="no attention module 'brigde'"):
        align(model, (SOURCE, TARGET), [[4]], [[4]], name="brigde")
    none = build("none", source_size=9, target_size=9, width=8)
    assert attention_of(none, torch.tensor([[4, 3]]), torch.tensor([[2, 4]])) == {}
    with pytest.raises(RegardError, match="has no attention to the source"):
        align(none, (SOURCE, TARGET), [[4]], [[4]])
    with pytest.raises(RegardError, match="has no attention to the source"):
        list(translate(none, SOURCE, TARGET, ["a"], TranslationOptions(replace_unknown=True)))


def test_unknown_words_become_the_source_words_they_look_at():
    model = bahdanau()
    with torch.no_grad():  # nothing but UNK, and then the end
        model.logits(torch.zeros(1, 8))
        output = next(m for m in model.modules() if isinstance(m, torch.nn.Linear) and m.out_features == len(TARGET))
        output.weight.zero_()
        output.bias.zero_()
        output.bias[UNK] = 9.0
    search = Search(beam=2, max_length=3)
    line = "a Zebra d"
    (done,) = translate(
        model, SOURCE, TARGET, [line], TranslationOptions(search, replace_unknown=True, reading="output")
    )
    assert set(done.hypotheses[0].tokens) == {UNK}
    encoded = SOURCE.encode(line)
    (alignment,) = align(model, (SOURCE, TARGET), [encoded], [done.hypotheses[0].tokens])
    expected = [line.split()[place] for place in alignment.weights.argmax(1).tolist()]
    assert done.text == " ".join(expected) and done.alignment.target == tuple(expected)
    (plain,) = translate(model, SOURCE, TARGET, [line], TranslationOptions(search))
    assert plain.text == "<unk> <unk> <unk>" and plain.alignment is None


# AttentionShares


def pairs(*texts):
    from regard.lab.data import Pair

    return [Pair(*text.split(" > ")) for text in texts]


def test_shares_on_the_end_and_on_punctuation_are_those_of_the_maps():
    system = System(bahdanau())
    some = pairs("a , d > w z", "d . > x+ y z", "a > w")
    found = attention_shares(system, some, batch=2)
    ends, marks, entropies, spreads, count = 0.0, 0.0, 0.0, 0.0, 0
    for pair in some:
        x, y = SOURCE.encode(pair.source), TARGET.encode(pair.target)
        weights = attention_of(system.model, torch.tensor([[*x, EOS]]), torch.tensor([[BOS, *y]]))["bridge"].dense()
        rows = weights[0, 0].double()
        ends += float(rows[:, -1].sum())
        marks += float(sum(rows[:, n].sum() for n, piece in enumerate(SOURCE.pieces(x)) if piece in ",."))
        entropy = -(rows * rows.log()).sum(1)
        entropies, spreads = entropies + float(entropy.sum()), spreads + float((entropy / math.log(len(x) + 1)).sum())
        count += len(y) + 1
    assert found.num_targets == count
    for value, total in (
        (found.end, ends),
        (found.punctuation, marks),
        (found.entropy, entropies),
        (found.spread, spreads),
    ):
        assert value == pytest.approx(total / count, rel=1e-5)
    assert found.end_pieces == pytest.approx((3 * (1 / 4) + 4 * (1 / 3) + 2 * (1 / 2)) / 9)
    assert punctuation(torch.tensor([[0, 3, 4, 8, 9]]), SOURCE).tolist() == [[False, False, False, True, True]]


@pytest.mark.parametrize("name", ["none", "bahdanau", "transformer"])
def test_gradients_to_source_positions_against_finite_differences(name):
    model = build(name, source_size=12, target_size=9, width=8).double().eval()
    source, target = torch.tensor([[4, 9, 7, 3, 0], [5, 3, 0, 0, 0]]), torch.tensor([[2, 4, 6, 3], [2, 5, 3, 0]])
    found = source_gradients(model, source, target)
    assert found.shape == (2, 3, 5)
    assert not found[0, :, 4:].any() and not found[1, :, 2:].any() and not found[1, 2:].any()
    table = next(m for m in model.modules() if isinstance(m, torch.nn.Embedding) and m.num_embeddings == 12)

    def log_probs():
        with torch.no_grad():
            return model.logits(model(source, target[:, :-1])).log_softmax(-1).gather(2, target[:, 1:, None])[..., 0]

    gradient, step = torch.zeros(3, 8, dtype=torch.float64), 1e-6
    for n in range(8):  # token 9 stands at position 1 of row 0 alone
        with torch.no_grad():
            table.weight[9, n] += step
            above = log_probs()[0]
            table.weight[9, n] -= 2 * step
            gradient[:, n] = (above - log_probs()[0]) / (2 * step)
            table.weight[9, n] += step
    torch.testing.assert_close(found[0, :, 1], gradient.norm(dim=1), rtol=1e-5, atol=1e-8)
    assert all(parameter.grad is None for parameter in model.parameters())


LINES = ["a b ab", "ba a b", "cab cb"] * 9


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ab b", [0, 1]),
        ("a☃b ☃ ab", [0, 1, 2]),
        ("a\u200bb cb", [0, 1]),  # no space to those who count words, one to those who cut
        ("a \u200b b", [0, 2]),  # a word that nothing is left of is linked to nothing
        ("a\u00a0b  c", [0, 1, 2]),
    ],
)
def test_source_words_are_counted_as_they_are_written(text, words):
    tokenizer = train_tokenizer(LINES, 12, "bpe")
    ids = tokenizer.encode(text)
    numbers = written_words(tokenizer, text, ids)
    assert sorted(set(numbers)) == words and numbers == sorted(numbers)
    joined = ["".join(text.split()[number]) for number in words]
    for number, word in zip(words, joined, strict=True):
        spelt = tokenizer.decode(i for i, n in zip(ids, numbers, strict=True) if n == number)
        assert spelt.replace(" ", "") == word.replace("☃", "⁇").replace("\u200b", "")


def test_links_of_cut_words_count_in_the_printed_text():
    tokenizer = train_tokenizer(LINES, 12, "bpe")
    torch.manual_seed(0)
    model = build("bahdanau", source_size=len(tokenizer), target_size=len(tokenizer), width=8).eval()
    sources = ["a☃b cab", "cb\u200bab a b", "☃☃ ba"]
    search = Search(beam=1, min_length=4, max_length=9)
    found = list(translate(model, tokenizer, tokenizer, sources, TranslationOptions(search, reading="output")))
    for source, each in zip(sources, found, strict=True):
        assert each.alignment is not None and list(each.alignment.target) == each.text.split()
        assert {i for i, _ in each.alignment.links()} <= set(range(len(source.split())))
        assert sorted(j for _, j in each.alignment.links()) == list(range(len(each.text.split())))
