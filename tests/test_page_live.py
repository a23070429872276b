"""A live model behind the page in a real browser: a changed word is read, and both texts stand side by side."""

from __future__ import annotations

import json
import time
from urllib.request import Request, urlopen

import pytest
import torch

import regard as rg
from page_browser import NEEDS_CHROMIUM, axe_violations, browser, file, opened, server, texts
from pages import served, until
from regard.stats import TextReading
from regard.viewer import Sheet
from regard.viewer.live_model import LiveModel, Stopped

pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]
SENTENCE = "the cat did not cross the street because it was too tired"


def read(text, check):
    return [sheet_of(text)]


def maps_of(text):
    """Maps that depend on the words, so that two texts differ."""
    torch.manual_seed(sum(map(ord, text)))
    size = (1, 3, len(text.split()), 8)
    return {
        f"layer.{layer}": rg.attend(rg.Attention(), *(torch.randn(size) * 2 for _ in range(3))).weights
        for layer in range(2)
    }


def sheet_of(text):
    return Sheet.of(TextReading.of(text, maps_of(text), text.split()))


def test_a_changed_word_is_read_and_both_texts_stand_side_by_side(browser):
    with (
        served([sheet_of(SENTENCE)], model=LiveModel("words", "text", read)) as address,
        opened(browser, f"{address}#text?query=8&layer=0&head=0") as page,
    ):
        page.get_by_role("button", name="Type another text").click()
        page.locator(".changeable button", has_text="tired").click()
        page.locator(".changeable input").fill("wide")
        page.keyboard.press("Enter")
        until(page, "document.querySelectorAll('.compare .side .words').length === 2")
        other = SENTENCE.replace("tired", "wide")
        rows = [maps_of(text)["layer.0"][0, 0, 8] for text in (SENTENCE, other)]
        boxes = page.locator(".compare .words").all()
        for row, words, box in zip(rows, (SENTENCE, other), boxes, strict=True):
            shown = box.locator("span").evaluate_all("words => words.map((word) => word.title)")
            assert [title.split(": ")[0] for title in shown] == words.split()
            assert [float(title.split(": ")[1]) for title in shown] == pytest.approx(row.tolist(), rel=1e-3)
        # The head that changes most, by half of the sum of differences.
        layers = [[maps_of(text)[name][0, :, 8] for text in (SENTENCE, other)] for name in ("layer.0", "layer.1")]
        changes = torch.stack([(a - b).abs().sum(-1) / 2 for a, b in layers])
        place = divmod(int(changes.argmax()), 3)
        row = page.locator("table.changes tbody tr").first
        assert row.locator("th").inner_text() == f"Layer {place[0]}, head {place[1]}"
        assert float(row.locator("td").first.inner_text()) == pytest.approx(float(changes.max()), abs=6e-4)
        # The second text has its own maps, with words on their sides.
        assert page.locator(".compare .pin-map").nth(1).locator("text").last.inner_html() == "wide"
        assert axe_violations(page) == []
        row.locator("button").click()
        until(page, f"document.querySelector('h1').textContent.includes('Layer {place[0]}, head {place[1]}')")
        link = page.url
        page.goto("about:blank")
        page.goto(link)
        until(page, "document.querySelectorAll('.compare .side .words').length === 2")
        assert page.locator(".compare .side h2").nth(1).inner_text() == other, "the link holds both texts"


def test_what_cannot_be_read_is_said_in_words_and_reading_can_be_stopped(browser):
    stopped = []

    def read(text, check):
        if text == "a mistake":
            raise ValueError("no such text")
        try:
            while True:
                check()
                time.sleep(0.01)
        except Stopped:
            stopped.append(text)
            raise

    with served([sheet_of(SENTENCE)], model=LiveModel("words", "text", read)) as address:
        page = browser.new_page()
        page.goto(f"{address}#compare")
        for text, words in (
            ("", "The text is empty"),
            ("a mistake", "ValueError: no such text"),
            ("for ever", "words reads the text"),
        ):
            page.locator(".typed-text").fill(text)
            page.locator(".typed-text").press("Enter")
            until(page, f"document.querySelector('.typed .notice').textContent.includes('{words}')")
        page.get_by_role("button", name="Stop").click()
        until(page, "document.querySelector('.typed .notice').textContent === 'Stopped.'")
        page.context.close()
        for _ in range(100):
            time.sleep(0 if stopped else 0.05)
        assert stopped == ["for ever"]


def test_a_link_to_a_text_that_is_not_kept_any_more_opens_the_first(browser, monkeypatch):
    monkeypatch.setattr("regard.viewer.typed_texts.KEPT", 1)
    with served([sheet_of(SENTENCE)], model=LiveModel("words", "text", read)) as address:
        for text in ("the first", "the second"):
            body = json.dumps({"text": text}).encode()
            urlopen(Request(f"{address}ask/read", body, {"Content-Type": "application/json"}), timeout=300).close()
        with opened(browser, f"{address}#text?text=1") as page:
            until(page, "document.querySelector('.looks')?.textContent.includes('attends to')")
            assert page.locator("header select option").all_inner_texts() == [SENTENCE, "the second"]
            page.evaluate("() => { location.hash = '#text?text=2&query=1' }")
            until(page, "document.querySelector('.looks').textContent.startsWith('second')")
            page.evaluate("() => { location.hash = '#text?text=1&query=3' }")
            until(page, f"document.querySelector('.looks').textContent.startsWith('{SENTENCE.split()[3]} ')")


def test_without_a_model_texts_are_compared_but_not_typed(browser, file, server):
    for address in (file, server):
        with opened(browser, f"{address}#compare?text=0&query=8") as page:
            until(page, "document.querySelectorAll('.compare .side .words').length === 2")
            assert page.locator(".typed").count() == 0
            assert page.get_by_role("button", name="Type another text").count() == 0
