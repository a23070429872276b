"""Corpora: files of every kind, splits that share nothing, and every bad input by name."""

from __future__ import annotations

import json
import os
import random
import unicodedata
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.base.errors import RegardError
from regard.lab.data import Pair, WordTokenizer, encode_pairs, load_corpus, split_pairs
from regard.lab.data.drift import suspicious_line
from regard.lab.data.length_limits import pairs_within
from regard.lab.data.tokenizer import train_tokenizer

TEXT = [(f"source sentence number {n}", f"phrase cible numéro {n}") for n in range(40)]


def write(path, lines, encoding="utf-8"):
    path.write_bytes("".join(line + "\n" for line in lines).encode(encoding))
    return path


@pytest.fixture
def files(tmp_path):
    sides = zip(*TEXT, strict=True)
    return [write(tmp_path / name, lines) for name, lines in zip(("a.en", "a.fr"), sides, strict=True)]


def everything(corpus):
    return sorted((pair.source, pair.target) for pair in (*corpus.train, *corpus.valid, *corpus.test))


def test_every_kind_of_file_gives_the_same_corpus(files, tmp_path):
    tsv = write(tmp_path / "a.tsv", [f"{source}\t{target}\tmore" for source, target in TEXT])
    records = [{"translation": {"en": source, "fr": target}} for source, target in TEXT]
    lines = write(tmp_path / "a.jsonl", [json.dumps(record) for record in records])
    corpora = [load_corpus(files), load_corpus(str(tsv))]
    corpora.append(load_corpus(lines, fields=("translation.en", "translation.fr")))
    assert {corpus.hash for corpus in corpora} == {corpora[0].hash}
    assert everything(corpora[0]) == sorted(TEXT)
    assert (len(corpora[0].train), len(corpora[0].valid), len(corpora[0].test)) == (32, 4, 4)
    assert corpora[0].name == "a.en + a.fr"


