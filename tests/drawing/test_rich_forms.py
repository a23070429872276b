"""What notebooks show for maps, masks and tables: well-formed, bounded, escaped, and true to the numbers."""

from __future__ import annotations

import base64
import io
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import regard as rg
from drawn import examples, masks
from map_kinds import NAMES, map_of, plain
from regard.base.html_table import ROWS, html_table
from regard.base.positions import Positions
from regard.drawing.rich_forms import HEADS, LAYERS, TOKENS, maps_svg
from regard.nn.module_output import _without_map
from regard.stats.profile import HeadTable, profile

SVG = "{http://www.w3.org/2000/svg}"
#: The most characters of a picture: every panel of 64 x 64 random cells is below 6,500.
PANEL = 6500
HOSTILE = "<script>alert('&\"\x00\ud800</td>"


def read_svg(svg, panels):
    """The caption and the panels of a picture as gray values, one for each pixel."""
    root = ET.fromstring(svg)
    assert root.tag == f"{SVG}svg" and len(svg) < PANEL * panels + 2000
    assert all(
        float(part.get("x")) + float(part.get("width")) <= float(root.get("width")) for part in root.iter(f"{SVG}image")
    )
    images = [part.get("href").removeprefix("data:image/png;base64,") for part in root.iter(f"{SVG}image")]
    assert len(images) == panels
    pixels = [Image.open(io.BytesIO(base64.b64decode(image))).convert("L") for image in images]
    return root.find(f"{SVG}title").text, [np.asarray(image, float) for image in pixels]


def cells(pixels, I, J):
    """One gray value for each cell; all pixels of a cell are alike."""
    times = pixels.shape[0] // I
    assert pixels.shape == (I * times, J * times)
    parts = pixels.reshape(I, times, J, times)
    assert (parts == parts[:, :1, :, :1]).all()
    return parts[:, 0, :, 0]


@pytest.mark.parametrize("name", NAMES)
def test_the_picture_of_every_kind_of_map_is_darker_where_a_weight_is_larger(name):
    weights = map_of(name)
    B, H, I, J = weights.shape
    svg = weights._repr_svg_()
    if 0 in (B, H, I, J):
        assert svg is None
        return
    caption, panels = read_svg(svg, min(H, HEADS))
    assert (f"the first 1 of {B} texts" in caption) == (B > 1)
    for head, pixels in enumerate(panels):
        shown = cells(pixels, min(I, TOKENS), min(J, TOKENS)).ravel()
        sizes = weights.dense()[0, head, :TOKENS, :TOKENS].detach().double().abs().numpy().ravel()
        assert (shown[sizes == 0] == 255).all()
        in_order = shown[np.argsort(sizes, kind="stable")]
        assert (np.diff(in_order) <= 0).all()
        assert len(set(shown)) > 1 or len(set(sizes.round(3))) == 1


def test_a_long_map_is_read_in_its_first_tokens_only():
    pairs = []
    counted = rg.mask_mod(lambda b, h, i, j: pairs.append(i.numel() * j.numel()) or j <= i)
    q = torch.randn(1, 1, 100_000, 4)
    weights = rg.Attention(mask=rg.causal() & rg.window(4))(q, q, q).weights
    seen = rg.Attention(mask=rg.causal() & rg.window(4) & counted)(q[:, :, :2000], q[:, :, :2000], q[:, :, :2000])
    pairs.clear()
    assert "the first 64 of 100000 tokens" in read_svg(weights._repr_svg_(), 1)[0]
    assert "the first 64 of 2000 tokens" in read_svg(seen._repr_svg_(), 1)[0]
    assert sum(pairs) <= 4 * TOKENS**2


def test_many_layers_and_heads_are_cut_and_the_caption_says_it():
    weights = plain(3, 3, batch=1, heads=HEADS + 1)
    caption, _ = read_svg(maps_svg(dict.fromkeys(map(str, range(LAYERS + 2)), weights), HOSTILE), LAYERS * HEADS)
    assert "the first 12 of 14 layers" in caption and "the first 16 of 17 heads" in caption and "<script>" in caption


@given(st.data())
@examples(60)
def test_the_picture_of_a_mask_has_the_pairs_that_it_allows(data):
    J = data.draw(st.integers(1, 30))
    I = data.draw(st.integers(1, J))
    mask = data.draw(masks(2, I, J, depth=1))
    svg = mask._repr_svg_()
    if svg is None:  # a combination for lengths that neither mask holds
        return
    caption, (pixels,) = read_svg(svg, 1)
    said = caption.rsplit(" for ", 1)[1].split()
    sizes = [int(said[0]), int(said[3])] if "queries" in said else [int(said[0])] * 2
    allowed = mask.dense(*sizes, batch_size=2, num_heads=1)[0, 0]
    kept = [torch.linspace(0, size - 1, min(size, TOKENS)).round().long() for size in sizes]
    shown = cells(pixels, *map(len, kept))
    assert ((shown < 128) == allowed[kept[0]][:, kept[1]].numpy()).all()


