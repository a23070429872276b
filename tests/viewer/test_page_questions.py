"""Questions to the live model of a page: what changes without some weights."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from test_live_model import get, minilm, post

import regard as rg
from dense_edits import Dense
from pages import served
from regard.base.errors import RegardError
from regard.viewer import load_run, save_run
from regard.viewer.live_model import text_model
from regard.viewer.live_request import METHODS, LiveRequest
from regard.viewer.page import payload

transformers = pytest.importorskip("transformers")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
tokenizers = pytest.importorskip("tokenizers")

__all__ = ["minilm"]
WORDS = ["the", "cat", "sat", "on", "a", "mat", "because", "it", "was", "tired"]
TEXT = " ".join(WORDS)


def small(backend):
    """A GPT-2 with random weights."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 3, "n_embd": 24, "n_positions": 40, "vocab_size": len(WORDS) + 1}
    config = transformers.GPT2Config(**sizes, initializer_range=0.5, bos_token_id=None, eos_token_id=None)
    return transformers.GPT2LMHeadModel._from_config(config, attn_implementation=backend).eval()


@pytest.fixture(scope="module")
def reader():
    """The small model, with one token for each word."""
    vocabulary = {word: n for n, word in enumerate([*WORDS, "<unk>"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = ["input_ids", "attention_mask"]  # older ones add types of tokens, which GPT-2 embeds
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", model_input_names=names)
    return rg.TextReader(small("sdpa"), fast, name="tiny")


def answered(reader, question, **fields):
    return text_model(reader).answer(LiveRequest(TEXT, question, **fields), lambda: None)


@torch.no_grad()
def test_what_changes_is_that_of_dense_attention_with_a_mask(reader):
    dense, ids = Dense(), torch.arange(len(WORDS))[None]
    transformers.AttentionInterface.register("dense page", dense)
    transformers.AttentionMaskInterface.register("dense page", transformers.masking_utils.eager_mask)
    oracle, everywhere = small("dense page"), {"kind": "knock", "layers": range(2), "heads": range(3)}
    one, whole = {"kind": "knock", "layers": [1], "heads": [2]}, {"queries": range(99), "keys": range(99)}
    cases = {
        ("L1.H2: #7 -> #1",): [one | {"queries": [7], "keys": [1]}],
        ("*: * -> #3", "L0.H1"): [everywhere | whole | {"keys": [3]}, one | whole | {"layers": [0], "heads": [1]}],
        ("L1.H2: #9 -> #9",): [one | {"queries": [9], "keys": [9]}],
    }
    before = oracle(ids).logits[0, -1].softmax(-1)
    for edits, expected in cases.items():
        [sheet] = answered(reader, "edits", edits=edits)
        dense.edits = expected
        result = oracle(ids, output_attentions=True)
        dense.edits = []
        after, effect = result.logits[0, -1].softmax(-1), sheet.about["effect"]
        assert effect["kind"] == "next token" and len(effect["probabilities"]) >= 6
        for token, old, new in effect["probabilities"]:
            number = [*WORDS, "<unk>"].index(token)
            assert [old, new] == pytest.approx([float(before[number]), float(after[number])], abs=1e-5)
        names = [*WORDS, "<unk>"]
        assert {row[0] for row in effect["probabilities"]} >= {names[int(p.argmax())] for p in (before, after)}
        for layer, weights in enumerate(sheet.maps):
            torch.testing.assert_close(weights.dense(), result.attentions[layer], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        (["L7.H0"], "It has layers 0, 1"),
        (["L0.H3"], "has heads 0 to 2"),
        (["L0", "L1.H2: #10 -> #1"], "had queries 0 to 9"),
        (["*: * -> #10"], "had keys 0 to 9"),
    ],
)
def test_edits_of_what_is_not_there_are_refused_in_words(reader, edits, words):
    with pytest.raises(RegardError, match=words):
        answered(reader, "edits", edits=tuple(edits))


def test_a_page_asks_what_changes_and_the_answer_is_kept_with_its_text(minilm, tmp_path):
    typed, edits = "The cat sat, because it was tired.", ["L2.H1: #6 -> #2", "*: * -> #2"]
    model = text_model(minilm)
    with served(model.read(typed, lambda: None), model=model) as address:
        body = json.dumps({"text": typed, "edits": edits})
        status, answer = post(address, typed, body=body)
        assert status == 200 and post(address, typed, body=body)[1] == answer, "kept"
        number, title = answer["texts"][0]
        assert title == f"{typed} (without L2.H1: it → cat, cat in every head)"
        sheet = json.loads(get(address, f"text/{number}")[1])
        weights = np.frombuffer(get(address, f"columns/{number}/4/2")[1], "<f4")
        assert not weights.any(), "no query of any head sees the word"
        assert post(address, typed)[1]["texts"][0] != answer["texts"][0], "the text with all its weights is another"
        status, refused = post(address, typed, body=json.dumps({"text": typed, "edits": ["L2.H99"]}))
        assert status == 200 and "heads 0 to 11" in refused["refused"]
        assert post(address, typed, body=json.dumps({"text": typed, "edits": ["L2.H1"] * 65}))[0] == 400
    effect, tokens = sheet["effect"], sheet["tokens"]
    assert effect["of"] == sheet["written"] == typed and effect["kind"] == "sentence embedding"
    edit = rg.edits.EditSequence(tuple(rg.KnockOut(rg.Where.parse(short)) for short in edits))
    inputs = minilm.tokenizer(typed, return_tensors="pt")
    with torch.no_grad():
        before = minilm.model(**inputs).last_hidden_state[0]
        with rg.edit(minilm.model, edit):
            after = minilm.model(**inputs).last_hidden_state[0]
    moved = (after - before).norm(dim=-1) / before.norm(dim=-1)
    assert effect["moved"][0] == [tokens[int(moved.argmax())], pytest.approx(float(moved.max()), rel=1e-4)]
    assert f"cosine {float(torch.cosine_similarity(before.mean(0), after.mean(0), 0)):.4f}" in effect["sentence"]
    edited = model.answer(LiveRequest(typed, "edits", tuple(edits)), lambda: None)
    assert payload(edited)["texts"][0]["effect"] == effect, "a page that is one file has it too"
    save_run(tmp_path / "kept", edited)
    assert load_run(tmp_path / "kept")[0].about["effect"] == effect


def test_a_continued_text_has_the_rows_of_each_step(reader, tmp_path):
    model, steps = text_model(reader), 6
    sheets = model.answer(LiveRequest(TEXT, "generate", generate=steps), lambda: None)
    about = sheets[0].about
    ids = torch.arange(len(WORDS))[None]
    expected = reader.model.generate(ids, max_new_tokens=steps, do_sample=False, pad_token_id=0)[0]
    assert about["generation"] == {"prompt": len(WORDS), "labels": [[*WORDS, "<unk>"][n] for n in expected]}
    assert about["tokens"] == about["generation"]["labels"][:-1] and about["written"] == TEXT
    with rg.watch(reader.model) as seen, torch.no_grad():
        reader.model(expected[None, :-1])
    for layer, weights in enumerate(sheets[0].maps):
        torch.testing.assert_close(weights.dense(), seen[layer].dense(), atol=1e-5, rtol=1e-4)
    assert payload(sheets)["texts"][0]["generation"] == about["generation"]
    save_run(tmp_path / "kept", sheets)
    assert load_run(tmp_path / "kept")[0].about["generation"] == about["generation"]
    with pytest.raises(RegardError, match="above the 40 tokens that the model takes"):
        model.answer(LiveRequest(TEXT, "generate", generate=31), lambda: None)


def test_an_encoder_without_a_head_neither_continues_a_text_nor_explains_a_token(minilm):
    model = text_model(minilm)
    with served(model.read("A cat sat.", lambda: None), model=model) as address:
        status, said = post(address, "", body='{"text": "A cat sat.", "generate": 5}')
        assert status == 400 and "'generate'; beside the text this model reads edits." in said
        question = {"text": "A cat sat.", "attribute": {"method": "weight-gradient", "target": None}}
        status, said = post(address, "", body=json.dumps(question))
        assert status == 400 and "'attribute'; beside the text this model reads edits." in said


@pytest.mark.parametrize("method", METHODS)
def test_every_method_of_attribution_answers_on_the_page(reader, method):
    ids = torch.arange(len(WORDS))[None]
    expected = rg.attribute(reader.model, ids, "mat", method, tokenizer=reader.tokenizer, test=False)
    [sheet] = answered(reader, "attribute", attribute=(method, "mat"))
    about = sheet.about["attribution"]
    assert (
        about["method"] == method and method in sheet.about["title"] and method in text_model(reader).about["methods"]
    )
    torch.testing.assert_close(torch.tensor(about["relevance"]), expected.tokens()[0].float(), atol=1e-6, rtol=1e-4)


def test_an_attribution_is_the_gradient_of_the_dense_weights_with_its_curves(reader, tmp_path):
    [sheet] = answered(reader, "attribute", attribute=("weight-gradient", "mat"))
    torch.manual_seed(0)
    oracle, ids = small("eager"), torch.arange(len(WORDS))[None]
    weights, keep = [], []
    for block in oracle.transformer.h:

        def record(module, arguments, output):
            output[1].retain_grad()
            weights.append(output[1])

        keep.append(block.attn.register_forward_hook(record))
    oracle(ids, output_attentions=True).logits[0, -1, WORDS.index("mat")].backward()
    for expected, links in zip(weights, sheet.maps, strict=True):
        torch.testing.assert_close(links.dense(), expected.detach() * expected.grad, atol=1e-5, rtol=1e-3)
        assert links.is_signed
    about, test = sheet.about, rg.attribute(reader.model, ids, "mat", tokenizer=reader.tokenizer).test
    deletion, insertion = about["charts"]
    assert [point[1] for point in deletion["series"][0]["points"]] == pytest.approx(test.deletion.tolist(), abs=1e-5)
    assert [row[1:] for row in insertion["band"]] == [
        pytest.approx([low, high], abs=1e-5)
        for low, high in zip(
            test.random_insertion.amin(0).tolist(), test.random_insertion.amax(0).tolist(), strict=True
        )
    ]
    assert about["attribution"]["of"] == TEXT and len(about["attribution"]["test"]) >= 2
    save_run(tmp_path / "kept", [sheet])
    kept = load_run(tmp_path / "kept")[0].about
    assert kept["attribution"] == about["attribution"] and kept["charts"] == about["charts"]
    with pytest.raises(RegardError, match="no single token"):
        answered(reader, "attribute", attribute=("weight-gradient", "mat cat"))
