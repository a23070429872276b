"""The shortest path: a model and its tokenizer are watched, and shown, saved and drawn without more arguments."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import regard as rg

transformers = pytest.importorskip("transformers")
QUIET = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}


class Words:
    """A tokenizer of 20 words; the first is special."""

    all_special_ids = (0,)

    def convert_ids_to_tokens(self, ids):
        return [f"w{n}" for n in ids]

    def convert_tokens_to_string(self, tokens):
        return " ".join(tokens)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=3, n_head=2, n_embd=8, vocab_size=20, **QUIET)
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module")
def seen(model):
    with torch.no_grad(), rg.watch(model, Words()) as seen:
        model(torch.tensor([[3, 1, 4, 1, 5]]))
    return seen


def page_of(path):
    """The texts of a saved page."""
    data = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', path.read_text(), re.S)
    return json.loads(data[1])["texts"]


def test_a_watch_with_a_tokenizer_knows_what_the_model_read(seen):
    assert seen.tokens_read() == (["w3", "w1", "w4", "w1", "w5"], None)
    assert seen.texts.ids.tolist() == [[3, 1, 4, 1, 5]]


def test_a_watch_is_saved_as_one_page_and_as_a_folder(seen, tmp_path):
    pytest.importorskip("safetensors")
    page = seen.save(tmp_path / "attention.html")
    (text,) = page_of(page)
    assert text["tokens"] == ["w3", "w1", "w4", "w1", "w5"] and len(text["maps"]) == 3
    (sheet,) = rg.viewer.load_run(seen.save(tmp_path / "run"))
    torch.testing.assert_close(sheet.maps[2].dense(), seen[2].dense())


def test_a_watch_that_saw_nothing_has_nothing_to_save(model, tmp_path):
    with pytest.raises(rg.RegardError, match="to save: nothing was captured"), rg.watch(model, Words()) as seen:
        seen.save(tmp_path / "attention.html")
    assert not [*tmp_path.iterdir()]


def test_a_block_in_which_the_model_never_ran_says_what_to_do(model):
    with rg.watch(model) as seen:
        pass
    (name, *_) = seen.missing
    for asks in (lambda: seen[0], lambda: seen[-1], lambda: seen[name], lambda: seen.calls(name), seen.show):
        with pytest.raises(rg.RegardError, match="Run the model inside the with-block of watch"):
            asks()


def test_pictures_of_a_watch_have_the_tokens_of_the_model(seen):
    pytest.importorskip("matplotlib")
    labels = [text.get_text() for text in seen.heatmap(layer=1, head=0).axes[0].get_xticklabels()]
    assert labels == ["w3", "w1", "w4", "w1", "w5"]
    figure = seen.figure(layer=2, head=1, panels=["map"])
    for _, layer, head, _, query, query_token, key, key_token, weight in figure.rows[1:]:
        assert (layer, head, query_token, key_token) == (2, 1, labels[query], labels[key])
        assert weight == pytest.approx(float(seen[2][0, 1, query, key]), abs=1e-6)
    assert len(figure.rows) > 5


def test_a_heatmap_of_a_watch_says_which_layer_it_is(seen):
    pytest.importorskip("matplotlib")
    assert seen.heatmap(1, head=0).axes[0].get_title() == "layer 1, head 0"
    assert seen.heatmap(-1, head="mean").axes[0].get_title() == f"{seen.names[-1]}, mean of heads"
    assert seen.heatmap(1)._suptitle.get_text() == "layer 1"
    assert seen.heatmap(1, head=0, title="mine").axes[0].get_title() == "mine"
    with pytest.raises(rg.RegardError, match="missing a required argument: 'layer'"):
        seen.heatmap()


def test_a_part_of_a_module_path_is_answered_with_the_path(seen):
    inside = seen.names[1].rpartition(".")[0]
    for part in (inside, inside.partition(".")[2]):
        with pytest.raises(rg.RegardError, match=f"Did you mean '{seen.names[1]}'"):
            seen[part]


def test_tokens_of_a_generation_are_the_prompt_and_what_followed(model):
    prompt = torch.tensor([[3, 1, 4]])
    with torch.no_grad(), rg.watch(model, Words()) as seen:
        out = model.generate(prompt, max_new_tokens=4, do_sample=False)
        assert torch.equal(seen.texts.ids, out[:, :-1])  # the last token is never read
        pytest.importorskip("matplotlib")
        labels = [text.get_text() for text in seen.generation.heatmap(layer=1, head=0).axes[0].get_xticklabels()]
        assert labels == [f"w{n}" for n in out[0, :-1].tolist()]
        model(torch.tensor([[7, 8]]))
    assert seen.tokens_read()[0] == ["w7", "w8"]


def test_a_translator_has_tokens_of_its_encoder_and_decoder():
    config = transformers.T5Config(
        vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad(), rg.watch(model, Words()) as seen:
        model(input_ids=torch.tensor([[3, 4, 5]]), decoder_input_ids=torch.tensor([[0, 6]]))
    assert seen.tokens_read() == (["w3", "w4", "w5"], ["w0", "w6"])
    assert seen.cross.tokens_read() == seen.tokens_read()
    with torch.no_grad(), rg.watch(model, Words()) as seen:
        model(input_ids=torch.tensor([[3, 4, 5]]), labels=torch.tensor([[6, 7]]))
    assert seen.tokens_read() == (["w3", "w4", "w5"], ["w0", "w6"])
    with torch.no_grad(), rg.watch(model, Words()) as seen:
        out = model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=3, do_sample=False)
    assert seen.tokens_read() == (["w3", "w4", "w5"], [f"w{n}" for n in out[0, :-1].tolist()])


def test_a_model_of_torch_alone_has_tokens_too():
    model = torch.nn.Sequential(torch.nn.Embedding(20, 8), rg.nn.MultiHeadAttention(8, 2)).eval()
    with torch.no_grad(), rg.watch(model, Words()) as seen:
        model(torch.tensor([[2, 9]]))
    assert seen.tokens_read()[0] == ["w2", "w9"]


def test_an_id_without_a_token_is_shown_by_its_number(model):
    class Short(Words):
        def convert_ids_to_tokens(self, ids):
            return [None if n > 9 else f"Ġw{n}" for n in ids]

    with torch.no_grad(), rg.watch(model, Short()) as seen:
        model(torch.tensor([[3, 15]]))
    assert seen.tokens_read()[0] == ["Ġw3", "<15>"]


@pytest.mark.parametrize("second", [3, [1, 2], "encoder.*", (0,)])
def test_layers_in_the_place_of_the_tokenizer_are_refused(model, second):
    with pytest.raises(rg.RegardError, match="layers="):
        rg.watch(model, second)


def test_a_tokenizer_in_the_place_of_the_model_is_refused(model):
    with pytest.raises(rg.RegardError, match="This is a tokenizer; the model comes first"):
        rg.watch(Words(), model)


def test_an_object_that_is_no_tokenizer_is_refused(model):
    with pytest.raises(rg.RegardError, match="convert_ids_to_tokens"):
        rg.watch(model, model)


WEIGHTS = torch.rand(3, 1, 2, 4, 4).softmax(-1)


@pytest.mark.parametrize(
    ("attentions", "layers"),
    [
        (tuple(WEIGHTS), 3),
        ([None, *WEIGHTS], 3),
        ([layer.numpy() for layer in WEIGHTS], 3),
        ([np.asarray(layer[0], np.float16) for layer in WEIGHTS], 3),
        ((layer for layer in WEIGHTS), 3),
        (WEIGHTS, 3),
        (WEIGHTS.numpy(), 3),
        (SimpleNamespace(attentions=tuple(WEIGHTS)), 3),
        ({"a": WEIGHTS[0], "b": WEIGHTS[1]}, 2),
        (WEIGHTS[0], 1),
        (WEIGHTS[0, 0, 0], 1),
    ],
)
def test_weights_of_any_framework_are_shown(attentions, layers):
    pytest.importorskip("anywidget")
    (sheet,) = rg.show(attentions, ["a", "b", "c", "d"]).answers.sheets
    assert len(sheet.maps) == layers and sheet.about["tokens"] == ["a", "b", "c", "d"]
    shown, expected = sheet.maps[-1].dense()[0, 0].float(), WEIGHTS[layers - 1 if layers > 1 else 0][0, 0]
    torch.testing.assert_close(shown, expected, atol=1e-3 if "float16" in str(attentions) else 1e-6, rtol=0)


def test_weights_that_are_shown_are_saved_as_a_page(tmp_path):
    pytest.importorskip("anywidget")
    shown = rg.show(list(WEIGHTS), ["a", "b", "c", "d"])
    (text,) = page_of(shown.save(tmp_path / "attention.html"))
    assert text["tokens"] == ["a", "b", "c", "d"] and len(text["maps"]) == 3
    with pytest.raises(rg.RegardError, match=r"one \.html file.*savefig"):
        shown.save(tmp_path / "attention.png")
    with pytest.raises(rg.RegardError, match=r"one file, attention\.html, or a folder, attention"):
        shown.save(tmp_path / "attention.txt")


@pytest.mark.parametrize("kind", [torch.long, torch.bool])
def test_weights_of_0_and_1_may_be_integers(kind):
    pytest.importorskip("anywidget")
    (sheet,) = rg.show(torch.eye(3).to(kind), [*"abc"]).answers.sheets
    assert torch.equal(sheet.maps[0].dense()[0, 0], torch.eye(3))


def test_a_watch_is_shown_too_and_outputs_with_several_parts_are_named(seen):
    pytest.importorskip("anywidget")
    (sheet,) = rg.show(seen, [*"abcde"]).answers.sheets
    assert len(sheet.maps) == 3
    with pytest.raises(rg.RegardError, match=r"one of \.encoder_attentions"):
        rg.show(SimpleNamespace(cross_attentions=(), encoder_attentions=()))
    with pytest.raises(rg.RegardError, match=r"each step of a generation.*seen\.generation"):
        rg.show([tuple(WEIGHTS), tuple(WEIGHTS)])


@pytest.mark.parametrize("wrong", [torch.tensor([[3, 1, 4, 1, 5]]), "a text", 3, Words(), [3, 1, 4, 1, 5]])
def test_ids_in_the_place_of_tokens_are_refused_with_the_call_that_names_them(seen, wrong):
    pytest.importorskip("anywidget")
    with pytest.raises(rg.RegardError, match="convert_ids_to_tokens"):
        seen.show(wrong)


def test_an_empty_list_of_layers_is_refused(model):
    with pytest.raises(rg.RegardError, match="Leave out layers="):
        rg.watch(model, layers=[])


def test_scores_in_place_of_weights_are_noticed():
    pytest.importorskip("anywidget")
    with pytest.warns(UserWarning, match="more than 1, so these may be scores") as warned:
        rg.show(torch.ones(2, 5, 5), [*"abcde"])
    assert warned[0].filename == __file__
    with pytest.warns(UserWarning, match="may be scores"):
        rg.show(torch.randn(2, 5, 5), [*"abcde"])
    with pytest.raises(rg.RegardError, match="hold NaN"):
        rg.show(torch.full((1, 2, 5, 5), torch.nan), [*"abcde"])


def test_wrong_tokens_are_named_by_the_call_that_took_them(seen):
    pytest.importorskip("anywidget")
    for call, given in ((rg.show, (list(WEIGHTS), [*"abc"])), (seen.show, ([*"abc"],))):
        with pytest.raises(
            rg.RegardError, match=r"^(show|seen): the map of .* 3 key tokens were given. Give one token"
        ):
            call(*given)


@pytest.mark.parametrize("wrong", [(), [[]], [None, None], "weights", [torch.ones(3)], {"a": 1}, ["a", "b"]])
def test_what_are_no_weights_is_refused_in_words(wrong):
    with pytest.raises(rg.RegardError, match="show"):
        rg.show(wrong)
