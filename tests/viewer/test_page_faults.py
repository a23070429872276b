"""What the page once said or did wrong, each in a real browser."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch

from page_browser import NEEDS_CHROMIUM, address, browser, file, opened, server, settled, texts, weight
from pages import WORDS, maps_of, reading, served, until
from regard.types import TextReading
from regard.viewer import Sheet, write_page
from regard.viewer.page import embedded

pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]


def test_a_server_that_ended_is_told_of_in_words(browser, texts):
    """Before, the map asked again for ever, and the words stayed as they were."""
    context = browser.new_context()
    page, asked = context.new_page(), []
    with served([texts["short"]]) as address:
        page.goto(address + "#head")
        page.wait_for_selector(".map-box[data-waiting]")
        settled(page)
        page.wait_for_load_state("networkidle")  # no request of this view fails when the server ends
    page.route("**/ask/**", lambda route: (asked.append(route), route.abort()))
    page.keyboard.press("]")
    until(page, "document.querySelector('.progress').textContent.includes('Start regard view again')")
    page.wait_for_timeout(300)  # nothing is to happen: time for a second request, without a condition
    urls = [route.request.url for route in asked]
    assert len(urls) == len(set(urls)) == 2, "one failure, one request: of the row of the words, and of the map"
    until(page, "document.querySelector('.notice').textContent.includes('Start regard view again')")
    context.close()


def test_rows_that_failed_are_asked_for_again(browser, texts):
    with served([texts["short"]]) as address:
        context = browser.new_context()
        page = context.new_page()
        page.route("**/ask/rows/**", lambda route: route.abort())
        page.goto(address + "#head")
        until(page, "document.querySelector('.notice')?.hidden === false")
        page.unroute("**/ask/rows/**")
        page.locator(".words [role=option]").nth(3).click()
        page.locator(".words [role=option]").nth(0).click()
        until(page, f"document.querySelector('.looks')?.textContent.startsWith('{WORDS[0]} ')")
        context.close()


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """A file with too long a text for single weights: 16 tokens of 4 x 4 cells, and a sink at the first token."""
    text = Sheet.of(reading(title="Pooled", length=160, layers=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("regard.viewer.page.embedded", partial(embedded, budget=9_000))
        return write_page(tmp_path_factory.mktemp("cells") / "index.html", [text]).as_uri()


@pytest.mark.parametrize("link", ["head", "head?way=lines", "overview?grid=lines", "alignment"])
def test_means_of_cells_are_not_told_as_weights_of_words(browser, cells, link):
    with opened(browser, f"{cells}#{link}") as page:
        until(page, "document.querySelector('.means')?.textContent.includes('the mean of a cell')")
        if link == "head":
            until(page, "document.querySelector('.looks').textContent.includes('not weights of single words')")


def test_single_weights_are_told_without_that_note(browser, address):
    with opened(browser, f"{address}#head") as page:
        until(page, "document.querySelector('.looks').textContent.includes('attends to')")
        assert page.locator(".means").count() == 0 and "means" not in page.locator(".looks").inner_text()


def test_the_head_view_draws_one_line_for_a_mean(browser, server, texts):
    """Two layers of three heads: the mean of all is one line a pair, and as thick as the API says."""
    mean = torch.cat([weights.dense()[0] for weights in texts["short"].maps]).mean(0)
    with opened(browser, f"{server}#head?way=lines&heads=all") as page:
        expected = int((mean >= 0.03).sum())
        until(page, f"document.querySelectorAll('.lines line').length === {expected}")
        widths = page.locator(".lines line[data-query='2']").evaluate_all(
            "lines => lines.map(line => Number(line.getAttribute('stroke-width')))"
        )
        row = mean[2][mean[2] >= 0.03]
        assert sorted(widths) == pytest.approx(sorted((0.6 + 2.6 * row).tolist()), rel=1e-4)


def test_the_head_view_tells_of_weight_that_it_does_not_draw(browser, server, texts):
    weights = texts["long"].maps[0].dense()[0, 0, 299]
    outside = float(weights[: 300 - 56].sum())
    with opened(browser, f"{server}#head?text=1&way=lines&head=0&query=299") as page:
        until(page, "document.querySelector('.beyond')?.textContent.includes('not drawn')")
        said = page.locator(".beyond").inner_text()
        assert float(said.split(" ")[0]) == pytest.approx(outside, abs=6e-4)
        assert f"(token {int(weights[: 300 - 56].argmax())})" in said


def test_here_follows_go_to_under_a_resting_mouse(browser, file):
    with opened(browser, file + "#head") as page:
        box = settled(page).bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 3)
        page.get_by_label("Jump to a token").fill("2,5")
        page.get_by_label("Jump to a token").press("Enter")
        until(page, f"document.querySelector('.readout').textContent.startsWith('{WORDS[2]} 2 → {WORDS[5]} 5')")


#: The labels of rows and columns reach from one edge of the frame to the other, within two cells.
LABELS_RUN = """(() => {
    const canvas = document.querySelector(".map-box canvas").getBoundingClientRect();
    const labels = [...document.querySelectorAll(".map-box .labels text:not(.axis-name)")];
    const moved = labels.map((one) => /translate\\(([\\d.]+),([\\d.]+)/.exec(one.getAttribute("transform") ?? ""));
    const across = moved.filter(Boolean).map((found) => Number(found[1]));
    const rows = labels.filter((_, at) => !moved[at]);
    const down = rows.map((one) => Number(one.getAttribute("y")));
    const [left, bottom] = [Number(rows[0].getAttribute("x")) + 6, moved.find(Boolean)[2] - 7];
    const cell = across[1] - across[0];
    return cell >= 40 && across[0] < left + 2 * cell && across.at(-1) > canvas.width - 2 * cell
      && down[0] < 2 * cell && down.at(-1) > bottom - 2 * cell; })()"""


@pytest.mark.parametrize("pair", ["2,1", "250,298", "298,3"])
def test_going_to_an_edge_leaves_no_part_of_the_frame_empty(browser, file, pair):
    with opened(browser, file + "#head?text=1") as page:
        settled(page)
        page.get_by_label("Jump to a token").fill(pair)
        page.get_by_label("Jump to a token").press("Enter")
        until(page, f"document.querySelector('.readout').textContent.includes(' {pair.split(',')[0]} → ')")
        until(page, LABELS_RUN)


def test_neurons_of_a_late_query_name_it(browser, tmp_path):
    long = Sheet.of(reading(title="Late", length=2_300, layers=1, heads=1, width=2))
    with served([long]) as address, opened(browser, f"{address}#head?why=yes&query=2250") as page:
        page.wait_for_selector(".neurons")
        assert page.locator(".neurons text").first.text_content().endswith(" t2250")


def test_a_translation_has_one_direction(browser, file):
    """What attends to a word of the target is no question: nothing attends to it here."""
    with opened(browser, file + "#head?text=3&side=in&query=1") as page:
        until(page, "document.querySelector('.looks').textContent.startsWith('house (token 1) attends to')")
        assert page.get_by_role("group", name="Direction").count() == 0


def test_the_theme_outlives_the_page(browser, server):
    with opened(browser, server) as page:
        before = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        page.keyboard.press("t")
        chosen = page.locator("#regard").get_attribute("data-theme")
        page.reload()
        page.wait_for_selector(".view > *")
        assert page.locator("#regard").get_attribute("data-theme") == chosen is not None
        assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") != before


NOTICE = "document.querySelector('.notice')?.hidden === false && document.querySelector('.notice').textContent"


@pytest.mark.parametrize(
    ("link", "named", "mended"),
    [
        ("head?layer=9&head=1&query=2", ["layer 9", "0 to 1"], "#head?layer=1&head=1&query=2"),
        ("head?layer=1&head=40&query=2", ["head 40", "0 to 2"], "#head?layer=1&head=2&query=2"),
        (
            "head?layer=0&head=1&query=99&key=77",
            ["query 99", "key 77", "0 to 14"],
            "#head?layer=0&head=1&query=14&key=14",
        ),
        ("head?layer=zero&head=1&query=3", ["layer zero"], None),
        ("mapp?layer=1&head=2&query=3", ["a view “mapp”"], "#overview?layer=1&head=2&query=3"),
        ("compare?layer=1&head=2&query=3&text=9", ["text 9", "0 to 4"], None),
        ("picture?layer=1&head=2&query=3", ["a view “picture”"], "#overview?layer=1&head=2&query=3"),
    ],
)
def test_a_link_to_what_is_not_there_is_told_and_mended(browser, address, link, named, mended):
    """Once another layer, text or view was shown without a word."""
    with opened(browser, f"{address}#{link}") as page:
        until(page, f"Boolean({NOTICE})")
        said = page.evaluate(NOTICE)
        assert all(name in said for name in named), said
        assert page.url != f"{address}#{link}" and (mended is None or page.url == address + mended)
        page.keyboard.press("]")
        until(page, "document.querySelector('.notice').hidden")
        page.goto(f"{address}#head?layer=1&head=2&query=3")
        settled(page)
        assert page.evaluate("document.querySelector('.notice').hidden"), "a good link is not told of"
        page.evaluate(f"location.hash = {f'#{link}'!r}")
        until(page, f"Boolean({NOTICE})")


def test_a_link_names_its_model(browser, tmp_path):
    def page_of(model):
        text = TextReading.of("A text", maps_of(15), WORDS, model=model)
        return write_page(tmp_path / f"{model}.html", [Sheet.of(text)]).as_uri()

    small, large = page_of("small"), page_of("large")
    with opened(browser, small) as page:
        page.keyboard.press("2")
        settled(page)
        link = page.url.split("#")[1]
        assert "model=small" in link
    with opened(browser, f"{large}#{link}") as page:
        until(page, f"Boolean({NOTICE})")
        assert "of the model small" in page.evaluate(NOTICE) and "shows large" in page.evaluate(NOTICE)
        until(page, "location.hash.includes('model=large')")
    with opened(browser, f"{small}#{link}") as page:
        settled(page)
        assert page.evaluate("document.querySelector('.notice').hidden")


BOXES = "all => all.map((one) => { const { top, bottom, left, right } = one.getBoundingClientRect();"
BOXES += " return [top, bottom, left, right]; })"


@pytest.mark.parametrize("width", [1280, 390])
def test_an_alignment_says_which_words_it_shows_and_their_names_do_not_touch(browser, file, width):
    """Once 60 words of a long text were shown as if they were all, with names over each other."""
    with opened(browser, f"{file}#alignment?text=1&query=150", width=width) as page:
        page.wait_for_selector(".matrix text")
        said = page.locator(".part-shown").inner_text()
        assert "of 300" in said and "queries 120 to 179" in said
        tall = [box for box in page.locator(".matrix text").evaluate_all(BOXES) if box[1] - box[0] < box[3] - box[2]]
        tall = sorted(tall)[-40:]
        assert len(tall) == 40 and all(one[1] <= other[0] + 0.6 for one, other in pairwise(tall))
        page.get_by_role("button", name="Later").click()
        until(page, "!document.querySelector('.part-shown').textContent.includes('queries 120 ')")
        page.goto(f"{file}#alignment?text=0")
        page.wait_for_selector(".matrix text")
        assert not page.locator(".part-shown").count()
