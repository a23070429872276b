"""Corpora of five scripts and more: their words, their BLEU, and what is made of both."""

from __future__ import annotations

import json
import unicodedata

import pytest
import sacrebleu
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.lab import build
from regard.lab.data import Pair, WordTokenizer, nearest_pairs, train_tokenizer
from regard.lab.data.words import cut, script_without_spaces
from regard.lab.decoding.alignment import align, attention_of
from regard.lab.decoding.search import Search
from regard.lab.decoding.translation import TranslationOptions, translate
from regard.lab.evaluation import metrics
from regard.lab.evaluation.scores import Evaluation, paired_comparison, score

pytest.importorskip("pydantic")

JAPANESE = [
    "私は学生です。",
    "彼は東京に住んでいます。",
    "猫が魚を食べた。",
    "コーヒーを一杯ください。",
    "明日は雨が降るでしょう。",
]
CHINESE = ["我爱北京。", "他住在上海。", "猫吃了鱼。", "请给我一杯咖啡。", "明天会下雨。"]
THAI = ["ฉันเป็นนักเรียน", "เขาอยู่ที่กรุงเทพ", "แมวกินปลา", "ขอกาแฟหนึ่งแก้ว", "พรุ่งนี้ฝนจะตก"]
ARABIC = ["أنا طالب.", "هو يسكن في القاهرة.", "أكلت القطة السمكة.", "أعطني فنجان قهوة.", "ستمطر غدا."]
HINDI = ["मैं छात्र हूँ।", "वह दिल्ली में रहता है।", "बिल्ली ने मछली खाई।", "एक कप कॉफ़ी दीजिए।", "कल बारिश होगी।"]
GREEK = ["Είμαι φοιτητής.", "Μένει στην Αθήνα.", "Η γάτα έφαγε το ψάρι.", "Έναν καφέ, παρακαλώ.", "Αύριο θα βρέξει."]
SPACED, SPACELESS = (ARABIC, HINDI, GREEK), (JAPANESE, CHINESE, THAI)


@pytest.mark.parametrize("texts", SPACED + SPACELESS, ids=lambda texts: texts[0])
def test_words_are_the_text_without_its_spaces(texts):
    for text in [*texts, " ".join(texts), f"{texts[0]} Regard 3.5 {texts[1]}"]:
        words = cut(text)
        assert "".join(words) == "".join(text.split())
        assert not any(unicodedata.category(word[0]).startswith("M") for word in words), "a mark stays with its letter"
        if texts in SPACED:
            assert words == text.split()
        else:
            assert len(words) > 2 * len(text.split())


@given(st.lists(st.text(min_size=1).filter(lambda word: len(word.split()) == 1), max_size=5))
@settings(max_examples=40, deadline=None)
def test_words_of_any_text_have_all_of_its_characters(words):
    text = " ".join(words)
    assert "".join(cut(text)) == "".join(text.split()) and all(word.split() == [word] for word in cut(text))


def test_a_text_that_was_cut_already_is_left_as_it_is():
    for text in ("私 は 学生 です 。", "我们 住 在 北京 。", "แมว กิน ปลา"):
        assert cut(text) == text.split() and script_without_spaces([text]) == ""


def test_the_tokenizer_of_bleu_follows_the_script(monkeypatch):
    assert [metrics.bleu_tokenizer(texts) for texts in (*SPACED, ["Go on."])] == ["13a"] * 4
    assert metrics.bleu_tokenizer(CHINESE) == "zh"
    monkeypatch.setattr(metrics, "is_installed", lambda name: name in ("13a", "zh", "char"))
    assert [metrics.bleu_tokenizer(texts) for texts in (JAPANESE, THAI)] == ["char", "char"]
    monkeypatch.setattr(metrics, "is_installed", lambda name: True)
    assert [metrics.bleu_tokenizer(texts) for texts in (JAPANESE, THAI)] == ["ja-mecab", "flores200"]


def test_a_tokenizer_that_is_not_there_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"ja-mecab is not installed here: pip install 'sacrebleu\[ja\]'"):
        score(JAPANESE, JAPANESE, JAPANESE, tokenizer="ja-mecab")
    with pytest.raises(ValueError, match=r"no tokenizer 'chars'\. Did you mean 'char'"):
        score(JAPANESE, JAPANESE, JAPANESE, tokenizer="chars")


@pytest.mark.parametrize(("texts", "tokenizer"), [(JAPANESE, "char"), (CHINESE, "zh"), (THAI, "char"), (HINDI, "13a")])
def test_every_number_is_of_the_tokenizer_that_is_named(texts, tokenizer, monkeypatch):
    monkeypatch.setattr(metrics, "is_installed", lambda name: name in ("13a", "zh", "char"))
    said = [*texts[:3], texts[3][:-2], texts[4] + texts[0]]
    found = score(said, texts, texts)
    metric = sacrebleu.BLEU(tokenize=tokenizer)
    assert found.tokenizer == tokenizer
    assert found.bleu.score == pytest.approx(metric.corpus_score(said, [texts]).score)
    assert f"|tok:{tokenizer}|" in found.bleu.signature
    assert found.interval[0] < found.bleu.score < found.interval[1]
    lengths = [sum(len(metric.tokenizer(text).split()) for text in side) for side in (said, texts)]
    assert found.length_ratio == pytest.approx(lengths[0] / lengths[1])
    assert 0 < found.ter.score < 60, "a sentence without spaces is not one word"
    again = Evaluation.from_json(json.loads(json.dumps(found.to_json())))
    assert again == found
    assert paired_comparison(found, again, texts).bleu[0] == pytest.approx(found.bleu.score)
    with pytest.raises(ValueError, match="with the same tokenizer"):
        paired_comparison(found, score(said, texts, texts, tokenizer={"13a": "char"}.get(tokenizer, "13a")), texts)


