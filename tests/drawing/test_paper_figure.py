"""Figures for papers: their size, their letters, the numbers in their tables, and the mistakes that are refused."""

from __future__ import annotations

import csv
import io
import re
import struct
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch

import regard as rg
from figure_files import chunks, media_box, pdf_text
from pages import WORDS, maps_of, reading, translation
from regard.drawing.color import WeightScale

pytest.importorskip("matplotlib")
MAP_PANELS = ["words", "map", "heads", "alignment"]


def table(figure, path):
    lines = list(csv.reader(io.StringIO(figure.save(path).read_bytes().decode("utf-8-sig"))))
    return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]


def test_the_table_has_the_weights_of_the_maps(tmp_path):
    text = reading(title="A text")
    rows = table(rg.figure(text, panels=MAP_PANELS, layer=1, head=2, query="it", width=17), tmp_path / "a.csv")
    dense = [weights.dense()[0].numpy() for weights in text.maps.values()]
    n = len(WORDS)
    by_panel = {name: [row for row in rows if row["panel"] == name] for name in MAP_PANELS}
    assert [len(by_panel[name]) for name in MAP_PANELS] == [n, n * n, 2 * 3 * n * n, 2 * n * n]
    assert {(row["layer"], row["head"]) for row in by_panel["map"]} == {("1", "2")}
    for row in rows:
        i, j, of_layer = int(row["query"]), int(row["key"]), dense[int(row["layer"])]
        assert (row["query token"], row["key token"], row["quantity"]) == (WORDS[i], WORDS[j], "weight")
        if row["head"] == "mean":
            assert float(row["value"]) == pytest.approx(float(of_layer[:, i, j].mean()), rel=1e-6)
        else:
            assert np.float32(row["value"]) == pytest.approx(of_layer[int(row["head"]), i, j], rel=1e-6)
    assert {row["query"] for row in by_panel["words"]} == {str(WORDS.index("it"))}


def test_the_table_of_a_statistic_is_that_of_the_profile(tmp_path):
    text = reading()
    rows = table(rg.figure(text, panels=["statistics"], statistic="entropy"), tmp_path / "a.csv")
    values = torch.stack(text.profile.values("entropy"))
    assert [float(row["value"]) for row in rows] == pytest.approx(values.flatten().tolist())


@pytest.mark.parametrize("width", [8.5, 17])
def test_a_pdf_has_the_width_of_a_column_and_its_fonts(width, tmp_path):
    figure = rg.figure(reading(), panels=[*MAP_PANELS, "statistics"], width=width)
    content = figure.save(tmp_path / "a.pdf").read_bytes()
    across, down = media_box(content)
    assert abs(across - 10 * width) < 0.1 and 50 < down < 600
    assert b"/FontFile2" in content and b"/Type3" not in content  # TrueType, as journals want it
    text = pdf_text(content)
    assert text is None or "street" in text


@pytest.mark.parametrize("panels", [["words", "map", "heads", "statistics"], ["alignment", "map"]])
def test_a_figure_is_no_taller_than_a_page(panels):
    """Twelve layers of twelve heads were 34.4 cm high, which A4 has no room for."""
    text = reading(length=20, layers=12, heads=6)
    figure = rg.figure(text, panels=panels, width=17)
    assert figure.get_figheight() * 2.54 <= 24.7
    if "alignment" in panels:
        drawn = {row[1] for row in figure.rows[1:] if row[0] == "alignment"}
        assert f"The first {len(drawn)} of 12 are shown." in figure.caption and drawn == set(range(len(drawn)))


def test_an_svg_has_tokens_as_text_and_a_cell_for_each_weight(tmp_path):
    tokens = ["[CLS]", "$a$", "日本", "مرحبا", "👩‍👩‍👧", "\u200b"]
    text = reading(tokens, title="& <b>")
    tree = ET.parse(rg.figure(text, panels=["words", "map"], head=1, layer=0).save(tmp_path / "a.svg"))
    texts = ["".join(node.itertext()) for node in tree.iter("{http://www.w3.org/2000/svg}text")]
    for token in ["[CLS]", "$a$", "日本", "مرحبا", "👩‍👩‍👧", "\\u200b"]:
        assert texts.count(token) == 3, token  # below words, beside rows, below columns
    (cells,) = (node for node in tree.iter() if node.get("id") == "cells")
    assert len([node for node in cells.iter() if node.tag.endswith(("path", "use"))]) >= len(tokens) ** 2
    assert {size for size in re.findall(r"font: [^;]*?([\d.]+)px", (tmp_path / "a.svg").read_text())} <= {"7", "8"}


