"""The real page in a real browser: as one file and from a server, with a mouse, with keys, on a phone, in the dark."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest

from fabricated import fabricate
from page_browser import NEEDS_CHROMIUM, address, browser, file, opened, server, settled, texts, weight
from pages import HOSTILE, WORDS, painted, reading, served, until
from regard.hf.token_labels import token_label
from regard.lab.pages.run_folders import open_folder
from regard.viewer import Sheet, write_page
from regard.viewer.story import VIEWS

pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]


def test_from_all_heads_to_one_weight(browser, address, texts):
    maps = texts["short"].maps
    with opened(browser, address) as page:
        assert page.locator("[role=gridcell]").count() == 6
        page.get_by_role("gridcell", name=re.compile("Layer 1, head 2")).click()
        box = settled(page)
        assert "#head" in page.url and box.get_attribute("data-level") == "0"
        page.get_by_label("Jump to a token").fill("9,3")
        page.keyboard.press("Enter")
        settled(page)
        assert weight(page) == pytest.approx(float(maps[1][0, 2, 9, 3]), rel=2e-5)
        page.keyboard.press("Escape")
        page.keyboard.press("ArrowRight")
        until(page, "document.querySelector('.readout').textContent.includes('4:')")
        assert weight(page) == pytest.approx(float(maps[1][0, 2, 9, 4]), rel=2e-5)


def test_a_long_map_from_the_whole_to_one_weight(browser, address, texts):
    weights = texts["long"].maps[0]
    with opened(browser, address + "#head?text=1&layer=0&head=1", width=700, height=420) as page:
        box = settled(page)
        assert int(box.get_attribute("data-level")) > 0, "pooled, as 300 weights do not fit"
        page.get_by_label("Jump to a token").fill("250,123")
        page.keyboard.press("Enter")
        until(page, "document.querySelector('.map-box').dataset.level === '0'")
        settled(page)
        assert weight(page) == pytest.approx(float(weights[0, 1, 250, 123]), rel=2e-5)
        page.get_by_label("Jump to a token").fill("123,250")
        page.keyboard.press("Enter")
        until(page, "document.querySelector('.readout').textContent.includes('250:')")
        assert weight(page) == 0, "the future is masked"


def repeated(page, act, said, *given):
    """Move the mouse again until an expression holds: a busy page joins events of the mouse, or loses them."""
    for _ in range(30):
        act()
        for _ in range(10):
            if page.evaluate(said, *given):
                return
            page.wait_for_timeout(50)
    raise AssertionError(f"never came true: {said}")


def test_the_wheel_alone_scrolls_the_page_and_with_ctrl_zooms_the_map(browser, file):
    with opened(browser, file + "#head?text=1", width=700, height=420) as page:
        box = settled(page)
        level = box.get_attribute("data-level")
        page.locator(".map-box").hover()
        repeated(page, lambda: page.mouse.wheel(0, 60), "scrollY > 100")
        assert settled(page).get_attribute("data-level") == level and "zoom=" not in page.url


def test_zooming_with_the_wheel_ends_at_single_weights(browser, file):
    with opened(browser, file + "#head?text=1", width=700, height=420) as page:
        settled(page).evaluate("box => box.scrollIntoView()")
        bounds = page.locator(".map-box").bounding_box()
        x, y = bounds["x"] + bounds["width"] * 0.5, bounds["y"] + bounds["height"] * 0.3
        page.mouse.move(x, y)
        page.keyboard.down("Control")  # as a pinch on a touchpad comes
        repeated(page, lambda: page.mouse.wheel(0, -400), "document.querySelector('.map-box').dataset.level === '0'")
        page.keyboard.up("Control")
        settled(page)
        before = page.evaluate("location.href")

        def drag():
            page.mouse.move(x, y)
            page.mouse.down()
            page.mouse.move(x - 70, y - 30, steps=4)
            page.mouse.up()

        repeated(page, drag, "before => location.href !== before", before)


def test_a_link_brings_back_the_view(browser, address):
    with opened(browser, address + "#head?layer=1&head=2&query=4&key=6&x=6.5&y=4.5&zoom=5.5&scale=linear") as page:
        settled(page)
        assert page.locator("h1").inner_text().startswith("Layer 1, head 2")
        said = page.locator(".readout").inner_text()
        page.keyboard.press("]")
        page.go_back()
        page.reload()
        page.wait_for_selector(".map-box")
        settled(page)
        assert page.locator(".readout").inner_text() == said and "not 4 → the 6" in said
        assert page.get_by_role("button", name="Linear").get_attribute("aria-pressed") == "true"


@pytest.mark.parametrize(
    "link",
    [
        "#head?layer=99&head=-4&query=1e9&key=77&text=50&x=1e12&y=NaN&zoom=900",
        "#head?heads=,,&query=-3",
        "#nowhere",
        "#head?pool=sum&scale=x",
    ],
)
def test_a_link_to_what_there_is_not_shows_what_there_is(browser, file, link):
    with opened(browser, file + link) as page:
        assert page.locator("h1").count() == 1 and not page.locator(".broken").count()


def test_words(browser, address, texts):
    row = texts["short"].maps[0][0, 1, 9]
    with opened(browser, address + "#head?layer=0&head=1&query=2") as page:
        words = page.locator(".words [role=option]")
        assert words.all_inner_texts() == WORDS
        words.nth(9).hover()
        until(page, "document.querySelector('.looks').textContent.startsWith('it ')")
        best = int(row.argmax())
        assert f"attends to {WORDS[best]} {float(row[best]):.3f}" in page.locator(".looks").inner_text()
        words.nth(4).click()
        until(page, "document.querySelector('.looks').textContent.startsWith('not ')")
        assert "query=4" in page.url
        page.keyboard.press("ArrowRight")
        until(page, "document.querySelector('.looks').textContent.startsWith('cross ')")
        page.get_by_label("Heads", exact=True).select_option("all")
        until(page, "document.querySelector('.looks').textContent.includes('mean of all heads')")


@pytest.mark.parametrize(
    ("old", "now", "drawn"),
    [
        ("text?way=heads", "head?way=lines", ".view-head svg line"),
        ("text?way=model", "overview?grid=lines", ".view-overview .line-grid path"),
        ("text?query=3&side=in", "head?query=3&side=in", ".view-head .words span"),
        ("map?query=3&key=2", "head?query=3&key=2", ".view-head .labels text"),
    ],
)
def test_a_link_of_an_earlier_page_leads_to_where_its_view_is_now(browser, address, old, now, drawn):
    with opened(browser, f"{address}#{old}") as page:
        until(page, f"document.querySelectorAll('{drawn}').length > 5")
        view, given = now.split("?")
        parts = page.url.split("#")[1].split("?")
        assert parts[0] == view and set(given.split("&")) <= set(parts[1].split("&"))
        assert "way=model" not in page.url and page.locator(".notice:visible").count() == 0


def test_neurons_add_up_to_the_score(browser, server, texts):
    with opened(browser, server + "#text?way=neurons&layer=1&head=0&query=3") as page:
        page.wait_for_selector(".view-head .neurons")  # a link of an earlier page leads to the fold
        said = page.locator(".neurons text").all_text_contents()
        first = next(text for text in said if text.startswith("score"))
        seen = texts["short"].maps[1]
        key = int(seen[0, 0, 3].argmax())
        expected = seen._prepared.query[0, 0, 3] @ seen._prepared.key[0, 0, key] * 8**-0.5
        assert float(first.split()[1]) == pytest.approx(float(expected), abs=0.006)


def test_the_next_head_by_key(browser, file):
    with opened(browser, file + "#head?layer=0&head=2") as page:
        settled(page)
        page.keyboard.press("]")
        assert page.locator("h1 b").inner_text() == "Layer 1, head 0"
        page.keyboard.press("[")
        page.keyboard.press("}")
        assert page.locator("h1 b").inner_text() == "Layer 1, head 2"
        for key, view in zip("1234", ["overview", "head", "statistics", "compare"], strict=True):
            page.keyboard.press(key)
            assert f"#{view}" in page.url
        page.keyboard.press("?")
        assert page.locator("dialog[open]").count() == 1


def test_alignment_with_gold_links(browser, address):
    with opened(browser, address + "#alignment?text=3") as page:
        page.wait_for_selector(".matrix")
        assert page.locator(".gold").count() == 2
        assert page.locator(".gold[stroke-dasharray]").count() == 1
        assert "attended to when it predicted" in page.locator(".about-reading").inner_text()
        words = page.locator(".matrix text").all_text_contents()
        assert {"Haus", "house", "tiny", "klein"} <= set(words)
        page.get_by_label("Panels").select_option("heads")
        until(page, "document.querySelectorAll('.matrix').length === 2")
        page.keyboard.press("2")
        page.wait_for_selector(".words:not([role]) span")


def test_a_comparison_of_translators(browser, tmp_path):
    sheets = open_folder(fabricate(tmp_path / "study"))
    with served(sheets) as address, opened(browser, address + "#alignment") as page:
        until(page, "document.querySelectorAll('.matrix').length === 3")
        titles = page.locator(".panels figcaption > span:first-child").all_inner_texts()
        assert titles == ["Bahdanau", "Luong general", "Transformer"]
        assert page.locator(".gold").count() == 6
        assert "attended to when it predicted" in page.locator(".about-reading").inner_text()
        page.keyboard.press("3")
        for title in (
            "Validation BLEU by step",
            "Validation BLEU by minutes",
            "Training loss by step",
            "BLEU by length",
        ):
            until(page, f"document.body.textContent.includes('{title}')")
        figure = page.locator("figure", has_text="BLEU by length")
        labels = figure.locator("[aria-label='x-axis tick label'] text").all_text_contents()
        assert labels == [place for place, _ in sheets[0].about["charts"][-1]["series"][0]["points"]]


def test_statistics(browser, file):
    with opened(browser, file + "#statistics") as page:
        until(page, "document.querySelector('.charts').dataset.waiting === '0'")
        titles = page.locator("figcaption").all_inner_texts()
        for title in (
            "Map of spread (entropy)",
            "Map of roles",
            "Relative offsets",
            "Weight received",
            "Similarity of heads",
            "Heads with",
        ):
            assert any(title in each for each in titles), title
        page.goto(file + "#statistics?text=4")
        until(page, "document.body.textContent.includes('BLEU by step')")


def test_dark_and_light(browser, file):
    paper = "getComputedStyle(document.querySelector('.regard')).backgroundColor"
    with opened(browser, file, color_scheme="dark") as page:
        assert page.evaluate(paper) == "rgb(20, 23, 26)"
        page.keyboard.press("t")
        assert page.evaluate(paper) == "rgb(252, 251, 248)"
    with opened(browser, file, color_scheme="light") as page:
        assert page.evaluate(paper) == "rgb(252, 251, 248)"


SIZES = {"phone": (390, 800), "400 %": (320, 256), "widest": (2200, 1200)}
LOOKS = [
    *VIEWS,
    "compare?pair=heads",
    "overview?grid=lines",
    "head?why=yes",
    "alignment?text=3",
    "statistics?table=head",
]


@pytest.mark.parametrize("size", SIZES)
def test_no_view_scrolls_sideways(browser, file, size):
    width, height = SIZES[size]
    with opened(browser, file, width=width, height=height) as page:
        for view in LOOKS:
            page.goto(f"{file}#{view}")
            painted(page)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, view
            inside = "[...document.querySelectorAll('.scroll')].filter((one) => one.scrollWidth > one.clientWidth + 1)"
            assert size != "phone" or page.evaluate(f"{inside}.length") == 0, f"{view}: what it draws has no room"


def test_unusual_text_shows_as_itself(browser, address):
    with opened(browser, address + "#head?text=2&query=0") as page:
        said = []
        page.on("dialog", lambda dialog: said.append(dialog.message))
        shown = page.locator(".words [role=option]").evaluate_all("all => all.map((one) => one.textContent)")
        assert shown[:3] == HOSTILE[:3] and {"👩‍👩‍👧", "שלום", "مرحبا"} <= set(shown)
        assert "ZWSP" in shown and "U+202e" in shown and "⇥" in shown, "what cannot be seen is named"
        for view in ("overview", "head", "alignment", "statistics", "head?way=lines"):
            page.goto(f"{address}#{view}{'&' if '?' in view else '?'}text=2")
            painted(page)
            assert not page.locator(".view img, .view b b").count()
        assert not said and page.title().startswith(HOSTILE[0])


def test_everything_has_a_name_and_can_be_reached(browser, file):
    nameless = """() => [...document.querySelectorAll('button, select, input, canvas[role=img], svg[role=img]')]
        .filter((one) => !(one.getAttribute('aria-label') || one.textContent.trim()))
        .filter((one) => !one.closest('label')?.textContent.trim())
        .map((one) => one.outerHTML.slice(0, 120))"""
    with opened(browser, file) as page:
        for view in LOOKS:
            page.goto(f"{file}#{view}")
            painted(page)
            assert page.evaluate(nameless) == [], view
        page.goto(f"{file}#overview")
        page.wait_for_selector("[role=gridcell]")
        page.locator("[role=gridcell][tabindex='0']").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        page.wait_for_selector(".map-box")


def test_a_server_that_fails_is_told_of(browser, texts):
    with served([texts["short"]]) as address:
        context = browser.new_context()
        page = context.new_page()
        page.route("**/ask/tile/**", lambda route: route.abort())
        page.goto(address + "#head")
        until(page, "document.querySelector('.spoken')?.textContent.includes('could not be loaded')")
        page.wait_for_selector(".words [role=option]")
        context.close()


def test_long_work_shows_progress_and_can_be_stopped(browser, texts):
    with served([texts["long"]]) as address:
        context = browser.new_context()
        page, asked = context.new_page(), []
        page.route("**/ask/tile/**", lambda route: asked.append(route))  # which nobody answers
        page.goto(address + "#head")
        until(page, "document.querySelector('.progress')?.textContent.startsWith('Computing')")
        page.locator(".map-box canvas").press("Escape")
        until(page, "document.querySelector('.progress').textContent.startsWith('Stopped')")
        before = len(asked)
        page.wait_for_timeout(200)  # nothing is to happen: time for more requests, without a condition
        assert len(asked) == before and page.locator(".map-box").get_attribute("data-waiting") == "0"
        page.locator(".map-box canvas").press("+")
        until(page, "document.querySelector('.progress').textContent.startsWith('Computing')")
        context.close()


def test_a_broken_page_says_so(browser, texts, tmp_path):
    page_file = write_page(tmp_path / "index.html", [texts["short"]])
    content = page_file.read_text()
    page_file.write_text(
        re.sub(
            r'(id="regard-data">).*?(</script>)', lambda m: m[1] + json.dumps({"texts": []}) + m[2], content, flags=re.S
        )
    )
    context = browser.new_context()
    page = context.new_page()
    page.goto(page_file.as_uri())
    page.wait_for_selector(".broken")
    context.close()


#: Tokens of code as a tokenizer of bytes gives them: an indent, ends of lines, tabs, and blanks around a word.
BLANK = ["def", "\n", "    ", "return", "\t\t", " ", "\n\n  \t", "x", "\r\n", "y\n", "        "]
#: Every text in the view and in its drawings, and every tooltip.
SAID = """() => [...document.querySelectorAll('main *')].flatMap((one) => [one.childElementCount ? '' : one.textContent,
    one.getAttribute('title') ?? '']).filter(Boolean)"""


def test_every_view_shows_whitespace_as_the_commands_do(browser, tmp_path):
    """The names are those of `token_label`, which the terminal prints."""
    by_name = SimpleNamespace(convert_tokens_to_string="".join)
    names = [token_label(by_name, token) for token in BLANK]
    assert names[1:7] == ["↵", "␣×4", "return", "⇥×2", "␣", "↵×2␣×2⇥"] and names[-1] == "␣×8"
    names[-2] = "y↵"  # of a word the page also names ends of lines inside the token
    file = write_page(tmp_path / "code.html", [Sheet.of(reading(BLANK, title="Code", heads=1))]).as_uri()
    blank = [name for name in names if name not in ("def", "return", "x")]
    views = {view: blank for view in ("overview", "head", "head?way=lines", "alignment")}
    views |= {
        "overview?grid=lines": [],
        "head?why=yes": blank[:1],
        "statistics": [],
        "statistics?table=head&find=x": [],
    }
    with opened(browser, file, width=1440) as page:
        for view, wanted in views.items():
            page.goto(f"{file}#{view}{'&' if '?' in view else '?'}query=1")
            painted(page)
            said = page.evaluate(SAID)
            assert [name for name in wanted if not any(name in each for each in said)] == [], view
            assert [each for each in said if re.search("␣ ␣|↵ ↵|⇥ ⇥|\t|\\\\n", each)] == [], view
        page.goto(f"{file}#head?query=1&figure=words,map,alignment")
        page.wait_for_selector(".figure-paper .cell")
        drawn = page.locator(".figure-paper text").all_text_contents()
        assert [name for name in blank if not any(name in each for each in drawn)] == []
