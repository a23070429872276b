"""What keeps the page quick: drawings of many cells are few elements, and what does not change stays in the page.

How quick it is, `python -m benchmarks viewing` measures on a machine at rest."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from page_browser import NEEDS_CHROMIUM, browser, opened
from pages import maps_of, served, until
from ramps import colors_of, rgb
from regard.types import TextReading
from regard.viewer import Sheet, write_page

pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]

LENGTH, LAYERS = 24, 20
#: The fill of each cell of a grid, by the left upper corner of its part of a path.
CELLS = """(group) => [...group.querySelectorAll('path')].flatMap((path) =>
    [...path.getAttribute('d').matchAll(/M([\\d.]+) ([\\d.]+)/g)].map(([, x, y]) =>
        [Number(x), Number(y), path.getAttribute('fill')]))"""


@pytest.fixture(scope="module")
def maps():
    return maps_of(LENGTH, heads=2, layers=LAYERS, width=4)


@pytest.fixture(scope="module")
def address(maps, tmp_path_factory):
    tokens = [f"t{at}" for at in range(LENGTH)]
    text = Sheet.of(TextReading.of("Many layers", maps, tokens))
    return write_page(tmp_path_factory.mktemp("page") / "index.html", [text]).as_uri()


def fills(group):
    """The colors of a grid, row by row, and of how many elements it is made."""
    found = sorted((y, x, rgb(fill)) for x, y, fill in group.evaluate(CELLS))
    return np.array([fill for *_, fill in found]), group.locator("*").count()


def close(drawn, weights, scale, length):
    np.testing.assert_allclose(drawn, np.reshape(colors_of(weights, scale, length), (-1, 3)), atol=4)


def title_under(page, group, x, y):
    """The title of a grid while the pointer is on a share of its width and height."""
    group.scroll_into_view_if_needed()
    box = group.bounding_box()
    page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
    return group.locator("title").text_content()


def test_many_cells_are_few_elements_with_their_colors_and_titles(browser, address, maps):
    means = torch.stack([weights.dense()[0, :, 7].mean(0) for weights in maps.values()])
    whole = torch.stack([weights.dense()[0].mean(0) for weights in maps.values()])
    with opened(browser, f"{address}#head?query=7") as page:
        until(page, "document.querySelectorAll('.strip .cells path').length > 1")
        group = page.locator(".strip .cells")
        drawn, elements = fills(group)
        assert elements <= 256 and len(drawn) == LAYERS * LENGTH
        close(drawn, means, "sqrt", LENGTH)
        said = title_under(page, group, 2.5 / LENGTH, 3.5 / LAYERS)
        assert said.startswith("layer 3, t2: ") and float(said.split(": ")[1]) == pytest.approx(
            float(means[3, 2]), abs=6e-4
        )
        box = group.bounding_box()
        page.mouse.click(box["x"] + 5, box["y"] + box["height"] * 3.5 / LAYERS)
        assert re.search("layer=3", page.url), "a click on a row chooses its layer"
    with opened(browser, f"{address}#alignment?query=7") as page:
        until(page, f"document.querySelectorAll('.matrix').length === {LAYERS}")
        for layer in (0, 2):
            group = page.locator(".matrix .cells").nth(layer)
            drawn, elements = fills(group)
            close(drawn, whole[layer], "sqrt", LENGTH)
            said = title_under(page, group, 4.5 / LENGTH, 9.5 / LENGTH)
            assert said.startswith("t9 → t4: ") and elements <= 257
            assert float(said.split(": ")[1]) == pytest.approx(float(whole[layer, 9, 4]), abs=6e-4)


def test_another_head_only_colors_the_words(browser, address, maps):
    with opened(browser, f"{address}#head?query=7&layer=2&head=0") as page:
        until(page, "document.querySelector('.looks')?.textContent.startsWith('t7 ')")
        until(page, "document.querySelectorAll('.strip .cells path').length > 1")
        page.evaluate("document.querySelectorAll('.words span, .strip svg').forEach((one) => { one.kept = true; })")
        for key, layer, head in (("]", 2, 1), ("]", 3, 0), ("[", 2, 1)):
            page.keyboard.press(key)
            until(page, f"document.querySelector('.looks').textContent.includes('ayer {layer}, head {head}')")
            words = page.locator(".words [role=option]").evaluate_all("all => all.map((one) => one.style.background)")
            row = maps[f"layer.{layer}"].dense()[0, head, 7]
            close([rgb(one) for one in words], row, "sqrt", LENGTH)
        kept = "[...document.querySelectorAll('.words span, .strip svg')].every((one) => one.kept)"
        assert page.evaluate(kept), "neither the words nor the rows of layers are drawn again"
        page.keyboard.press("ArrowDown")
        until(page, "!document.querySelector('.strip svg:last-of-type').kept")


def test_the_row_of_the_next_word_is_there_before_it_is_asked_for(browser, maps):
    """After a step from word to word a server is asked for the next word in this direction, and for no others."""
    tokens = [f"t{at}" for at in range(LENGTH)]
    text = Sheet.of(TextReading.of("Steps", maps, tokens))
    with served([text]) as address, opened(browser, f"{address}#head?query=7&layer=2&head=0") as page:
        asked = []
        page.on("request", lambda request: asked.append(request.url.split("/ask/")[-1]))
        until(page, "document.querySelectorAll('.strip .cells path').length > 1")
        assert not any(f"rows/0/2/{at}" in asked for at in (6, 8)), "there was no step yet"
        page.locator(".words").focus()
        for query in (8, 9):
            page.keyboard.press("ArrowRight")
            until(page, f"document.querySelector('.looks').textContent.startsWith('t{query} ')")
            for _ in range(100):
                if {f"rows/0/2/{query + 1}", f"columns/0/2/{query + 1}"} <= set(asked):
                    break
                page.wait_for_timeout(50)
            else:
                raise AssertionError(asked)
        assert asked.count("rows/0/2/9") == 1 and not {"rows/0/2/6", "rows/0/2/11"} & set(asked)


def test_another_head_only_moves_its_mark_in_charts_of_all_heads(browser, address):
    with opened(browser, f"{address}#statistics?layer=2&head=0") as page:
        until(page, "document.querySelector('.charts').dataset.waiting === '0'")
        page.evaluate("document.querySelectorAll('.charts > figure').forEach((one, at) => { one.kept = at; })")
        kept = "[...document.querySelectorAll('.charts > figure')].map((one) => one.kept ?? -1)"
        for key, layer, head, again in (("]", 2, 1, [1, 2]), ("}", 3, 1, [1, 2, 3])):
            page.keyboard.press(key)
            until(
                page, f"document.querySelector('.charts').textContent.includes('received, layer {layer}, head {head}')"
            )
            until(page, "document.querySelector('.charts').dataset.waiting === '0'")
            assert [at for at, one in enumerate(page.evaluate(kept)) if one != at] == again, "the others stay"
            cell = page.locator(".charts .cells rect").nth(layer * 2 + head).bounding_box()
            mark = page.locator(".charts .chosen-mark rect").last.bounding_box()
            for start, size in (("x", "width"), ("y", "height")):
                middles = [box[start] + box[size] / 2 for box in (cell, mark)]
                assert middles[0] == pytest.approx(middles[1], abs=1) and mark[size] > cell[size]


def test_controls_keep_the_focus_when_the_head_changes(browser, address):
    focused = "document.activeElement.getAttribute('aria-label')"
    with opened(browser, f"{address}#head?layer=2&head=0") as page:
        page.get_by_role("button", name="Next head").focus()
        for head in ("layer=2&head=1", "layer=3&head=0"):
            page.keyboard.press("Enter")
            until(page, "part => location.hash.includes(part)", head)
        assert page.evaluate(focused).startswith("Next head")
        assert [page.get_by_label(name, exact=True).input_value() for name in ("Layer", "Head")] == ["3", "0"]
        page.locator(".tabs a", has_text="Compare").click()
        until(page, "document.querySelectorAll('.pin-map').length === 3")
        said = "text => document.querySelector('.pin-panels figcaption').textContent.includes(text)"
        page.get_by_label("Layer of A").focus()
        page.get_by_label("Layer of A").select_option("5")
        until(page, said, "layer 5, head 0")
        assert page.evaluate(focused) == "Layer of A"
        page.get_by_role("button", name="Swap").click()
        until(page, said, "layer 3, head 1")
        shown = [page.get_by_label(f"{what} of {side}").input_value() for side in "AB" for what in ("Layer", "Head")]
        assert shown == ["3", "1", "5", "0"], "the choosers say what is shown"