def test_a_png_has_300_dots_to_an_inch(tmp_path):
    figure = rg.figure(reading(), panels=["map"], width=8.5)
    found = chunks(figure.save(tmp_path / "a.png").read_bytes())
    width, height = struct.unpack(">II", found["IHDR"][:8])
    assert abs(width - 8.5 / 2.54 * 300) <= 1 and abs(height - figure.get_figheight() * 300) <= 1
    assert struct.unpack(">IIB", found["pHYs"]) == (11811, 11811, 1)
    clear = figure.save(tmp_path / "b.png", transparent=True).read_bytes()
    assert chunks(clear)["IHDR"][9] == 6 and clear != (tmp_path / "a.png").read_bytes()


def test_the_caption_names_text_layer_and_head():
    figure = rg.figure(reading(title="A long story"), panels=["words", "map"], layer=1, head=2, query="it")
    assert figure.caption.startswith("“A long story”. Layer 1, head 2. (a) What “it” attends to")
    assert figure.caption.endswith("Weights are shown on a square-root scale.")
    mine = rg.figure(reading(), caption="My own words.")
    assert mine.caption == "My own words." and mine.get_figheight() < figure.get_figheight()
    assert rg.figure(reading(), caption="").caption == ""
    of_all = rg.figure(reading(title="T"), panels=["alignment"]).caption
    assert of_all.startswith("“T”. The mean of the heads")  # it names no single head


def test_a_query_of_a_cache_is_the_last_of_its_keys():
    """Three queries after 90 keys: the words around a query are drawn, and no index is outside."""
    x = torch.randn(1, 1, 93, 8)
    weights = rg.Attention(mask=rg.causal())(x[:, :, -3:], x, x).weights
    keys = [f"t{i}" for i in range(93)]
    rows = rg.figure(weights, (keys[90:], keys), ["words"], query="t91").rows
    assert rows[-1][7] == "t92" and rows[1][5] == "t91" and len(rows) == 1 + 26


def test_the_default_query_is_an_ordinary_token_of_the_queries():
    """Special keys are known by their indices, which say nothing of the queries of a translation or after a cache."""
    source, target = ["<s>", "das", "<unk>", "klein"], ["the", "a", "house", "</s>"]
    text = rg.types.TextReading.of("", maps_of(4, keys=4, heads=1, layers=1), source, queries=target)
    assert rg.figure(text, panels=["words"]).rows[1][5] == "a"  # the middle one of the, a, house
    keys = ["<s>", "a", "b", "<s>", "c", "d"]
    after_cache = rg.types.TextReading.of("", maps_of(3, keys=6, heads=1, layers=1), keys, queries=keys[3:])
    assert rg.figure(after_cache, panels=["words"]).rows[1][5] == "d"  # the middle one of c, d


def test_maps_arrays_and_watched_models_are_drawn():
    maps = maps_of(4, heads=2, layers=1)
    weights = maps["layer.0"]
    dense = weights.dense()[0]
    ours, arrays = (rg.figure(source, ["a", "b", "c", "d"], head=1) for source in (weights, dense))
    assert ours.rows == arrays.rows and ours.rows[1][-1] == float(dense[1, 0, 0])
    encoder = rg.nn.TransformerConfig(8, num_heads=2).encoder(layers=2).eval()
    with torch.no_grad(), rg.watch(encoder) as seen:
        encoder(torch.randn(1, 5, 8))
    rows = rg.figure(seen, list("abcde"), layer=1, head=0).rows
    assert [row[-1] for row in rows[1:]] == pytest.approx(seen[1].dense()[0, 0].flatten().tolist(), rel=1e-5)


