"""The figure sheet of the page: SVG, PNG, CSV and PDF of its figures, and what a Save writes, in a real browser."""

from __future__ import annotations

import csv
import io
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch

from figure_files import chunks, media_box, pdf_text
from page_browser import NEEDS_CHROMIUM, browser, file, opened, server, texts
from pages import HOSTILE, UNUSUAL, WORDS, painted, reading, until
from regard.viewer import Sheet, write_page

pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]
SVG = "{http://www.w3.org/2000/svg}"


def drawn(page):
    until(page, "document.querySelector('.figure-paper svg') !== null")
    return page.locator(".figure-paper svg").evaluate("svg => new XMLSerializer().serializeToString(svg)")


def saved(page, kind):
    """The content of the file that a button of the sheet writes."""
    with page.expect_download() as found:
        page.locator(".figure-save button", has_text=kind).click()
    assert found.value.suggested_filename.endswith(f".{kind.lower()}")
    return found.value.path().read_bytes()


def words_of(svg):
    return ["".join(node.itertext()) for node in ET.fromstring(svg).iter(f"{SVG}text")]


def printed(page):
    """The PDF of the document that the sheet prints."""
    until(page, "document.querySelector('iframe.printed')?.srcdoc.includes('</svg>')")
    other = page.context.new_page()
    other.set_content(page.locator("iframe.printed").get_attribute("srcdoc"))
    content = other.pdf(prefer_css_page_size=True)
    other.close()
    return content


@pytest.mark.parametrize("address", ["file", "server"])
def test_a_figure_has_its_size_its_words_and_the_weights_of_the_maps(browser, address, request):
    maps = [weights.dense()[0].numpy() for weights in reading(title="Short").maps.values()]
    link = "#head?figure=words%2Cmap%2Cheads&layer=1&head=2&query=9&scale=linear"
    with opened(browser, request.getfixturevalue(address) + link) as page:
        svg = drawn(page)
        assert re.search(r'<svg[^>]* width="85mm" height="[\d.]+mm" viewBox="0 0 240.94 ', svg)
        words = words_of(svg)
        once = [token for token in WORDS if WORDS.count(token) == 1]
        assert all(words.count(token) >= 3 for token in once)  # below arcs, rows, columns
        assert all(words.count(f"the ({at})") == 2 for at in range(1, WORDS.count("the") + 1))  # rows, columns
        assert len(ET.fromstring(svg).findall(f".//{SVG}g[@data-panel='map']//{SVG}g[@class='cells']/{SVG}rect")) == 226
        assert {node.get("font-size") for node in ET.fromstring(svg).iter(f"{SVG}text")} == {"7", "8"}
        assert "var(" not in svg and 'class="legend"' in svg
        caption = page.locator(".figure-sheet textarea").input_value()
        assert caption.startswith("“Short”. Layer 1, head 2. (a) What “it” attends to") and "linear scale" in caption
        rows = list(csv.DictReader(io.StringIO(saved(page, "CSV").decode("utf-8-sig"))))
        n = len(WORDS)
        assert len(rows) == n + n * n + 6 * n * n
        for row in rows:
            assert (row["query token"], row["key token"]) == (WORDS[int(row["query"])], WORDS[int(row["key"])])
        ours = [maps[int(row["layer"])][int(row["head"]), int(row["query"]), int(row["key"])] for row in rows]
        np.testing.assert_allclose([float(row["value"]) for row in rows], ours, rtol=2e-5, atol=1e-7)


def test_files_have_the_size_of_the_figure(browser, file):
    with opened(browser, file + "#statistics?figure=words%2Cstatistics", color_scheme="dark") as page:
        dark = drawn(page)
        for width, pixels in (("8.5", 1004), ("17", 2008)):
            page.get_by_role("button", name=f"{width} cm").click()
            until(
                page,
                "w => document.querySelector('.figure-paper svg')?.getAttribute('width') === w",
                f"{float(width) * 10:g}mm",
            )
            found = chunks(saved(page, "PNG"))
            assert int.from_bytes(found["IHDR"][:4]) == pixels
            assert found["pHYs"] == (11811).to_bytes(4) * 2 + b"\1"
            page.get_by_role("button", name="PDF…").click()
            until(
                page,
                "w => document.querySelector('iframe.printed')?.srcdoc.includes(`size:${w}mm`)",
                f"{float(width) * 10:g}",
            )
            content = printed(page)
            assert abs(media_box(content)[0] - 10 * float(width)) < 0.1 and content.count(b"/Type /Page\n") == 1
        page.get_by_role("button", name="8.5 cm").click()
        page.get_by_role("button", name="Transparent").click()
        until(page, "document.querySelector('.figure-paper svg .ground') === null")
        page.get_by_role("button", name="White").click()
        page.keyboard.press("Escape")
        until(page, "!location.hash.includes('figure=')")
        page.keyboard.press("t")
        page.keyboard.press("f")
        until(page, "location.hash.includes('figure=statistics')")
        page.get_by_label("Words with arcs").check()
        until(page, "document.querySelectorAll('.figure-paper [data-panel]').length === 2")
        assert drawn(page) == dark  # the same ink on white in both themes
        page.locator(".figure-sheet textarea").fill("My own words.")
        until(page, "document.querySelector('.figure-paper desc')?.textContent === 'My own words.'")
        assert "My own words." in words_of(saved(page, "SVG"))


