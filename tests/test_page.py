"""The page: whole, offline, safe with any text, of bounded size, and true to the weights."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import regard as rg
from regard.stats import Finding, Reading, Role, RoleTable
from regard.stats.roles import KINDS
from regard.viewer import page as page_module
from regard.viewer import write_page
from regard.viewer.page import embed, payload, quantise, render

HOSTILE = ["</script><img src=x onerror=alert(1)>", "<!--", "&amp;", "\u2028", "<!--data-->", '"\\', "]]>"]


def reading(title="A text", length=7, heads=2, layers=2, tokens=None, mask=None):
    maps = {}
    for layer in range(layers):
        q, k, v = (torch.randn(1, heads, length, 4) for _ in range(3))
        maps[f"layer.{layer}"] = rg.attend(rg.Attention(mask=mask), q, k, v).weights
    return Reading.of(title, maps, tokens or [f"t{i}" for i in range(length)])


def data_of(page):
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert len(found) == 1
    return json.loads(found[0])


def numbers(coded, kind="u1"):
    return np.frombuffer(base64.b64decode(coded), kind)


def test_the_page_needs_nothing_from_outside():
    page = render([reading()])
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|fetch\(|XMLHttp|import\(|<link[^>]+href=\"(?!data:)", page)
    assert "default-src 'none'" in page
    assert "innerHTML" not in page and "insertAdjacentHTML" not in page and "document.write" not in page
    assert "<!--style-->" not in page and "<!--script-->" not in page


def test_hostile_text_stays_text():
    text = reading(title=HOSTILE[0], tokens=HOSTILE)
    page = render([text])
    assert "<img" not in page and page.count("</script>") == 2
    shown = data_of(page)["texts"][0]
    assert shown["title"] == HOSTILE[0] and shown["tokens"] == HOSTILE


def test_embedded_json_comes_back():
    data = {"a": [*HOSTILE, 1.5, None]}
    assert not set("<>&\u2028\u2029") & set(embed(data))
    assert json.loads(embed(data)) == data


def test_short_texts_are_shown_weight_by_weight():
    text = reading(mask=rg.causal())
    head = payload([text])["texts"][0]["layers"][1]["heads"][1]
    steps = numbers(head["map"]).reshape(7, 7).astype(float)
    dense = text.maps["layer.1"].dense()[0, 1].numpy()
    shown = np.where(steps > 0, ((steps - 1) / 254) ** 2, 0)
    assert ((steps == 0) == (dense == 0)).all()
    np.testing.assert_allclose(shown, dense, atol=2 / 254)
    keys, weights = (numbers(head[name], "<u2").reshape(7, -1) for name in ("keys", "weights"))
    present = keys != 65535
    rows = np.broadcast_to(np.arange(7)[:, None], keys.shape)
    np.testing.assert_allclose(weights[present] / 65535, dense[rows[present], keys[present]], atol=1e-5)
    assert (present.sum(-1) == np.minimum(np.arange(7) + 1, head["links"])).all()


@pytest.mark.parametrize("weight", [0.0, 1e-12, 0.25, 1.0, 1.0000001])
def test_only_nothing_is_the_byte_of_nothing(weight):
    byte = int(quantise(torch.tensor([weight]))[0])
    assert (byte == 0) == (weight == 0)
    assert abs(((byte - 1) / 254) ** 2 - weight) < 0.004 or byte == 0


def test_long_texts_are_pooled_and_the_page_stays_small(monkeypatch):
    monkeypatch.setattr(page_module, "MAP_BYTES", 60_000)
    monkeypatch.setattr(page_module, "LINK_BYTES", 30_000)
    texts = [reading(length=200), reading(length=6), reading(length=150)]
    page = render(texts)
    shown = data_of(page)["texts"]
    assert [text["rows"] for text in shown][1] == 6 and shown[0]["rows"] < 200
    assert [len(text["tokens"]) for text in shown] == [200, 6, 150]
    maps = sum(len(h["map"]) for text in shown for layer in text["layers"] for h in layer["heads"])
    links = sum(
        len(h["keys"]) + len(h["weights"]) for text in shown for layer in text["layers"] for h in layer["heads"]
    )
    assert maps < 61_000 and links < 31_000
    side = shown[0]["rows"]
    cells = numbers(shown[0]["layers"][0]["heads"][0]["map"]).reshape(side, side).astype(float)
    np.testing.assert_allclose((((cells - 1).clip(0) / 254) ** 2).sum(-1), 1, atol=0.1)


def test_72_heads_at_512_tokens_fit(monkeypatch):
    monkeypatch.setattr(page_module, "MAP_BYTES", page_module.MAP_BYTES // 36)
    monkeypatch.setattr(page_module, "LINK_BYTES", page_module.LINK_BYTES // 36)
    assert len(render([reading(length=512, heads=2, layers=1)])) * 36 < 15_000_000


def test_the_page_opens_with_the_pronoun():
    shown = payload([reading(tokens=["[CLS]", "a", "cat", "said", "it", "ran", "[SEP]"])])["texts"][0]
    assert shown["start"]["query"] == 4 and shown["special"] == [0, 6]


def told(text):
    """Layer 1 of a text with two roles on head 1, one of them earned, and a warning about its mask."""
    table = [Role("previous", 1, 1, 0.91, 0.88, True, 0.1, 30), Role("next", 1, 1, 0.1, 0.1, False, 0.1, 30)]
    return replace(text, roles=RoleTable(table), masks=[Finding("leak", 1, (0,), 0.5, "Layer 1 head 0 sees ahead.")])


def test_roles_stand_beside_their_null_and_masks_among_the_warnings():
    data = payload([told(reading())])
    shown = data["texts"][0]
    (role,) = shown["layers"][1]["heads"][1]["roles"]
    assert (role["kind"], role["score"], role["null"], role["chance"]) == ("previous", 0.91, 0.88, 0.1)
    assert not shown["layers"][0]["heads"][1]["roles"] and shown["told"]
    assert shown["findings"][0]["sentence"] == "Layer 1 head 0 sees ahead."
    assert set(data["kinds"]) == set(KINDS) and len({kind["letter"] for kind in data["kinds"].values()}) == len(KINDS)
    assert not payload([reading()])["texts"][0]["told"]


def test_chosen_layers_keep_their_numbers():
    whole = reading(layers=6)
    some = Reading.of("A few", {name: whole.maps[name] for name in ("layer.3", "layer.5")}, whole.profile.tokens)
    shown = payload([some])["texts"][0]
    assert [layer["number"] for layer in shown["layers"]] == [3, 5]
    assert shown["start"]["layer"] in (0, 1)  # a place in the list, which the page reads
    assert {finding["layer"] for finding in shown["findings"]} <= {3, 5}


def test_one_token_is_enough():
    assert payload([reading(length=1)])["texts"][0]["start"] == {"layer": 0, "head": 0, "query": 0}


def test_the_file_is_written_whole(tmp_path):
    target = write_page(tmp_path / "new" / "index.html", [reading()])
    assert target.read_text(encoding="utf-8").rstrip().endswith("</html>")
    assert [path.name for path in target.parent.iterdir()] == ["index.html"]


def test_bad_input_is_refused(tmp_path):
    with pytest.raises(rg.RegardError, match="no text to show"):
        write_page(tmp_path / "index.html", [])
    (tmp_path / "file").write_text("")
    with pytest.raises(rg.RegardError, match="cannot be written"):
        write_page(tmp_path / "file" / "index.html", [reading()])
