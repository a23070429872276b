"""The strongest examples of a head: of a corpus, and in the texts of a page, where each opens its text at the link."""

from __future__ import annotations

from urllib.parse import parse_qs

import pytest

from page_browser import NEEDS_CHROMIUM, browser, opened
from pages import HOSTILE, reading, served, until
from regard.base.errors import RegardError
from regard.viewer import Sheet, write_page
from regard.viewer.saved import load_run, save_run

pytestmark = NEEDS_CHROMIUM
__all__ = ["browser"]


@pytest.fixture(scope="module")
def corpus():
    sheet = Sheet.of(reading(title="Corpus"))
    sheet.about["documents"] = 1200
    for layer in sheet.about["layers"]:
        for number, head in enumerate(layer["heads"]):
            tokens = ["a", HOSTILE[0], "…", "b", "c"]
            example = {"weight": 0.5, "tokens": tokens, "query": 3, "key": 1, "left_out": 2, "document": 7 + number}
            head["examples"] = [example] * (number != 2)
    return sheet


def test_a_corpus_shows_the_examples_of_the_chosen_head(browser, corpus, tmp_path):
    save_run(tmp_path / "run", [corpus])
    file = write_page(tmp_path / "page.html", load_run(tmp_path / "run")).as_uri()
    with opened(browser, f"{file}#overview?layer=1&head=1") as page:
        box = page.locator(".about .examples")
        assert box.locator("h3").inner_text() == "Strongest examples in 1,200 documents"
        assert box.locator("li").inner_text() == f"a {HOSTILE[0]} … b c 0.500 document 8"
        assert (box.locator(".from").inner_text(), box.locator(".to").inner_text()) == ("b", HOSTILE[0])
        page.goto(f"{file}#head?layer=1&head=2")
        until(page, "document.querySelector('.about .examples')?.innerText.includes('None between two words')")


def test_a_saved_example_that_points_outside_its_tokens_is_refused(corpus, tmp_path):
    example = corpus.about["layers"][0]["heads"][0]["examples"][0]
    save_run(tmp_path, [corpus])
    before, example["key"] = example["key"], 5
    try:
        with pytest.raises(RegardError, match=r"examples names 5, and there are 5"):
            save_run(tmp_path / "other", [corpus])
            load_run(tmp_path / "other")
    finally:
        example["key"] = before


@pytest.mark.parametrize("is_served", [False, True])
def test_texts_of_a_page_are_listed_by_the_strongest_link_of_the_head(browser, tmp_path, is_served):
    words = [["w", *"abcdefg"], ["x", *"hijklmnop"], ["y", *"qrstuvw"]]
    sheets = [Sheet.of(reading(each, title=f"Text {each[0]}")) for each in words]
    sheets.append(Sheet.of(reading(title="Another model", heads=2)))
    links = [sheet.about["layers"][1]["heads"][2]["strongest"] for sheet in sheets[:3]]
    order = sorted(range(3), key=lambda at: -links[at][2])
    address = write_page(tmp_path / "page.html", sheets).as_uri()
    if is_served:
        with served(sheets) as address:
            _opens_each(browser, address, words, links, order)
    else:
        _opens_each(browser, address, words, links, order)


def _opens_each(browser, address, words, links, order):
    with opened(browser, f"{address}#overview?layer=1&head=2") as page:
        page.locator(".about").scroll_into_view_if_needed()
        page.wait_for_selector(".examples li")
        assert [page.locator(".examples li").nth(at).locator("a").inner_text() for at in range(3)] == [
            f"Text {words[at][0]}" for at in order
        ]
        assert page.locator(".examples li").count() == 3
        for place in range(2):
            page.goto(f"{address}#overview?layer=1&head=2")
            page.locator(".examples li a").nth(place).click()
            until(page, "location.hash.startsWith('#head')")
            query, key, _ = links[order[place]]
            asked = parse_qs(page.evaluate("location.hash").split("?")[1])
            given = [int(asked.get(name, ["0"])[0]) for name in ("text", "layer", "head", "query", "key")]
            assert given == [order[place], 1, 2, query, key]