def test_every_letter_survives_in_svg_and_pdf(browser, file):
    with opened(browser, file + "#head?text=2&figure=map&width=17") as page:
        words = words_of(drawn(page))
        assert {"שלום", "مرحبا", "👩‍👩‍👧", "é", "<!--"} <= set(words)
        assert words.count("ZWSP") == 2 and len(HOSTILE + UNUSUAL) == 16
        assert words_of(saved(page, "SVG")) == words
        page.get_by_role("button", name="PDF…").click()
        content = printed(page)
        assert b"/FontFile2" in content and b"/ToUnicode" in content
        text = pdf_text(content)
        assert text is None or ("ZWSP" in text and "é" in text)


@pytest.mark.parametrize("address", ["file", "server"])
def test_the_print_of_a_view_is_its_figure(browser, address, request):
    """By the key, which waits for the weights. By the menu of the browser at once, in a file, which has them."""
    with opened(browser, request.getfixturevalue(address) + "#head?query=9", color_scheme="dark") as page:
        page.evaluate("window.print = () => { window.seen = document.querySelectorAll('.figure-print > svg').length }")
        page.keyboard.press("Control+p")
        until(page, "window.seen === 1")
        said = words_of(page.locator(".figure-print").inner_html())
        assert "a\u2002What “it” attends to" in said and any(each.startswith("b\u2002") for each in said), (
            "words and map"
        )
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.locator(".figure-print").count() == 0
        if address == "file":
            content = page.pdf()
            assert content.count(b"/Type /Page\n") == 1
            text = pdf_text(content)
            assert text is None or ("attends to" in text and "Overview" not in text)


def panels_of(page):
    """The rows of the CSV of the figure that is shown, by panel."""
    found = {}
    for row in csv.DictReader(io.StringIO(saved(page, "CSV").decode("utf-8-sig"))):
        found.setdefault(row["panel"], []).append(row)
    return found


def test_the_figure_of_a_comparison_has_both_sides(browser, file, texts):
    """It once had the words and the map of the first text alone."""
    maps = [weights.dense()[0] for weights in texts["short"].maps]
    with opened(browser, f"{file}#compare?text=0&other=4&layer=1&head=2&query=9") as page:
        painted(page)
        page.get_by_role("button", name="Figure", exact=True).click()
        until(page, "document.querySelectorAll('.figure-paper [data-panel=compare]').length === 2")
        found = panels_of(page)
        assert list(found) == ["words, Short", "words, Curves"]
        for rows in found.values():  # two readings of the same maps
            assert [row["query token"] for row in rows] == ["it"] * 15 or [int(row["query"]) for row in rows] == [
                9
            ] * 15
            np.testing.assert_allclose([float(row["value"]) for row in rows], maps[1][2, 9], rtol=2e-5)
        page.goto(f"{file}#compare?pair=heads&pins=0.0.1,0.1.2&figure=compare")
        until(page, "document.querySelector('.figure-paper')?.textContent.includes('Layer 1, head 2: Short')")
        until(page, "document.querySelectorAll('.figure-paper [data-panel=compare]').length === 3")
        found = panels_of(page)
        values = {panel: [float(row["value"]) for row in rows] for panel, rows in found.items()}
        ours = torch.stack([maps[0][1], maps[1][2]])
        np.testing.assert_allclose(values["map, Short"], ours.flatten(), rtol=2e-5, atol=1e-7)
        np.testing.assert_allclose(values["difference"], (ours[0] - ours[1]).flatten(), atol=1e-6)
        assert {(row["head"], row["quantity"]) for row in found["difference"]} == {
            ("L0.H1 − L1.H2", "difference of weight")
        }


def test_the_difference_of_two_heads_is_drawn_with_its_own_colors(browser, file, texts):
    """The sheet had the two maps, and no figure of what the view shows beside them."""
    maps = [weights.dense()[0] for weights in texts["short"].maps]
    with opened(browser, f"{file}#compare?pair=heads&pins=0.0.1,0.1.2&figure=compare", color_scheme="dark") as page:
        until(page, "document.querySelectorAll('.figure-paper [data-panel=compare]').length === 3")
        panel = page.locator(".figure-paper [data-panel=compare]").nth(2)
        fills = panel.locator(".cells rect[fill^=rgb]").evaluate_all(
            "all => all.map((one) => one.getAttribute('fill'))"
        )
        colors = np.array([[int(part) for part in re.findall(r"\d+", fill)] for fill in fills])
        difference = (maps[0][1] - maps[1][2]).flatten().numpy()
        assert len(colors) == difference.size
        purple, green = colors[difference.argmax()], colors[difference.argmin()]
        assert purple[2] > purple[1] and green[1] > green[2], "more in the first, more in the second"
        size = np.abs(difference) > 0.1
        assert ((colors[:, 2] > colors[:, 1]) == (difference > 0))[size].all()
        ticks = panel.locator(".legend text").all_text_contents()
        most = max(abs(difference.min()), difference.max())
        assert float(ticks[-1]) == pytest.approx(most, rel=0.06) and ticks[0] == f"−{ticks[-1][1:]}"
        assert panel.locator(".legend").get_attribute("color") == "#111418", "ink on white paper in the dark theme too"
        page.goto(f"{file}#compare?pair=heads&pins=0.0.1,1.0.1&figure=compare")
        until(page, "document.querySelector('.figure-paper')?.textContent.includes('Layer 0, head 1: Long')")
        assert page.locator(".figure-paper [data-panel=compare]").count() == 2, "texts of other lengths have none"