@pytest.mark.parametrize("texts", [*SPACELESS, HINDI], ids=lambda texts: texts[0])
def test_sentences_are_near_by_their_words(texts):
    near = texts[2][:-1] + texts[0][-2:] if texts in SPACELESS else "बिल्ली ने रोटी खाई।"
    found = nearest_pairs(texts, [near])
    assert found.index.tolist() == [2] and 0.2 < found.similarity[0] < 1
    assert max(Pair(text, "x").words for text in texts) > 2


def characters(tokenizer, ids):
    """The piece of every character, and how many characters that has; a space before the text is a part of it."""
    spelt = ["".join(tokenizer.decode([each]).split()) or " " for each in ids]
    return [(piece, len(text)) for piece, text in enumerate(spelt) for _ in text]


@pytest.mark.parametrize(("texts", "kind"), [(JAPANESE, "bpe"), (CHINESE, "unigram"), (THAI, "bpe")])
def test_alignments_are_of_words_and_not_of_sentences(texts, kind):
    """Each character looks as its piece does, shared out evenly over the characters of the pieces it looks at."""
    size = {"bpe": 70, "unigram": 30}[kind]
    tokenizer = train_tokenizer(texts * 3, size, kind)
    torch.manual_seed(3)
    model = build("bahdanau", source_size=len(tokenizer), target_size=len(tokenizer), width=8).eval()
    source, target = texts[1], texts[3]
    x, y = tokenizer.encode(source), tokenizer.encode(target)
    (found,) = align(model, (tokenizer, tokenizer), [x], [y])
    assert found.source == tuple(cut(source)) and found.target == tuple(cut(target))
    rows = attention_of(model, torch.tensor([[*x, 3]]), torch.tensor([[2, *y]]))["bridge"].dense()[0, 0].double()
    across, down = characters(tokenizer, x), characters(tokenizer, y)
    lengths = [[len(word) for word in side] for side in (found.target, found.source)]
    for side, all_of in zip(lengths, (down, across), strict=True):
        side[0] += len(all_of) - sum(side)
    expected, t = torch.zeros(len(found.target), len(found.source), dtype=torch.float64), 0
    for row, height in enumerate(lengths[0]):
        inside, s = down[t : t + height], 0
        total = sum(1 / size for _, size in inside)
        for column, width in enumerate(lengths[1]):
            pairs = [(p, q) for p in inside for q in across[s : s + width]]
            expected[row, column] = sum(rows[p, q] / n / m for (p, n), (q, m) in pairs) / total
            s += width
        t += height
    torch.testing.assert_close(found.weights.double(), expected, rtol=1e-5, atol=1e-6)


def test_words_that_a_vocabulary_of_words_was_given_are_not_cut_further():
    words = WordTokenizer(["私は", "学生です"])
    model = build("bahdanau", source_size=6, target_size=6, width=8).eval()
    (found,) = align(model, (words, words), [words.encode("私は 学生です")], [words.encode("学生です")])
    assert found.source == ("私は", "学生です") and found.target == ("学生です",)


def test_unknown_words_of_a_text_without_spaces_are_replaced_in_their_places():
    tokenizer = train_tokenizer(JAPANESE * 3, 70, "bpe")
    model = build("bahdanau", source_size=len(tokenizer), target_size=len(tokenizer), width=8).eval()
    with torch.no_grad():  # nothing but UNK, and then the end
        output = next(m for m in model.modules() if isinstance(m, torch.nn.Linear) and m.out_features == len(tokenizer))
        output.weight.zero_()
        output.bias.zero_()
        output.bias[1] = 9.0
    search = Search(beam=1, max_length=3)
    wanted = TranslationOptions(search, reading="output", replace_unknown=True)
    (done,) = translate(model, tokenizer, tokenizer, ["猫が魚を"], wanted)
    assert done.text == "".join(done.alignment.target) and set(done.alignment.target) <= {"猫", "が", "魚", "を"}


def test_pieces_and_pictures_of_text_without_spaces():
    from rich.cells import cell_len

    from regard.lab.commands.translate import picture
    from regard.lab.decoding.alignment import Alignment
    from regard.lab.evaluation.pair_maps import _labels

    tokenizer = train_tokenizer(JAPANESE * 3, 70, "bpe")
    labels = _labels(tokenizer, tokenizer.encode(JAPANESE[0]))
    assert "".join(labels) == JAPANESE[0], "no piece is marked as the inside of a word"
    drawn = picture(Alignment(("a", "b"), ("猫", "ねずみ", "x"), torch.full((3, 2), 0.5))).plain.splitlines()[:3]
    assert len({cell_len(line.split("│")[0]) for line in drawn}) == 1, "the cells begin in one column"
