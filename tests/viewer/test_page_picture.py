"""The picture view in a browser: the weights over an image are those of the API, as one file and from a server."""

from __future__ import annotations

import re

import pytest
import torch

from page_browser import NEEDS_CHROMIUM, address, browser, file, opened, server
from pages import until
from regard.stats import PatchGrid
from regard.viewer import picture_sheets, write_page
from vision_models import pictured, towers, video, watched, whisper, with_texts

pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]

#: The opacity of the cover of each patch of an image, 0 to 255.
COVER = """async at => {
  const image = new Image();
  image.src = document.querySelectorAll("image.cover")[at].getAttribute("href");
  await image.decode();
  const canvas = Object.assign(document.createElement("canvas"), { width: image.width, height: image.height });
  canvas.getContext("2d").drawImage(image, 0, 0);
  const { data } = canvas.getContext("2d").getImageData(0, 0, image.width, image.height);
  return Array.from({ length: data.length / 4 }, (_, at) => data[4 * at + 3]);
}"""


@pytest.fixture(scope="module")
def texts():
    visions = {"image": towers()[3], "video": video(), "words": with_texts()[0]}
    found = {name: pictured(picture_sheets(watched(vision))) for name, vision in visions.items()}
    sheets = picture_sheets(watched(whisper()), targets=["<s>", "the", "cat", "sat"])
    return found | {"sound": next(sheet for sheet in sheets if sheet.about["queries"])}


def ready(page):
    until(page, "document.querySelector('image.cover')?.getAttribute('href') !== null")
    until(page, "document.querySelector('.looks')?.textContent.length > 0")


def said(page):
    return page.locator(".looks").inner_text()


def numbers(text):
    return [float(number) for number in re.findall(r"\d\.\d{3}\b", text)]


def point_at(page, row, column, rows, columns, at=0):
    box = page.locator("svg.photo").nth(at).bounding_box()
    page.mouse.move(box["x"] + (column + 0.5) * box["width"] / columns, box["y"] + (row + 0.5) * box["height"] / rows)


def test_the_light_on_a_patch_is_its_weight(browser, address, texts):
    weights = texts["image"].maps[1]  # a class token, 3 registers, 2 x 2 patches
    grid = PatchGrid(2, 2, start=4)
    with opened(browser, address + "#picture?text=0&layer=1&head=1&query=0&scale=linear") as page:
        ready(page)
        row = weights[0, 1, 0]
        folded = grid.fold(row).flatten()
        expected = (255 * 0.88 * (1 - folded / folded.max())).round()
        assert page.evaluate(COVER, 0) == pytest.approx(expected.tolist(), abs=1)
        assert numbers(said(page))[:5] == pytest.approx(row.sort(descending=True).values[:5].tolist(), abs=6e-4)
        shares = dict(re.findall(r"([\d.]+) on (\[CLS\]|registers|patches)", said(page)))
        found = {name: float(share) for share, name in shares.items()}
        true = {"[CLS]": row[0], "registers": row[1:4].sum(), "patches": row[4:].sum()}
        assert found == pytest.approx({name: float(value) for name, value in true.items()}, abs=6e-4)
        tiles = page.locator(".tile .share").all_inner_texts()
        shares = [f"{float(weights[0, head, 0, 4:].sum()):.3f}" for head in range(2)]
        assert tiles == shares


def test_a_view_without_a_figure_prints_in_the_light_theme(browser, address):
    with opened(browser, address + "#picture?text=0", color_scheme="dark") as page:
        ready(page)
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert page.locator(".regard").get_attribute("data-theme") == "light"
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.locator(".regard").get_attribute("data-theme") is None


def test_pointing_holding_and_keys(browser, address, texts):
    weights, grid = texts["image"].maps[0], PatchGrid(2, 2, start=4)
    with opened(browser, address + "#picture?text=0&layer=0&head=0&query=0&scale=linear") as page:
        ready(page)
        token = grid.token(1, 0)
        point_at(page, 1, 0, 2, 2)
        until(page, f"document.querySelector('.looks').textContent.startsWith('r1 c0 (token {token})')")
        page.mouse.down()
        page.mouse.up()
        until(page, f"location.hash.includes('query={token}')")
        point_at(page, 0, 1, 2, 2)
        until(page, "document.querySelector('.pointed').dataset.weight")
        shown = float(page.locator(".pointed").get_attribute("data-weight"))
        assert shown == pytest.approx(float(weights[0, 0, token, grid.token(0, 1)]), rel=2e-5)
        page.keyboard.press("ArrowUp")
        until(page, f"location.hash.includes('query={grid.token(0, 0)}')")
        page.get_by_role("button", name="What attends to it").click()
        until(page, "document.querySelector('.looks').textContent.includes('receives attention from')")
        column = weights[0, 0, :, grid.token(0, 0)]
        assert numbers(said(page))[:5] == pytest.approx(column.sort(descending=True).values[:5].tolist(), abs=6e-4)
        page.get_by_label("Show").select_option("all")
        until(page, "document.querySelectorAll('.tile').length === 4")


