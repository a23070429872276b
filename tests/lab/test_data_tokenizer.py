"""Vocabularies: encoding and decoding restore a text, one file stores a tokenizer, and impossible sizes are refused."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.base.errors import RegardError
from regard.lab.data import BOS, EOS, PAD, UNK, SentencePiece, Tokenizer, WordTokenizer, load_tokenizer, train_tokenizer
from regard.lab.data.synthetic import synthetic_pairs

pytest.importorskip("sentencepiece")

SENTENCES = [pair.source for pair in synthetic_pairs("grammar", 300)]
LETTERS = sorted(set("".join(SENTENCES)) - {" "})
KINDS = {kind: train_tokenizer(SENTENCES, 80, kind) for kind in ("unigram", "bpe")}
KINDS["words"] = train_tokenizer(SENTENCES, kind="words")
every = pytest.mark.parametrize("tokenizer", KINDS.values(), ids=KINDS)


@every
def test_known_text_comes_back(tokenizer):
    for sentence in SENTENCES:
        assert tokenizer.decode(tokenizer.encode(sentence)) == sentence


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@given(words=st.lists(st.text(LETTERS, min_size=1, max_size=9), max_size=6), seed=st.integers(0, 2**40))
def test_subwords_spell_any_word_of_known_letters_sampled_or_not(kind, words, seed):
    tokenizer, text = KINDS[kind], " ".join(words)
    ids = tokenizer.encode(text)
    drawn = tokenizer.encode(text, sample=True, seed=seed)
    assert tokenizer.decode(ids) == tokenizer.decode(drawn) == text
    assert drawn == tokenizer.encode(text, sample=True, seed=seed)
    assert all(3 < number < len(tokenizer) for number in ids + drawn)


@every
def test_the_special_ids_are_the_same_everywhere(tokenizer):
    assert (PAD, UNK, BOS, EOS) == (0, 1, 2, 3)
    assert tokenizer.pieces([PAD, UNK, BOS, EOS]) == ["<pad>", "<unk>", "<s>", "</s>"]
    ids = tokenizer.encode(SENTENCES[0])
    assert not {PAD, BOS, EOS} & set(ids)
    assert tokenizer.decode([BOS, *ids, EOS, *ids, PAD]) == SENTENCES[0]
    assert UNK in tokenizer.encode("日")
    assert tokenizer.decode([]) == "" and tokenizer.encode("") == []


@every
def test_a_special_form_in_the_text_is_never_a_special_id(tokenizer):
    assert not {PAD, BOS, EOS} & set(tokenizer.encode("<s> </s> <pad> a"))


@every
def test_word_numbers_count_words(tokenizer):
    for sentence in SENTENCES[:20]:
        ids = [BOS, *tokenizer.encode(sentence), EOS, PAD]
        numbers = tokenizer.word_numbers(ids)
        assert numbers[0] == numbers[-1] == numbers[-2] == -1
        for place, word in enumerate(sentence.split()):
            assert tokenizer.decode([i for i, n in zip(ids, numbers, strict=True) if n == place]) == word


@every
def test_a_file_brings_it_back(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "new" / "a.tokenizer")
    again = load_tokenizer(tmp_path / "new" / "a.tokenizer")
    assert type(again) is type(tokenizer) and len(again) == len(tokenizer)
    assert [again.encode(s) for s in SENTENCES] == [tokenizer.encode(s) for s in SENTENCES]
    assert again.pieces(range(len(again))) == tokenizer.pieces(range(len(again)))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.tokenizer"]


@every
def test_a_truncated_file_is_refused_by_name(tokenizer, tmp_path):
    path = tmp_path / "a.tokenizer"
    content = tokenizer.to_bytes()
    for length in (0, 1, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(RegardError, match=r"load_tokenizer: .*a\.tokenizer"):
            Tokenizer.load(path)
    with pytest.raises(RegardError, match=r"nothing\.tokenizer cannot be read"):
        load_tokenizer(tmp_path / "nothing.tokenizer")


def test_training_twice_gives_the_same_model():
    for kind in ("unigram", "bpe"):
        assert SentencePiece.train(SENTENCES, 80, kind).to_bytes() == KINDS[kind].to_bytes()
        assert len(KINDS[kind]) == 80


@pytest.mark.parametrize("kind", ["unigram", "bpe", "words"])
def test_a_vocabulary_larger_than_the_text_allows_names_the_largest(kind):
    with pytest.raises(RegardError, match=r"a vocabulary of 90000.*\d") as refused:
        train_tokenizer(SENTENCES, 90_000, kind)
    largest = int(re.findall(r"(?:largest possible is|allow \d+ to) (\d+)", str(refused.value))[0])
    assert len(train_tokenizer(SENTENCES, largest, kind)) == largest
    with pytest.raises(RegardError):
        train_tokenizer(SENTENCES, largest + 1, kind)


def test_other_mistakes_are_named():
    with pytest.raises(RegardError, match="smallest possible is"):
        SentencePiece.train(SENTENCES, 9)
    with pytest.raises(RegardError, match="Did you mean 'unigram'"):
        train_tokenizer(SENTENCES, 80, "unigrams")
    for kind in ("unigram", "words"):
        with pytest.raises(RegardError, match="to learn from"):
            train_tokenizer(["", " "], 80, kind)
    with pytest.raises(RegardError, match="words must be different"):
        WordTokenizer(["a", "a"])
    with pytest.raises(RegardError, match="words must be different"):
        WordTokenizer(["a b"])


def test_a_model_with_other_special_ids_is_refused(tmp_path):
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=model, vocab_size=80, minloglevel=2
    )
    with pytest.raises(RegardError, match="pad_id=0"):
        SentencePiece(model.getvalue())


def test_words_are_json_and_take_the_most_frequent(tmp_path):
    words = WordTokenizer.train(["a b b c c c"], 6)
    assert words.words == ("b", "c") and words.encode("a b c") == [UNK, 4, 5]
    assert json.loads(words.to_bytes()) == {"kind": "words", "words": ["b", "c"]}


@every
def test_the_first_word_may_begin_with_a_piece_from_the_middle_of_one(tokenizer):
    ids = tokenizer.encode(SENTENCES[0])[-1:] + tokenizer.encode(SENTENCES[0])
    numbers = tokenizer.word_numbers(ids)
    assert (numbers[0], numbers[1], numbers[-1]) == (0, 1, len(tokenizer.decode(ids).split()) - 1)


def test_subwords_are_learned_from_the_shortest_sentences():
    assert train_tokenizer(["a", "b"] * 9, 8, "bpe").encode("a b")


#: Pieces as a model may write them, "?" the unknown one, with the words they are parts of and the text.
WRITTEN = [
    (["▁", "a", "▁b"], [0, 0, 1], "a b"),
    (["▁", "▁b"], [0, 0], "b"),  # the first space makes no word of its own
    (["▁b", "▁", "▁b"], [0, 1, 1], "b b"),
    (["▁b", "▁", "▁", "a"], [0, 1, 1, 1], "b a"),
    (["▁b", "▁"], [0, -1], "b"),
    (["▁"], [-1], ""),
    (["a", "?", "a"], [0, 0, 0], "a⁇a"),  # an unknown character inside a word parts it no more
    (["?", "a"], [0, 0], "⁇a"),
    (["▁", "?", "▁b"], [0, 0, 1], "⁇ b"),
    (["▁b", "?", "▁", "?", "▁b"], [0, 0, 1, 1, 2], "b⁇ ⁇ b"),
    (["▁b", "▁", "a", "?"], [0, 1, 1, 1], "b a⁇"),
]


def ids_of(tokenizer, pieces):
    known = {piece: number for number, piece in enumerate(tokenizer.pieces(range(len(tokenizer))))} | {"?": UNK}
    return [known[piece] for piece in pieces]


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize(("pieces", "numbers", "text"), WRITTEN)
def test_spaces_and_unknown_characters_join_the_words_they_are_in(kind, pieces, numbers, text):
    tokenizer = train_tokenizer(["a b ab", "b a ba"] * 9, 9, kind)
    ids = ids_of(tokenizer, pieces)
    assert tokenizer.word_numbers(ids) == numbers
    assert tokenizer.decode(ids).split() == text.split()


@every
@given(data=st.data())
def test_words_are_those_of_the_decoded_text_whatever_a_model_writes(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1).filter(lambda number: number != EOS), max_size=12))
    numbers, text = tokenizer.word_numbers(ids), tokenizer.decode(ids).split()
    assert max(numbers, default=-1) + 1 == len(text)
    for place, word in enumerate(text):
        assert tokenizer.decode(i for i, n in zip(ids, numbers, strict=True) if n == place).strip() == word
