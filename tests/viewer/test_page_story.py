"""Story mode in a real browser: every step is a view, a story is recorded, saved as one file, and printed."""

from __future__ import annotations

import json
import re

import pytest

from page_browser import NEEDS_CHROMIUM, axe_violations, browser, menu, opened, texts
from pages import served, until
from regard.viewer import Step, Story, write_page

pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]
STORY = Story(
    "Take the tour",
    (
        Step("#head?text=0&layer=1&head=2&query=4", "A word <b>and</b> its weights."),
        Step("#head?text=1&layer=0&head=1&query=250&key=123", "One weight of a long text."),
        Step("#overview?text=0&layer=0&head=0&query=0&color=reach", "Every head."),
    ),
)


def parts(link):
    """A link as the page reads it."""
    view, _, places = link.partition("#")[2].partition("?")
    return view, dict(part.split("=") for part in places.split("&"))


def test_every_step_is_its_view_in_a_file_and_from_a_server(browser, texts, tmp_path):
    sheets = list(texts.values())
    file = write_page(tmp_path / "index.html", sheets, STORY).as_uri()
    with served(sheets, story=STORY) as server:
        for address in (file, server):
            with opened(browser, address) as page:
                page.get_by_role("button", name="Take the tour (3 steps)").click()  # beside the leading sentence
                for number, step in enumerate(STORY.steps):
                    until(page, "said => document.querySelector('.step')?.textContent.endsWith(said)", step.sentence)
                    until(page, "part => location.hash.startsWith(part)", step.link.partition("?")[0])
                    view, places = parts(page.url)
                    wanted, given = parts(step.link)
                    assert view == wanted and given.items() - {("text", "0")} <= places.items()
                    assert page.locator(".step").inner_text().startswith(f"Take the tour, {number + 1} of 3")
                    page.keyboard.press("n" if number % 2 else "PageDown")
                assert axe_violations(page, "footer.story") == []
                page.keyboard.press("b")
                until(page, "document.querySelector('.step').textContent.includes('2 of 3')")
                page.keyboard.press("3")
                page.get_by_role("button", name="Return to this view").click()
                until(page, "location.hash.startsWith('#head')")
                page.get_by_role("button", name="End", exact=True).click()
                assert page.locator(".step").count() == 0


def test_each_step_shows_its_view_above_the_bar_of_a_phone(browser, texts, tmp_path):
    address = write_page(tmp_path / "index.html", list(texts.values()), STORY).as_uri()
    with opened(browser, address, width=390, height=844) as page:
        menu(page, "Take the tour")
        for subject, step in zip((".words", ".map-box", ".lead-words"), STORY.steps, strict=True):
            until(page, "said => document.querySelector('.step')?.textContent.endsWith(said)", step.sentence)
            page.wait_for_selector(subject)
            until(page, "document.querySelector('.map-box')?.dataset.waiting !== '1'")
            bar, seen = (page.locator(place).first.bounding_box() for place in ("footer.story", subject))
            assert seen["y"] > 0 and seen["y"] + min(seen["height"], 500) <= bar["y"], subject
            page.keyboard.press("n")


def test_a_story_is_recorded_edited_kept_and_saved_as_one_file(browser, texts, tmp_path):
    address = write_page(tmp_path / "index.html", [texts["short"], texts["hostile"]]).as_uri()
    with opened(browser, f"{address}#head?layer=1&head=2&query=3") as page:
        assert page.locator("footer.story").is_hidden(), "nothing covers the view"
        page.keyboard.press("?")
        page.get_by_role("button", name="Record a story").click()
        for view, sentence in ((None, "Third"), ("4", "First"), ("3", "Gone"), ("1", "Second </script><!--")):
            if view:
                page.locator("main").focus()
                page.keyboard.press(view)
            page.get_by_role("button", name="Add this view").click()
            page.locator("textarea").last.fill(sentence)
        page.get_by_role("button", name="Delete view 3").click()
        page.get_by_role("button", name="Move view 1 down").click()
        page.get_by_role("button", name="Move view 2 down").click()
        page.get_by_label("Title of the story").fill("Mine")
        assert axe_violations(page, "footer.story") == []
        page.reload()  # the browser keeps what was recorded
        page.keyboard.press("r")
        assert page.locator("textarea").evaluate_all("all => all.map((one) => one.value)") == [
            "First",
            "Second </script><!--",
            "Third",
        ]
        with page.expect_download() as saved:
            page.get_by_role("button", name="Save story.json").click()
        story = Story.read(saved.value.path())
        assert story.title == "Mine" and [parts(step.link)[0] for step in story.steps] == [
            "compare",
            "overview",
            "head",
        ]
        assert all(parts(step.link)[1]["head"] == "2" for step in story.steps)
        assert story.check([texts["short"]]) == story
        with page.expect_download() as saved:
            page.get_by_role("button", name="Save as one page").click()
        saved.value.save_as(tmp_path / "story.html")
    with opened(browser, (tmp_path / "story.html").as_uri()) as page:
        menu(page, "Mine")
        page.get_by_role("button", name="Next", exact=True).click()
        until(page, "document.querySelector('.step').textContent.endsWith('Second </script><!--')")
    # But for the story and white space it is the page that Python writes.
    again = write_page(tmp_path / "again.html", [texts["short"], texts["hostile"]], story).read_text()
    assert data_of(tmp_path / "story.html") == data_of(tmp_path / "again.html") and "sha256-" in again


def data_of(path):
    found = re.findall(r'<script type="application/json" id="regard-data">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(found[0])


def test_a_story_prints_one_view_a_page(browser, texts, tmp_path):
    address = write_page(tmp_path / "index.html", list(texts.values()), STORY).as_uri()
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.add_init_script("window.print = () => { window.printed = true }")
    page = context.new_page()
    page.goto(address)
    menu(page, "Take the tour")
    page.get_by_role("button", name="Print").click()
    until(page, "window.printed === true")
    sections = page.locator(".story-pages > section")
    assert sections.count() == 3
    for number, step in enumerate(STORY.steps):
        assert step.sentence in sections.nth(number).inner_text()
        assert sections.nth(number).locator(f".view-{parts(step.link)[0]}").count() == 1
    content = page.pdf(format="A4")
    assert len(re.findall(rb"/Type\s*/Page\b", content)) == 3
    until(page, "document.querySelector('.story-pages') === null")
    context.close()