def test_frames_and_words(browser, address, texts):
    with opened(browser, address + "#picture?text=1&layer=1&head=0&query=5&scale=linear") as page:
        ready(page)
        folded = PatchGrid(2, 2, frames=2).fold(texts["video"].maps[1][0, 0, 5]).flatten(1)
        for frame in (0, 1):
            expected = (255 * 0.88 * (1 - folded[frame] / folded.max())).round()
            assert page.evaluate(COVER, frame) == pytest.approx(expected.tolist(), abs=1)
        point_at(page, 1, 1, 2, 2, at=1)
        until(page, "document.querySelector('.looks').textContent.startsWith('f1 r1 c1 (token 7)')")
    weights = texts["words"].maps[1]  # two words, 2 x 2 patches, two words
    with opened(browser, address + "#picture?text=2&layer=1&head=1&query=7&scale=linear") as page:
        ready(page)
        chips = page.locator(".chip-word").all_inner_texts()
        folded = weights[0, 1, 7, 2:6]
        assert chips == ["5", "6", f"▦ image {float(folded.sum()):.3f}", "7", "8"]
        expected = (255 * 0.88 * (1 - folded / folded.max())).round()
        assert page.evaluate(COVER, 0) == pytest.approx(expected.tolist(), abs=1)


def test_a_spectrogram_under_the_words(browser, address, texts):
    weights = texts["sound"].maps[1]
    with opened(browser, address + "#picture?text=3&layer=1&head=2&query=1&scale=linear") as page:
        ready(page)
        row = weights[0, 2, 1]
        assert page.evaluate(COVER, 0) == pytest.approx((255 * 0.88 * (1 - row / row.max())).round().tolist(), abs=1)
        center = float((row * (torch.arange(9) + 0.5)).sum() * 0.02)
        assert f"at {center:.2f} s" in said(page)
        assert page.locator(".seconds span").first.inner_text() == "0 s"
        page.get_by_role("button", name=re.compile("^cat")).click()
        until(page, "document.querySelector('.looks').textContent.startsWith('cat (token 2)')")
        point_at(page, 0, 4, 1, 9)
        page.mouse.down()
        page.mouse.up()
        until(page, "document.querySelector('.looks').textContent.includes('receives attention from')")
        column = weights[0, 2, :, 4]
        assert numbers(said(page))[:4] == pytest.approx(column.sort(descending=True).values.tolist(), abs=6e-4)


LOOKS = [
    "text=0&layer=1&head=1&query=0",
    "text=0&query=5&side=in&cover=colors&tiles=all",
    "text=1&query=5",
    "text=2&query=7",
    "text=3&query=1",
]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_everybody_can_use_a_picture(browser, file, theme):
    access = pytest.importorskip("test_page_access", reason="axe-core is not installed")
    context = browser.new_context(viewport={"width": 390, "height": 900}, color_scheme=theme)
    page = context.new_page()
    page.goto(file)
    page.evaluate(access.axe.AXE_SCRIPT)
    for look in LOOKS:
        access.shown(page, file, f"picture?{look}")
        ready(page)
        assert access.violations(page, {}) == [] and access.violations(page, access.TARGETS) == [], look
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, access.WIDER
    context.close()


#: Which patch is lit most: the one whose cover is least opaque.
LIT = """() => [...document.querySelectorAll('.lit canvas')].map((one) => {
    const all = one.getContext('2d').getImageData(0, 0, one.width, one.height).data;
    const dark = Array.from({ length: one.width * one.height }, (_, at) => all[4 * at + 3]);
    return [one.height, one.width, dark.indexOf(Math.min(...dark))]; })"""


def test_the_overview_of_an_image_shows_the_image_lit_by_the_heads_of_the_sentence(browser, texts, tmp_path):
    """Once it drew arcs between the names of patches: "Arcs show what the word r4 c3"."""
    sheet = texts["image"]
    lead, panel = sheet.about["lead"], sheet.about["picture"]["panels"][0]
    file = write_page(tmp_path / "image.html", [sheet]).as_uri()
    with opened(browser, f"{file}#overview", width=1440) as page:
        until(page, "document.querySelector('.lit')?.dataset.waiting === '0'")
        told = [sheet.about["start"], *(link for link in (lead, lead["other"]) if link)]
        assert len({(link["layer"], link["head"]) for link in told}) == len(told)
        for link, (rows, columns, brightest) in zip(told, page.evaluate(LIT), strict=True):
            row = sheet.maps[link["layer"]][0, link["head"], link["query"]]
            patches = row[panel["start"] : panel["start"] + rows * columns]
            assert (rows, columns) == (panel["rows"], panel["columns"]) and brightest == int(patches.argmax())
            assert f"head {link['head']}: what" in page.locator(".lit").nth(told.index(link)).inner_text()
        said = page.locator(".first-rest").inner_text()
        assert "the patch" in said and "word r" not in said and page.locator(".lead-words").count() == 0
        start = sheet.about["start"]
        assert page.locator(".beside").get_attribute("data-head") == f"{start['layer']}.{start['head']}"
        assert f"Layer {start['layer']}, head {start['head']}:" in page.locator(".lit").first.inner_text()
        page.locator(".lit").first.click()
        ready(page)


def test_a_picture_has_no_text_to_type_and_its_tiles_have_the_numbers_of_their_heads(browser, address):
    """What if was offered for an image; a tile of a head had no name; the legend of light had stripes."""
    with opened(browser, address + "#picture?text=0&layer=1") as page:
        ready(page)
        tabs = page.locator("nav a").all_inner_texts()
        assert "Picture" in tabs and "What if" not in tabs
        assert page.locator(".tile .tile-name").all_inner_texts() == ["0", "1"]
        fills = page.locator(".key .ramp").evaluate_all("all => all.map((one) => one.getAttribute('fill'))")
        assert all(re.fullmatch(r"rgb\(\d+,\d+,\d+\)", fill) for fill in fills)
        tones = [sum(map(int, re.findall(r"\d+", fill))) for fill in fills]
        assert len(tones) == 60 and tones == sorted(tones), "the lighter, the larger"