def test_a_folder_of_datasets_gives_it_too(files, tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"source": [s for s, _ in TEXT], "target": [t for _, t in TEXT]})
    datasets.disable_progress_bars()
    data.save_to_disk(tmp_path / "folder")
    assert load_corpus(tmp_path / "folder").hash == load_corpus(files).hash
    datasets.DatasetDict({"train": data}).save_to_disk(tmp_path / "splits")
    with pytest.raises(RegardError, match="has the splits train"):
        load_corpus(tmp_path / "splits")
    with pytest.raises(RegardError, match=r"no text in the field 'en'. Its fields: source, target"):
        load_corpus(tmp_path / "folder", fields=("en", "target"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(RegardError, match="not a folder that save_to_disk wrote"):
        load_corpus(tmp_path / "empty")


def test_own_splits_stay_as_they_are(files):
    corpus = load_corpus({"train": files, "valid": files, "test": files}, max_words=4, languages=("en", "fr"))
    assert corpus.train == corpus.valid == corpus.test and len(corpus.train) == 40
    assert (corpus.source_language, corpus.target_language) == ("en", "fr")
    with pytest.raises(RegardError, match="must be train, valid and test, got train, dev"):
        load_corpus({"train": files, "dev": files})
    with pytest.raises(RegardError, match=r"the split train .* has no usable pair"):
        load_corpus({"train": files, "valid": files, "test": files}, max_words=1)


@given(st.lists(st.integers(0, 30), min_size=30, max_size=80), st.integers(0, 5), st.integers(1, 5), st.integers(1, 5))
def test_splits_never_share_a_source_and_lose_nothing(sources, seed, valid, test):
    pairs = [Pair(f"source {source}", f"target {n}", str(n)) for n, source in enumerate(sources)]
    try:
        splits = split_pairs(pairs, valid, test, seed)
    except RegardError as error:
        assert "too few" in str(error)
        return
    found = [{pair.source for pair in split} for split in splits]
    assert not (found[0] & found[1] or found[0] & found[2] or found[1] & found[2])
    assert sorted(int(pair.id) for split in splits for pair in split) == list(range(len(pairs)))
    assert 0 < len(splits[1]) <= valid and 0 < len(splits[2]) <= test


def test_splits_depend_on_the_seed_alone():
    pairs = [Pair(*sides) for sides in TEXT]
    again = pairs.copy()
    random.Random(0).shuffle(again)
    assert set(split_pairs(pairs)[2]) == set(split_pairs(again)[2])
    assert set(split_pairs(pairs)[2]) != set(split_pairs(pairs, seed=1)[2])


def test_what_is_left_out_is_counted(tmp_path):
    source = write(tmp_path / "a", [*(s for s, _ in TEXT), "", "one", "a b c d e f", "   "])
    target = write(tmp_path / "b", [*(t for _, t in TEXT), "un", "", "a b c d e f g", " "])
    corpus = load_corpus([source, target], max_words=6)
    assert dict(corpus.skipped) == {"with an empty side": 3, "longer than 6 words": 1}
    assert everything(corpus) == sorted(TEXT)
    assert corpus.describe().endswith("left out: 3 with an empty side, 1 longer than 6 words.")
    assert ("a b c d e f", "a b c d e f g") in everything(load_corpus([source, target], max_words=7))


def test_line_ends_byte_order_marks_and_odd_line_breaks_are_no_text(tmp_path):
    source = tmp_path / "a"
    source.write_bytes("\ufeff".encode() + "".join(f"line\u2028 {n}\r\n" for n in range(20)).encode())
    target = write(tmp_path / "b", [f"ligne {n}" for n in range(20)])
    assert everything(load_corpus([source, target]))[0] == ("line\u2028 0", "ligne 0")


def test_a_corpus_in_the_other_direction():
    corpus = load_corpus("grammar", size=50)
    back = corpus.swapped
    assert back.swapped == replace(corpus) and back.train[0].source == corpus.train[0].target
    assert {(j, i) for i, j in back.train[0].gold} == corpus.train[0].gold
    assert back.hash != corpus.hash and len(corpus.hash) == 64


def test_pairs_become_ids():
    pairs = [Pair("a b", "c")]
    assert encode_pairs(pairs, WordTokenizer(["a", "b"]), WordTokenizer(["c"])) == [([4, 5], [4])]


# ---- Bad input ----


@pytest.mark.parametrize("missing", [0, 7, 21, 39])
def test_line_counts_that_differ_name_both_and_the_first_suspicious_line(tmp_path, missing):
    draw = random.Random(3)
    source = [" ".join(["word"] * draw.randint(1, 30)) for _ in range(40)]
    target = [line.replace("word", "parole") for line in source]
    del target[missing]
    names = [write(tmp_path / "a.en", source), write(tmp_path / "a.fr", target)]
    found = suspicious_line(source, target)
    assert abs(found - (missing + 1)) <= 1
    with pytest.raises(RegardError, match=rf"a\.en has 40 lines and .*a\.fr 39; .*suspicious line is {found}:"):
        load_corpus(names)
    assert suspicious_line(target, source) == found


def test_an_empty_file_is_named(tmp_path, files):
    empty = write(tmp_path / "empty", [])
    for names in ([files[0], empty], [empty, files[0]], [empty, empty]):
        with pytest.raises(RegardError, match=r"empty is empty\. Give one sentence per line"):
            load_corpus(names)


def test_bytes_that_are_not_utf8_are_named(files, tmp_path):
    wrong = write(tmp_path / "a.latin", [t for _, t in TEXT], "latin-1")
    with pytest.raises(RegardError, match=r"line 1 of .*a\.latin is not UTF-8 text \(byte 17 of the line is 0xe9\)"):
        load_corpus([files[0], wrong])


def test_too_few_pairs_are_refused(tmp_path):
    path = write(tmp_path / "a.tsv", [f"a {n}\tb {n}" for n in range(9)])
    with pytest.raises(RegardError, match="9 pairs are too few"):
        load_corpus(path)
    path = write(tmp_path / "a.tsv", [f"a {n}\tb {n}" for n in range(20)])
    with pytest.raises(RegardError, match="20 pairs are too few for 10 validation pairs, 10 test pairs"):
        load_corpus(path, valid=10, test=10)
    path = write(tmp_path / "a.tsv", [f"the same\tb {n}" for n in range(20)])
    with pytest.raises(RegardError, match="1 different sources"):
        load_corpus(path)


def test_a_line_that_is_no_sentence_is_left_out_counted_and_named(tmp_path):
    slips = {3: "word " * 1001, 7: "x" * 10_001, 11: "ว" * 1001}
    pairs = [f"a {n}\t{slips.get(n, 'b')}" for n in range(1, 41)]
    corpus = load_corpus(write(tmp_path / "a.tsv", pairs))
    assert corpus.describe().endswith("left out: 3 longer than 1,000 words or 10,000 characters (3, 7, 11).")
    whole = load_corpus(write(tmp_path / "a.tsv", pairs), max_words=2000)
    assert sum(map(len, (whole.train, whole.valid, whole.test))) == 40
    many = [f"a {n}\t{'word ' * 1001 if n > 12 else 'b'}" for n in range(1, 41)]
    assert "(13, 14, 15, 16, 17, ...)" in load_corpus(write(tmp_path / "a.tsv", many)).describe()


@pytest.mark.parametrize("text", ["…", "\ufdfa", "a", "é", "각", "q\u0323\u0307"])
def test_pairs_within_a_limit_have_no_more_pieces_however_a_text_is_normalized(text):
    pytest.importorskip("sentencepiece")
    sentences = ["the dog sees a cat.", "a cat sees the dog", "é 각 q ̣ ̇ صلى الله عليه وسلم"] * 20
    pieces = train_tokenizer(sentences, kind="unigram", size=33)
    pair, count = Pair(text * 50, text * 50), len(pieces.encode(text * 50))
    for most in (*range(40, 60), count - 1, count):
        assert pairs_within([pair], pieces, pieces, most) == ((pair,) if count <= most else ())


@pytest.mark.parametrize(
    "same",
    [
        lambda text, n: " " * (n % 4) + text + "\n" * (n % 3),
        lambda text, n: text.replace(" ", " " * (n % 4 + 1)),
        lambda text, n: unicodedata.normalize(("NFC", "NFD", "NFKC")[n % 3], text),
    ],
)
def test_no_source_is_on_both_sides_of_a_split_however_it_is_spaced(same):
    pairs = [Pair(same(f"été {n // 3} à la mer", n), f"t {n}") for n in range(120)]
    splits = split_pairs(pairs)
    sources = [{unicodedata.normalize("NFC", " ".join(pair.source.split())) for pair in split} for split in splits]
    assert not sources[0] & sources[1] and not sources[0] & sources[2] and not sources[1] & sources[2]
    assert sum(map(len, splits)) == 120 and all(splits)


def test_other_mistakes_are_named(files, tmp_path):
    with pytest.raises(RegardError, match="Did you mean 'grammar'"):
        load_corpus("gramar")
    with pytest.raises(RegardError, match=r"no file .*nothing\.tsv"):
        load_corpus(str(tmp_path / "nothing.tsv"))
    with pytest.raises(RegardError, match=r"line 1 of .*a\.en has no tab"):
        load_corpus(files[0])
    with pytest.raises(RegardError, match="got 3 files"):
        load_corpus([*files, files[0]])
    broken = write(tmp_path / "a.jsonl", ['{"source": "a", "target": "b"}', "{"])
    with pytest.raises(RegardError, match=r"line 2 of .*a\.jsonl is not JSON"):
        load_corpus(broken)
    broken = write(tmp_path / "a.jsonl", ['{"source": "a", "target": "b"}', "", "null"])
    with pytest.raises(RegardError, match=r"line 3 of .*a\.jsonl is null"):
        load_corpus(broken)
    broken = write(tmp_path / "a.jsonl", ['{"source": "a", "other": 3}'])
    with pytest.raises(RegardError, match=r"line 1 of .* no text in the field 'target'. Its fields: source, other"):
        load_corpus(broken)
    broken = write(tmp_path / "a.jsonl", ["[1]"])
    with pytest.raises(RegardError, match="none, it is a list"):
        load_corpus(broken)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(files):
    files[0].chmod(0)
    with pytest.raises(RegardError, match="cannot be read"):
        load_corpus(files)


def test_half_a_character_in_json_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"source": "a", "target": "b"}\n{"source": "a \\ud83d", "target": "b"}\n')
    with pytest.raises(RegardError, match=r"line 2 of .* half a character in the field 'source'"):
        load_corpus(tmp_path / "a.jsonl")
