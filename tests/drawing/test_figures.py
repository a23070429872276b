"""Figures show what the maps hold: the numbers in the cells, and every token named."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

import regard as rg
from regard.types import Role, RoleTable
from regard.viewer.findings import TELLING, lead_of, telling_heads
from regard.viewer.sheet import Sheet

figures = pytest.importorskip("regard.drawing.figures")
pyplot = pytest.importorskip("matplotlib.pyplot")
TOKENS = ["[CLS]", "a", "dog", "[SEP]"]


@pytest.fixture
def reading():
    x = torch.randn(1, 3, 4, 8)
    maps = {f"layer.{n}": rg.Attention()(x + n, x, x).weights for n in range(2)}
    return rg.types.TextReading.of("a dog", maps, TOKENS)


def texts(axes):
    return [t.get_text() for t in axes.texts]


def test_bars_are_as_high_as_the_weight_received(reading):
    axes = figures.received_bars(reading.profile, 1).axes[0]
    heights = torch.tensor([bar.get_height() for bar in axes.patches])
    torch.testing.assert_close(heights, reading.maps["layer.1"].received()[0].mean(0).double(), rtol=1e-5, atol=1e-6)


def test_offset_bars_show_where_a_head_looks():
    x = torch.randn(1, 2, 12, 8)
    one_back = rg.mask_mod(lambda b, h, i, j: j == (i - 1).clamp_min(0))
    weights = rg.Attention(mask=one_back)(x, x, x).weights
    axes = figures.offset_bars(weights).axes[1]
    heights = dict(zip(range(-8, 9), (bar.get_height() for bar in axes.patches), strict=True))
    assert heights[-1] == pytest.approx(11 / 12) and heights[0] == pytest.approx(1 / 12)
    assert sum(heights.values()) == pytest.approx(1)


def test_a_role_map_has_a_color_a_score_and_a_null_for_every_name(reading):
    table = [
        Role("previous", 0, 1, 0.91, 0.88, True),
        Role("first", 0, 1, 0.5, 0.5, True),
        Role("induction", 1, 2, 0.7, 0.02, True),
        Role("next", 1, 0, 0.3, 0.3, False),
    ]
    figure = figures.role_map(replace(reading, roles=RoleTable(table)))
    assert texts(figure.axes[0]) == ["0.91\n0.88", "0.70\n0.02"]
    named = [text.get_text().split(":")[0] for text in figure.legends[0].get_texts()]
    assert named == ["previous", "induction"]
    assert len(figure.axes[0].patches) == 2 * 3 and len(set(figures.COLORS.values())) == len(figures.KINDS)
    with pytest.raises(rg.RegardError, match="this reading has no roles"):
        figures.role_map(reading)


def test_all_figures_are_saved_whole(reading, tmp_path):
    counts = []

    def tell(done, total):
        counts.append((done, total))

    lead, telling = lead_of(reading), telling_heads(reading)
    saved = figures.save_figures(tmp_path / "out", reading, lead, telling, tell)
    assert counts == [(done, len(saved)) for done in range(1, len(saved) + 1)]
    papers = {f"{name}.{kind}" for name in ("figure", "words", "map", "heads") for kind in ("pdf", "svg", "png", "csv")}
    heads = {f"head-L{layer}.H{head}.png" for layer, head in telling}
    assert {p.name for p in saved} == papers | heads | {"map-entropy.png"} and 1 <= len(heads) <= TELLING
    assert {p.read_bytes()[:4] for p in saved if p.suffix == ".png"} == {b"\x89PNG"}
    lead = lead or {"layer": 0, "head": 0}
    assert f"Layer {lead['layer']}, head {lead['head']}." in (tmp_path / "out" / "words.svg").read_text()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(p.name for p in saved)


def test_the_heatmaps_of_a_layer_are_those_of_the_public_function(reading, monkeypatch):
    """The mean, all heads, and one head, each with the tokens of the text."""
    calls = []
    monkeypatch.setattr(figures, "heatmap", lambda *given, **named: calls.append((*given, named["title"])))
    layer = reading.profile.layers[1]
    pictures = figures._pictures(reading, [], every_head=True)
    assert {f"{name}-layer-{n}" for name in ("similarity", "received", "offsets", "heads") for n in (0, 1)} <= {
        *pictures
    }
    assert {f"map-{name}" for name in layer.values} <= {*pictures}
    for name in ("heatmap-layer-1", "heads-layer-1", "head-layer-1"):
        pictures[name]()
    assert all(call[0] is reading.maps["layer.1"] and call[1] == (TOKENS, TOKENS) for call in calls)
    on_special = reading.maps["layer.1"].mass([0, 3])[0].mean(-1)
    assert [call[2] for call in calls] == ["mean", None, int(on_special.argmin())]
    assert calls[2][-1].startswith(f"L1.H{int(on_special.argmin())}, ")


def test_titles_and_tokens_are_no_formulas(reading):
    odd = rg.types.TextReading.of("costs $5 and $\\frac", reading.maps, ["$a$", "$\\frac", "日本", "\ud800"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the fonts that are installed decide
        for figure in (rg.figure(odd, panels=["words"]), figures.received_bars(odd.profile, 0)):
            assert figure._repr_png_().startswith(b"\x89PNG")


def test_a_figure_with_a_layout_is_drawn_once_to_be_saved(reading, monkeypatch):
    made = figures.heatmap(reading.maps["layer.1"], TOKENS)
    engine, drawn = made.get_layout_engine(), []
    monkeypatch.setattr(type(made), "draw", lambda self, renderer: drawn.append(renderer))
    made._repr_png_()
    assert len(drawn) == 1 and made.get_layout_engine() is engine


def test_numbers_in_cells_have_no_part_in_the_layout(reading):
    cells = figures.heatmap(reading.maps["layer.1"], TOKENS, head=0).axes[0].texts
    assert len(cells) == 16 and not any(text.get_in_layout() for text in cells)


def test_telling_heads_are_those_of_the_links_and_cards_of_the_page(reading):
    about = Sheet.of(reading).about
    places = [(about["lead"][name] for name in ("layer", "head"))] if about["lead"] else []
    places += [place for card in about["cards"] for place in card["heads"] or []]
    telling = telling_heads(reading)
    assert telling and set(telling) <= {tuple(place) for place in places} and len(set(telling)) == len(telling)


def test_a_figure_that_pyplot_does_not_know_is_not_saved_as_an_empty_picture(tmp_path):
    pyplot.close("all")
    rg.heatmap(torch.eye(3))
    with pytest.raises(rg.RegardError, match=r"pyplot has no figure\. .*figure\.savefig\("):
        rg.drawing.show_or_save(tmp_path / "map.png")
    rg.heatmap(torch.eye(3), axes=pyplot.gca())
    rg.drawing.show_or_save(tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 1000
    pyplot.close("all")


def test_a_picture_has_the_kind_of_its_ending(tmp_path):
    pyplot.plot([1, 2])
    for name, start in (("a.png", b"\x89PNG"), ("a.pdf", b"%PDF"), ("a.svg", b"<?xml"), ("a", b"\x89PNG")):
        rg.drawing.show_or_save(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
    with pytest.raises(rg.RegardError, match=r"show_or_save\(.*a\.xyz.*endings: .*pdf.*png"):
        rg.drawing.show_or_save(tmp_path / "a.xyz")
    pyplot.close("all")
