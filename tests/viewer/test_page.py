"""The page: whole, offline, safe with any text, of bounded size, and true to the weights."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import regard as rg
from pages import HOSTILE, UNUSUAL, maps_of, reading, told, translation
from regard.maps.reductions import Pyramid, cells, coarser
from regard.stats.roles import MEANINGS
from regard.types import TextReading
from regard.viewer import Sheet, load_run, page_reductions, save_run, write_page
from regard.viewer.answers import Answers, NoAnswer
from regard.viewer.page import bundle, embed, embedded, payload, render
from regard.viewer.sheet import quantize

FRONTEND = Path(__file__).parents[2] / "frontend"


def data_of(page):
    found = re.findall(r'<script type="application/json" id="regard-data">(.*?)</script>', page, re.DOTALL)
    assert len(found) == 1
    return json.loads(found[0])


def numbers(coded, kind="<f4"):
    return np.frombuffer(base64.b64decode(coded), kind)


def sheet(*given, **options):
    return Sheet.of(reading(*given, **options))


# The bundle


def test_the_bundle_is_that_of_the_sources():
    sources = [path.relative_to(FRONTEND).as_posix() for path in (FRONTEND / "src").rglob("*") if path.is_file()]
    names = ["package.json", "package-lock.json", *sorted(sources)]
    found = hashlib.sha256()
    for name in names:
        found.update(f"{name}\n".encode() + (FRONTEND / name).read_bytes())
    for name in ("page.js", "page.css"):
        assert found.hexdigest() in bundle(name).split("\n")[0], "frontend/ was changed: run `make page`"


def test_the_lock_file_says_nothing_of_where_packages_came_from():
    assert "resolved" not in (FRONTEND / "package-lock.json").read_text()


def test_the_front_end_makes_no_html_of_strings():
    for path in (FRONTEND / "src").glob("*.ts"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", path.read_text()), path


def test_importing_regard_imports_none_of_this():
    code = "import sys, regard; regard.attend; regard.AttentionMap; regard.watch"
    code += "; assert not {'regard.viewer', 'starlette', 'uvicorn', 'anywidget', 'safetensors'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# The file


def test_the_page_needs_nothing_from_outside():
    page = render([sheet()])
    assert "default-src 'none'" in page and "connect-src 'none'" in page and "unsafe-eval" not in page
    assert not re.search(r"@import|<link[^>]+href=\"(?!data:)|<script[^>]+src=|url\(\"?http", page)
    assert not re.search(r"<!--(policy|style|script|data)-->", page)
    script = re.search(r'<script type="module">(.*?)</script>', page, re.DOTALL)[1]
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in page, "scripts run by their hash"


def test_hostile_text_stays_text():
    tokens = HOSTILE + UNUSUAL
    page = render([Sheet.of(reading(tokens, title=HOSTILE[0]))])
    assert "<img" not in page and page.count("</script>") == 2
    shown = data_of(page)["texts"][0]
    assert shown["title"] == HOSTILE[0] and shown["tokens"] == tokens


def test_embedded_json_comes_back():
    data = {"a": [*HOSTILE, 1.5, None]}
    assert not set("<>&\u2028\u2029") & set(embed(data))
    assert json.loads(embed(data)) == data


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


# What travels with it


@pytest.mark.parametrize("mask", [None, rg.causal(), rg.causal() & rg.window(3)])
def test_queries_and_keys_travel_and_give_every_weight(mask):
    text = reading(mask=mask)
    maps = payload([Sheet.of(text)])["texts"][0]["maps"][1]
    assert maps["form"] == "dot" and not maps["half"]
    q, k = (numbers(maps[name]).reshape(3, 15, 8) for name in ("query", "key"))
    w = np.exp(q @ k.transpose(0, 2, 1) - numbers(maps["row_statistic"]).reshape(3, 15, 1))
    if mask is not None:
        w *= np.unpackbits(numbers(maps["mask"], "u1"), bitorder="little")[:225].reshape(15, 15)
    np.testing.assert_allclose(w, text.maps["layer.1"].dense()[0].numpy(), atol=1e-6)


def test_other_mechanisms_travel_as_their_weights():
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    weights = rg.Attention(bias=rg.ALiBi(2), normalizer=rg.normalizers.Sparsemax())(q, k, v).weights
    maps = payload([Sheet.of(TextReading.of("A text", {"layer": weights}, list("abcdef")))])["texts"][0]["maps"][0]
    assert maps["form"] == "weights"
    np.testing.assert_allclose(numbers(maps["weights"]).reshape(2, 6, 6), weights.dense()[0].numpy())


def test_grouped_keys_travel_once():
    q, k, v = torch.randn(1, 4, 6, 4), torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4)
    weights = rg.Attention(normalizer=rg.normalizers.Softmax(sink=0.5, temperature=0.7))(q, k, v).weights
    maps = payload([Sheet.of(TextReading.of("A text", {"layer": weights}, list("abcdef")))])["texts"][0]["maps"][0]
    q, k = (numbers(maps[name]).reshape(-1, 6, 4) for name in ("query", "key"))
    w = np.exp(q @ k.repeat(2, 0).transpose(0, 2, 1) - numbers(maps["row_statistic"]).reshape(4, 6, 1))
    np.testing.assert_allclose(w, weights.dense()[0].numpy(), atol=1e-6)


def test_long_texts_come_in_half_precision_then_in_cells():
    sheets = [sheet(length=200), sheet(length=6), sheet(length=150)]
    whole = [text["maps"][0] for text in payload(sheets)["texts"]]
    assert all(maps["form"] == "dot" and not maps["half"] for maps in whole)
    assert embedded(sheets, 130_000)[0][0]["half"]
    found = embedded(sheets, 20_000)
    assert found[1][0]["form"] == "dot" and found[0][0]["form"] == "cells"
    side = -(-200 // 2 ** found[0][0]["level"])
    steps = numbers(found[0][0]["cells"], "u1").reshape(3, side, side).astype(float)
    np.testing.assert_allclose((((steps - 1).clip(0) / 254) ** 2).sum(-1), 1, atol=0.1)


def test_all_heads_of_minilm_at_512_tokens_fit():
    maps = maps_of(512, heads=2, layers=1, width=32)
    page = render([Sheet.of(TextReading.of("A text", maps, ["token"] * 512))])
    assert not data_of(page)["texts"][0]["maps"][0]["half"]
    fixed = len(bundle("page.js")) + len(bundle("page.css"))
    assert (len(page) - fixed) * 36 + fixed < 15_000_000


@pytest.mark.parametrize("weight", [0.0, 1e-12, 0.25, 1.0, 1.0000001])
def test_only_nothing_is_the_byte_of_nothing(weight):
    byte = int(quantize(torch.tensor([weight]))[0])
    assert (byte == 0) == (weight == 0)
    assert abs(((byte - 1) / 254) ** 2 - weight) < 0.004 or byte == 0


def test_only_nothing_is_zero_in_the_cells_of_a_long_text():
    length = 1100
    slope = 0.03 + 0.03 * torch.rand(1, generator=torch.Generator().manual_seed(2))
    keys = (slope * torch.arange(length)).reshape(1, 1, length, 1)  # far keys have weights down to exp(-30) or less
    weights = rg.Attention(mask=rg.causal())(torch.ones_like(keys), keys, keys).weights
    mean, greatest = Sheet.of(TextReading.of("Long", {"layer.0": weights}, ["t"] * length)).ready[0]
    exact = torch.nn.functional.max_pool2d(weights.dense(), 32, ceil_mode=True)[0, 0]
    assert ((exact > 0) & (exact < 1e-8)).sum() > 30, "cells below half precision"
    assert ((greatest[0] == 0) == (exact == 0)).all() and ((mean[0] == 0) == (exact == 0)).all()


# What is said of a text


def test_the_page_opens_with_the_pronoun():
    assert sheet().about["start"]["query"] == 9 and sheet().about["special"] == [0, 14]
    assert sheet(length=1).about["start"] == {"layer": 0, "head": 0, "query": 0}


def test_roles_stand_beside_their_null_and_masks_among_the_warnings():
    data = payload([Sheet.of(told(reading()))])
    shown = data["texts"][0]
    (role,) = shown["layers"][1]["heads"][1]["roles"]
    assert (role["kind"], role["score"], role["null"], role["chance"]) == ("previous", 0.91, 0.88, 0.1)
    assert not shown["layers"][0]["heads"][1]["roles"] and shown["has_roles"]
    assert shown["findings"][0]["sentence"] == "L1.H0 attends to the future."
    letters = {kind["letter"] for kind in data["kinds"].values()}
    assert set(data["kinds"]) == set(MEANINGS) and len(letters) == len(MEANINGS)
    assert not sheet().about["has_roles"]


def test_roles_that_there_are_not_have_their_reason():
    """Once every text without roles was told to be too short."""
    assert "more than 25 tokens" in sheet().about["why_no_roles"] and "has 13" in sheet().about["why_no_roles"]
    assert "were not computed" in sheet(length=40).about["why_no_roles"]
    assert "the same" in sheet(["a"] * 40).about["why_no_roles"]
    assert "self-attention" in Sheet.of(translation()).about["why_no_roles"]
    assert Sheet.of(told(reading())).about["why_no_roles"] == ""


def test_roles_of_a_sample_say_so():
    text = told(reading())
    assert Sheet.of(text).about["role_note"] == sheet().about["role_note"] == ""
    sampled = replace(text, roles=replace(text.roles, sampled=(4096, 32768)))
    assert "4096 of 32768 queries, drawn at random" in Sheet.of(sampled).about["role_note"]


def test_chosen_layers_keep_their_numbers():
    whole = reading(layers=6)
    some = TextReading.of("A few", {name: whole.maps[name] for name in ("layer.3", "layer.5")}, whole.profile.tokens)
    shown = Sheet.of(some).about
    assert [layer["number"] for layer in shown["layers"]] == [3, 5]
    assert shown["start"]["layer"] in (0, 1), "a place in the list, which the page reads"


def test_offsets_and_weight_received_are_those_of_the_map():
    text = reading(mask=rg.causal())
    head, dense = Sheet.of(text).about["layers"][0]["heads"][2], text.maps["layer.0"].dense()[0, 2]
    expected = [dense.diagonal(by).sum() / 15 for by in range(-8, 9)]
    np.testing.assert_allclose(head["offsets"], expected, atol=1e-3)
    np.testing.assert_allclose(head["received"], dense.sum(0), rtol=1e-3)


def test_a_reading_measured_for_the_page_is_passed_over_once(monkeypatch):
    for length in (15, 1100):  # the second has cells that lie ready
        maps = maps_of(length, heads=2, layers=1)
        twice = Sheet.of(TextReading.of("A text", maps, [f"t{i}" for i in range(length)]))
        once = TextReading.of("A text", maps, [f"t{i}" for i in range(length)], also=page_reductions)
        with monkeypatch.context() as patch:
            patch.delattr("regard.maps.AttentionMap.summarize")
            assert_alike(Sheet.of(once).about, twice.about)


def assert_alike(found, expected):
    """Equal but for the rounding of numbers: sums of another order, shown with four digits."""
    if isinstance(expected, dict | list):
        assert type(found) is type(expected) and len(found) == len(expected)
        if isinstance(expected, dict):
            assert found.keys() == expected.keys()
            found, expected = list(found.values()), list(expected.values())
        for one, other in zip(found, expected, strict=True):
            assert_alike(one, other)
    else:
        assert found == (pytest.approx(expected, rel=1e-3, abs=1e-4) if isinstance(expected, float) else expected)


def test_translations_carry_gold_links_and_how_attention_was_read():
    about = Sheet.of(translation(), gold=[(0, 0, True), (3, 4, False)], aligned="output").about
    assert about["queries"] == ["the", "house", "is", "tiny"] and len(about["tokens"]) == 5
    assert about["gold"] == [[0, 0, True], [3, 4, False]] and about["aligned"] == "output"


# Cells


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("mask", [None, rg.causal()])
def test_cells_are_sums_over_keys_and_means_over_queries(level, mask, small_blocks):
    weights = maps_of(29, heads=2, layers=1, mask=mask)["layer.0"]
    mean, greatest = weights.summarize(Pyramid(level))[0]
    dense, size = weights.dense(), 1 << level
    for r in range(mean.shape[2]):
        for c in range(mean.shape[3]):
            part = dense[:, :, r * size : (r + 1) * size, c * size : (c + 1) * size]
            torch.testing.assert_close(mean[:, :, r, c], part.sum(-1).mean(-1))
            torch.testing.assert_close(greatest[:, :, r, c], part.amax((-1, -2)))
    again = coarser((mean, greatest), 1, level, 29)
    torch.testing.assert_close(again[0], weights.summarize(Pyramid(level + 1))[0][0])
    torch.testing.assert_close(again[1], cells(dense, 2 * size)[1])


# Answers


def answer(answers, path, *shape):
    pooled = path.startswith("tile") and path.split("/")[4] != "0"
    return np.frombuffer(answers.answer(path), "<f2" if pooled else "<f4").reshape(shape)


def test_tiles_rows_columns_and_pairs_are_exact():
    text = reading(length=150, mask=rg.causal())
    answers, dense = Answers([Sheet.of(text)]), text.maps["layer.1"].dense()[0].numpy()
    np.testing.assert_allclose(answer(answers, "tile/0/1/2/0/1/0/mean", 22, 128), dense[2, 128:, :128], rtol=1e-5)
    np.testing.assert_allclose(answer(answers, "rows/0/1/40", 3, 150), dense[:, 40], rtol=1e-5)
    np.testing.assert_allclose(answer(answers, "columns/0/1/40", 3, 150), dense[:, :, 40], rtol=1e-5)
    np.testing.assert_allclose(answer(answers, "window/0/1/40/9/20/64", 3, 20, 64), dense[:, 40:60, 9:73], rtol=1e-5)
    q, k = answer(answers, "pair/0/1/2/100/30", 2, 8)
    r = text.maps["layer.1"].row_statistic[0][0, 2, 100]
    assert abs(np.exp(q @ k - float(r)) - dense[2, 100, 30]) < 1e-6
    big = answer(answers, "tile/0/1/2/6/0/0/max", 3, 3)
    assert abs(big[2, 0] - dense[2, 128:, :64].max()) < 5e-4, "cells have half precision"


def test_tiles_of_long_texts_agree_at_every_level(monkeypatch):
    monkeypatch.setattr("regard.viewer.sheet.READY", 16)
    monkeypatch.setattr("regard.viewer.sheet.QUICK", 1)
    text = reading(length=70, heads=2)
    kept = Sheet.of(text)
    assert kept.ready[0] is not None
    dense = text.maps["layer.0"].dense()[0, 1]
    for level in range(8):
        mean, greatest = (answer(Answers([kept]), f"tile/0/0/1/{level}/0/0/{pool}", -1) for pool in ("mean", "max"))
        size = 1 << level
        sums, most = cells(dense, size)
        counts = torch.tensor([min(size, 70 - at) for at in range(0, 70, size)])
        np.testing.assert_allclose(mean, (sums / counts[:, None]).flatten(), atol=2e-3)
        np.testing.assert_allclose(greatest, most.flatten(), atol=1e-3)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "tile",
        "tile/0/0/0/0/0/0/sum",
        "tile/0/0/9/0/0/0/mean",
        "tile/0/9/0/0/0/0/mean",
        "tile/1/0/0/0/0/0/mean",
        "tile/0/0/0/99/0/0/mean",
        "tile/0/0/0/0/1/0/mean",
        "tile/0/0/0/0/-1/0/mean",
        "tile/0/0/0/0/0/99999999999/mean",
        "rows/0/0/15",
        "rows/0/0/x",
        "window/0/0/15/0/8/8",
        "window/0/0/0/0/65/8",
        "window/0/0/0/0/8/-1",
        "rows/0/0/٣",
        "pair/0/0/0/0/15",
        "text/1",
        "text/../0",
        "texts/0",
        "manifest.json",
    ],
)
def test_what_there_is_not_has_no_answer(path):
    with pytest.raises(NoAnswer):
        Answers([sheet()]).answer(path)


# Saved runs


def test_a_saved_run_gives_the_same_answers(tmp_path):
    sheets = [sheet(HOSTILE + UNUSUAL, mask=rg.causal()), Sheet.of(translation())]
    save_run(tmp_path, sheets)
    again = load_run(tmp_path)
    for before, after in zip(sheets, again, strict=True):
        assert before.about == after.about
        for one, other in zip(before.maps, after.maps, strict=True):
            torch.testing.assert_close(one.dense(), other.dense(), rtol=0, atol=0)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"], len(manifest["texts"])) == ("regard run", 1, 2)
    assert json.loads((tmp_path / "text-0" / "tokens.json").read_text())["tokens"] == HOSTILE + UNUSUAL
    assert not [path for path in tmp_path.rglob(".*")]


def test_a_shorter_text_leaves_no_layers_of_a_longer_one(tmp_path):
    save_run(tmp_path, [Sheet.of(reading(length=1_100, layers=2, heads=1))])
    assert len(list(tmp_path.glob("*/cells-*"))) == len(list(tmp_path.glob("*/layer-*"))) == 2
    save_run(tmp_path, [Sheet.of(reading(layers=1))])
    assert [path.name for path in tmp_path.glob("*/*.safetensors")] == ["layer-00.safetensors"]
    assert len(load_run(tmp_path)[0].maps) == 1


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        (None, "is missing"),
        ("{", "truncated"),
        ("[]", "is not a JSON object"),
        ('{"format": "other"}', "not a saved run"),
        ('{"format": "regard run", "version": 99}', "version 99"),
        ('{"format": "regard run", "version": 1}', "damaged"),
        ('{"format": "regard run", "version": 1, "texts": []}', "has no text"),
        ('{"format": "regard run", "version": 1, "texts": [{"folder": "../..", "layers": 1}]}', "a name in this"),
    ],
)
def test_what_is_no_run_is_refused(manifest, reason, tmp_path):
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(rg.RegardError, match=reason):
        load_run(tmp_path)