@pytest.mark.parametrize(
    ("mask", "lengths"),
    [
        (rg.padding(torch.arange(10).view(2, 5) % 3 > 0), "5 tokens"),
        (rg.mask_tensor(torch.arange(35).view(1, 1, 5, 7) % 3 > 0), "5 queries and 7 keys"),
        (rg.documents([3, 4], [5, 2]), "7 tokens"),
        (rg.documents([50_000, 70_000]), "120000 tokens, of which 64"),
        (rg.causal() & ~rg.masks.tree([-1, 0, 0, 1], 3), "7 tokens"),
        (rg.masks.neighborhood((6, 7), 3), "42 tokens"),
        (rg.causal(), "16 tokens"),
        (rg.causal() & rg.window(100), "256 tokens"),
    ],
    ids=repr,
)
def test_a_mask_is_drawn_at_its_own_length_or_where_it_differs_from_causal(mask, lengths):
    assert f" for {lengths}" in read_svg(mask._repr_svg_(), 1)[0]


def test_no_form_raises_where_a_users_function_does():
    def broken(b, h, i, j):
        raise ZeroDivisionError

    assert rg.mask_mod(broken)._repr_svg_() is None
    assert rg.mask_mod(lambda b, h, i, j: 3)._repr_svg_() is None
    later = []
    q = torch.randn(1, 1, 3, 4)
    weights = rg.Attention(mask=rg.mask_mod(lambda b, h, i, j: j >= len(later) / (len(later) < 1)))(q, q, q).weights
    later.append("an error")
    assert weights._repr_svg_() is None
    assert repr(without_map := _without_map([q], None)) and without_map._repr_svg_() is None


def test_a_watched_model_shows_a_row_of_heads_for_each_layer():
    layers = torch.nn.ModuleList([torch.nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(3)])
    x = torch.randn(1, 5, 8)
    with rg.watch(layers) as seen:
        for layer in layers:
            layer(x, x, x)
    _, panels = read_svg(seen._repr_svg_(), 6)
    alone = [pixels for weights in seen.maps.values() for pixels in read_svg(weights._repr_svg_(), 2)[1]]
    assert all(map(np.array_equal, panels, alone))
    output = rg.Attention()(*torch.randn(3, 1, 2, 4, 4))
    assert output._repr_svg_() == output.weights._repr_svg_()


def read_table(html):
    """The caption and the rows of a table as texts."""
    assert "<script" not in html
    root = ET.fromstring(html)
    return "".join(root.find("caption").itertext()), [["".join(td.itertext()) for td in tr] for tr in root.iter("tr")]


def test_tables_escape_what_they_hold_and_say_what_they_leave_out():
    caption, rows = read_table(html_table(HOSTILE, ["a"], [[HOSTILE]] * (ROWS + 1), "Note."))
    shown = HOSTILE.replace("\x00", "?").replace("\ud800", "?")
    assert caption == f"{shown}Note. The first {ROWS} of {ROWS + 1} rows." and rows == [["a"], *[[shown]] * ROWS]


def test_statistics_roles_and_checks_have_tables():
    weights = plain(6, 6, batch=1)
    made = profile({"layers.3": weights}, [HOSTILE, *"abcde"])
    names = ["layer", "head"]
    for table in (made, HeadTable.of(made).merge(HeadTable.of(made))):
        _, (header, *rows) = read_table(table._repr_html_())
        assert header[:2] == names and [row[:2] for row in rows] == [["3", str(head)] for head in range(3)]
        entropy = -(weights.dense() * weights.dense().clamp_min(1e-30).log()).sum(-1).mean(-1)[0]
        assert [float(row[header.index("entropy")]) for row in rows] == pytest.approx(entropy.tolist(), abs=1e-3)
    finding = rg.types.CheckFinding("causal", "wrong", HOSTILE, "use causal()")
    _, rows = read_table(rg.types.CheckReport("f", "f(x)", (finding,))._repr_html_())
    assert rows[0][0].endswith("wrong") and "use causal()" in rows[0][2]
    roles = [
        rg.types.Role("previous", 0, head, score, null=0.9, label=score > 0.5) for head, score in enumerate((0.1, 0.9))
    ]
    _, (_, *rows) = read_table(rg.types.RoleTable(roles)._repr_html_())
    assert [row[:4] for row in rows] == [["0", "1", "previous", "0.900"]]


def test_a_table_with_a_vector_for_each_head_has_a_form():
    from regard.stats.profile import HeadTable, LayerTable

    means = {"entropy": torch.ones(2).double(), "offsets": torch.ones(2, 17).double()}
    shown = HeadTable([LayerTable("layer", means, means, 0)])._repr_html_()
    assert "entropy" in shown and "offsets" not in shown


@pytest.mark.parametrize("mask", [rg.window(10**12), rg.masks.prefix(10**15), rg.documents([10**9, 10**9])])
def test_a_mask_of_huge_lengths_is_drawn_small_or_not_at_all(mask, monkeypatch):
    asked = []
    of_lengths = Positions.aligned_to_end
    monkeypatch.setattr(Positions, "aligned_to_end", lambda I, J: asked.append(J) or of_lengths(I, J))
    picture = mask._repr_svg_()
    assert picture is None or ET.fromstring(picture) is not None
    assert max(asked) <= 2**20 + 1


def test_a_mask_whose_name_cannot_be_printed_has_no_picture():
    class Nameless(type(rg.causal())):
        def __repr__(self):
            raise ValueError

    assert Nameless()._repr_svg_() is None


def test_a_profile_without_queries_is_a_table():
    e, q = torch.zeros(1, 2, 0, 8), torch.randn(1, 2, 5, 8)
    profile = rg.profile({"l.0": rg.attend(e, q, q).weights}, list("abcde"), query_tokens=[])
    assert "strongest link" in profile._repr_html_()