def test_paper_has_the_legend_and_the_arcs_of_the_screen(browser, file):
    """The figure once had a legend without the mark of equal weights, and drew arcs by another rule."""
    count = "selector => document.querySelectorAll(selector).length"
    for query in (3, 9):
        with opened(browser, f"{file}#head?query={query}&side=out") as page:
            until(page, "document.querySelectorAll('.stage .arcs path').length > 0")
            page.keyboard.press("f")
            until(page, "document.querySelectorAll('.figure-paper .legend text').length > 0")
            screen, paper = (
                page.locator(f"{place} .legend text").all_text_contents() for place in (".scale", ".figure-paper")
            )
            assert paper == screen and any("equal weights: 1/15" in each for each in paper)
            on_screen = page.evaluate(count, ".stage .arcs path")
            on_paper = page.locator(".figure-paper [data-panel=words] path.arc").evaluate_all(
                "all => all.map((one) => Number(one.getAttribute('stroke-width')))"
            )
            assert len(on_paper) == on_screen
            widths = page.locator(".stage .arcs path").evaluate_all(
                "all => all.map((one) => Number(one.getAttribute('stroke-width')))"
            )
            np.testing.assert_allclose(
                np.array(sorted(on_paper)) / max(on_paper), np.array(sorted(widths)) / max(widths), atol=0.01
            )


def test_gold_links_and_the_order_of_heads_are_in_the_figure(browser, file):
    with opened(browser, file + "#alignment?text=3&figure=alignment%2Cheads&sort=down&color=entropy") as page:
        tree = ET.fromstring(drawn(page))
        assert len(tree.findall(f".//{SVG}rect[@class='gold']")) == 2
        entropy = page.evaluate(
            "JSON.parse(document.getElementById('regard-data').textContent).texts[3].layers[0].heads"
            ".map(head => head.values.entropy)"
        )
        first = int(np.argmax(entropy))
        assert [text for text in words_of(drawn(page)) if re.fullmatch(r"L0\.H\d", text)][:2] == [
            f"L0.H{first}",
            f"L0.H{1 - first}",
        ]


def test_there_is_one_export(browser, file):
    """The figure sheet writes every file. A second export stood beside each chart, with other colors and no caption."""
    for view in ("overview", "head", "statistics?text=4"):
        with opened(browser, f"{file}#{view}") as page:
            painted(page)
            names = page.locator("main button").all_inner_texts()
            assert not {"SVG", "PNG", "Save"} & set(names)
            assert page.get_by_role("button", name="Figure", exact=True).is_visible()


@pytest.mark.parametrize("width", ["17", "8.5"])
def test_a_figure_of_several_panels_fits_a_page_and_its_heads_are_vectors(browser, tmp_path, width):
    """Three panels were 28.8 cm high, which A4 has no room for, and "All heads" was a bitmap for each head."""
    title = "A sentence about animals and about incomprehensibilities"
    text = reading([f"word{n}" for n in range(40)], title=title, heads=4, layers=3)
    file = write_page(tmp_path / "tall.html", [Sheet.of(text)]).as_uri()
    with opened(browser, f"{file}#head?figure=words%2Cmap%2Cheads%2Cstatistics&width={width}") as page:
        until(page, "document.querySelectorAll('.figure-paper [data-panel]').length === 4")
        svg = ET.fromstring(drawn(page))
        assert float(svg.get("height").removesuffix("mm")) <= 247
        panel = svg.find(f".//{SVG}g[@data-panel='heads']")
        assert not panel.findall(f".//{SVG}image")
        cells = "".join(path.get("d") for path in panel.iter(f"{SVG}path") if path.get("class") == "cells")
        assert cells.count("M") == 12 * 40 * 40, "a cell for each weight"
        with page.expect_download() as found:
            page.locator(".figure-save button", has_text="SVG").click()
        words = re.findall(r"[a-z0-9.]+", found.value.suggested_filename.removesuffix(".svg"))
        known = {*title.lower().split(), "layer", "head", "0", "1", "2", "3", "words", "map", "heads", "statistics"}
        assert set(words) <= known, "no word is cut"