def test_the_default_head_is_the_one_with_the_largest_notable_weight():
    weights = torch.full((3, 6, 6), 0.1)
    weights[1, 4, 2] = 0.5  # two tokens before the query
    weights[2, 4, 0] = weights[0, 4, 3] = 0.9  # the first token, and the neighbor
    figure = rg.figure(weights, ["a", "b", "c", "d", "it", "f"])
    assert "head 1" in figure.caption and {row[2] for row in figure.rows[1:]} == {1}


def test_a_long_map_is_pooled_and_its_cells_name_their_tokens():
    text = reading(length=600, heads=1, layers=1)
    rows = rg.figure(text, panels=["map"]).rows[1:]
    assert len(rows) == 256**2 and {row[3] for row in rows} == {"weight of a cell"}
    first, second = rows[0], rows[1]
    assert (first[4], first[5]) == ("0-2", "t0 … t2") and second[6] == "3-4"
    pooled = text.maps["layer.0"].pool(256, 256)[0, 0]
    assert [row[-1] for row in rows[:256]] == pytest.approx(pooled[0].tolist(), rel=1e-4)


def test_small_weights_have_arcs_too():
    """In a long text every weight may be small: those within a fifth of the largest are drawn, with its number."""
    weights = torch.full((20, 20), 0.0001)
    weights[10, 3], weights[10, 15] = 0.004, 0.001
    axes = rg.figure(weights, panels=["words"], query=10).axes[0]
    assert len([patch for patch in axes.patches if patch.get_gid() == "arc"]) == 2
    assert "0.004" in [text.get_text() for text in axes.texts]


def test_tables_have_whole_tokens():
    tokens = ["incomprehensibilities", "\n", "a,b"]
    rows = rg.figure(torch.eye(3), tokens, ["words", "map", "heads"], query=1).rows
    assert {row[7] for row in rows[1:]} == set(tokens) and rows[1][5] == "\n"


def test_gold_links_are_outlined():
    figure = rg.figure(translation(), panels=["alignment"], gold=[(0, 0, True), (3, 4, False)])
    outlines = [patch for patch in figure.axes[0].patches if patch.get_gid() == "gold"]
    assert len(outlines) == 2 and "gold links" in figure.caption


def test_scales_place_weights_as_the_page_does():
    weights = np.array([0.0, 1e-9, 0.01, 0.25, 1.0])
    np.testing.assert_allclose(WeightScale("linear", 14).place(weights), weights)
    np.testing.assert_allclose(WeightScale("sqrt", 14).place(weights), weights**0.5)
    np.testing.assert_allclose(WeightScale("log", 14).place(weights), [0, 1e-6, 1 / 3, 1 + np.log10(0.25) / 3, 1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"panels": []}, "the list of panels is empty. Known names: alignment, heads, map"),
        ({"panels": ["maps"]}, "no panel 'maps'. Did you mean 'map'"),
        ({"width": 0.5}, "in cm, between 4 and 60"),
        ({"layer": 7}, "the layers are 0, 1"),
        ({"head": 9}, "there are 3 heads, 0 to 2"),
        ({"query": 99}, "there are 15 queries"),
        ({"query": "streeet"}, "no such token. Did you mean 'street'"),
        ({"panels": ["statistics"], "statistic": "entrophy"}, "no statistic 'entrophy'"),
        ({"tokens": ["a"]}, "a TextReading has its own tokens"),
        ({"scale": "cubic"}, "cubic"),
    ],
)
def test_mistakes_are_refused(options, said):
    with pytest.raises(rg.RegardError, match=re.escape(said)):
        rg.figure(reading(), **options)


def test_a_batch_a_missing_statistic_and_a_wrong_file_are_refused(tmp_path):
    x = torch.randn(2, 1, 3, 4)
    with pytest.raises(rg.RegardError, match="the maps have 2 texts"):
        rg.figure(rg.Attention()(x, x, x).weights)
    with pytest.raises(rg.RegardError, match="an array of weights has no statistics"):
        rg.figure(torch.ones(2, 2) / 2, panels=["statistics"])
    figure = rg.figure(torch.ones(2, 2) / 2)
    with pytest.raises(rg.RegardError, match=r"must end with \.pdf, \.svg, \.png or \.csv"):
        figure.save(tmp_path / "a.jpg")
    (tmp_path / "file").write_text("")
    with pytest.raises(rg.RegardError, match="file"):
        figure.save(tmp_path / "file" / "a.pdf")
