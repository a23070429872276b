"""Everybody can use the page: axe-core, a keyboard, a phone; every view, light and dark."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from page_browser import NEEDS_CHROMIUM, browser, file, opened, texts
from pages import WORDS, idle, painted, until
from regard.types import TextReading
from regard.viewer import Sheet, write_page
from regard.viewer.story import VIEWS

pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.base", reason="axe-core is not installed")
pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]

#: Further looks of some views.
LOOKS = [
    "head?way=lines",
    "overview?grid=lines",
    "head?why=yes",
    "alignment?text=3",
    "head?text=3",
    "statistics?text=4",
]
LOOKS += [
    "compare?pair=heads",
    "head?figure=words%2Cmap",
    "head?heads=0.1%2C1.2&key=3",
    "statistics?table=head&find=it",
    "head?layer=1&head=2&query=4&key=6&x=6.5&y=4.5&zoom=5.5",
]
THEMES = {"light": {}, "dark": {"runOnly": ["color-contrast"]}}  # colors differ between themes, and nothing else
WIDTHS = [1440, 768, 390]
#: Controls below 24 x 24 px that are too near to others, as WCAG 2.2 counts them; words in a text may be small.
TARGETS = {"runOnly": {"type": "rule", "values": ["target-size"]}}
WIDER = """() => [...document.querySelectorAll('body *')]
    .filter((one) => one.getBoundingClientRect().right > innerWidth + 1)
    .filter((one) => !one.closest('.scroll, .words, dialog, .spoken'))
    .slice(0, 3).map((one) => one.outerHTML.slice(0, 120))"""


@pytest.fixture(scope="module")
def themed(browser, file):
    """A page for each theme, with axe-core in it; both stay open."""
    pages = {}
    for theme in THEMES:
        context = browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme=theme)
        pages[theme] = context.new_page()
        pages[theme].goto(file)
        pages[theme].evaluate(axe.AXE_SCRIPT)
    return pages


def shown(page, file, link):
    """Go to a view, and wait until it is drawn."""
    page.goto(f"{file}#{link}")
    page.wait_for_selector(".view > *")
    idle(page)


def violations(page, options):
    found = page.evaluate("options => axe.run(document, options)", {"resultTypes": ["violations"]} | options)
    return [
        f"{rule['id']}: {node['html'][:150]} ({' '.join(node['failureSummary'].split())[:220]})"
        for rule in found["violations"]
        for node in rule["nodes"][:4]
    ]


@pytest.mark.parametrize("link", [*VIEWS, *LOOKS])
def test_axe_finds_nothing(themed, file, link):
    for theme, options in THEMES.items():
        shown(themed[theme], file, link)
        found = violations(themed[theme], options)
        assert not found, "\n".join([theme, *found])
    too_wide = [wrong for width in WIDTHS for wrong in overflowing(themed["light"], width)]
    assert not too_wide, "\n".join(too_wide)


def overflowing(page, width):
    """What is wider than a window of this width, and on a phone the targets that are too small; the window is reset."""
    page.set_viewport_size({"width": width, "height": 900})
    until(page, "width => innerWidth === width", width)
    idle(page)
    wider = page.evaluate("document.documentElement.scrollWidth") > width
    wrong = [f"{width} px: {each}" for each in page.evaluate(WIDER)] if wider else []
    wrong += violations(page, TARGETS) if width == min(WIDTHS) else []
    page.set_viewport_size({"width": 1440, "height": 900})
    return wrong


def test_axe_finds_nothing_in_the_list_of_keys(themed, file):
    page = themed["light"]
    shown(page, file, "overview")
    page.keyboard.press("?")
    assert violations(page, {}) == []
    page.keyboard.press("Escape")


def test_axe_would_find_something(themed, file):
    """The test itself: a picture without a name is seen."""
    page = themed["light"]
    shown(page, file, "statistics")
    page.evaluate("document.querySelector('.view').append(Object.assign(new Image(), {src: 'data:,', className: 'x'}))")
    assert any("image-alt" in each for each in violations(page, {}))
    page.evaluate("document.querySelector('.x').remove()")


# A keyboard

REACHED = """() => { const one = document.activeElement; const box = one.getBoundingClientRect();
    const style = getComputedStyle(one);
    const name = one.getAttribute('aria-label') || (one.labels?.[0] ?? one).textContent.trim() || one.title;
    return {tag: one.tagName, name: name.slice(0, 40), html: one.outerHTML.slice(0, 90),
        drawn: box.width > 0 && box.height > 0,
        outline: style.boxShadow !== 'none' || style.outlineStyle !== 'none'}; }"""


@pytest.mark.parametrize("link", VIEWS)
def test_every_control_is_reached_by_tab_and_seen(themed, file, link):
    page = themed["light"]
    shown(page, file, link)
    page.evaluate("document.activeElement.blur()")
    controls = page.evaluate(
        "[...document.querySelectorAll('button, select, input, a[href], summary, [tabindex=\"0\"]')]"
        ".filter((one) => one.tabIndex >= 0 && one.checkVisibility() && !one.disabled).length"
    )
    reached = []
    for _ in range(min(controls, 60)):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(REACHED))
    unseen = [
        each for each in reached if each["tag"] != "BODY" and not (each["drawn"] and each["outline"] and each["name"])
    ]
    assert not unseen and len(reached) >= min(controls, 10)


def test_charts_are_used_by_keyboard(browser, file):
    """What a pointer finds in a chart, the keyboard finds too: a mark can be focused, tells its value and is chosen."""
    with opened(browser, f"{file}#statistics") as page:
        marks = page.locator("figure [role=button], figure [tabindex='0']")
        assert marks.count() > 0


def test_views_are_links_and_a_key_skips_to_the_view(browser, file):
    with opened(browser, f"{file}#head?layer=1&head=2&query=3") as page:
        page.wait_for_selector(".map-box")
        page.keyboard.press("]")
        until(page, "document.querySelector('.tabs a').href.includes('layer=0&head=0')")
        links = page.locator(".tabs a").evaluate_all("all => all.map((one) => one.hash)")
        names = [link.split("?")[0] for link in links]
        assert names[:2] == ["#overview", "#head"] and all("layer=0&head=0" in link for link in links)
        assert page.locator(".tabs [aria-current=page]").inner_text() == "Head"
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the view"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.tagName") == "MAIN" and "#head" in page.url
        page.get_by_role("link", name="Statistics", exact=True).click()
        until(page, "location.hash.startsWith('#statistics')")


#: Of some views: their controls, those before their first picture, and this picture.
FEW = {
    "overview": (34, 14, ".lead-stage"),
    "head": (28, 17, ".head-words .stage"),
    "head?way=lines": (26, 17, ".lines"),
    "statistics": (34, 17, ".charts svg"),
    "compare": (34, 17, ".pair .words"),
    "whatif": (20, 14, ".pair .words"),
}


@pytest.mark.parametrize("view", FEW)
def test_a_view_has_few_controls_before_its_first_picture(browser, file, view):
    """With the keyboard a group of buttons is one stop, in which arrows choose."""
    controls = "a[href], button, select, input, summary, [tabindex]"
    count = """([controls, selector]) => { const all = [...document.querySelectorAll(controls)]
        .filter((one) => one.tabIndex >= 0 && one.offsetParent !== null && !one.disabled);
        const picture = document.querySelector(selector);
        const isBefore = (one) => picture.compareDocumentPosition(one) & 2 && !picture.contains(one);
        return [all.length, all.filter(isBefore).length]; }"""
    with opened(browser, f"{file}#{view}", width=1440) as page:
        painted(page)
        most, first, picture = FEW[view]
        page.wait_for_selector(picture)
        every, before = page.evaluate(count, [controls, picture])
        assert every <= most and before <= first
        page.locator(".scale [aria-pressed=true]").focus()
        page.keyboard.press("ArrowRight")
        until(page, "location.hash.includes('scale=log') && document.activeElement.textContent === 'Log'")


def test_the_menu_has_what_is_secondary(browser, file):
    """Theme, link, card and stories by the keyboard, in every view; the card where there is one."""
    with opened(browser, f"{file}#overview") as page:
        page.keyboard.press("?")
        acts = page.locator(".help-buttons button").all_inner_texts()
        assert acts == ["Copy link", "Save card", "Record a story", "Light or dark"]
        page.keyboard.press("Tab")
        page.locator(".help-buttons button", has_text="Light or dark").focus()
        page.keyboard.press("Enter")
        assert page.locator(".regard").get_attribute("data-theme") == "dark" and page.locator(".help").is_hidden()
        page.keyboard.press("2")
        page.wait_for_selector(".head-words .words")
        page.keyboard.press("?")
        assert "Save card" not in page.locator(".help-buttons button").all_inner_texts()


# A phone

CONTRAST = """(selector) => { const [one, ground] = [document.querySelector(selector), document.querySelector('.card')];
    const light = (color) => { const parts = color.match(/[\\d.]+/g).map(Number);
        const [r, g, b] = color.startsWith('color(') ? parts.slice(-3) : parts.map((part) => part / 255);
        return [r, g, b].map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
            .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0); };
    const style = [getComputedStyle(one).fill, getComputedStyle(ground).backgroundColor];
    const both = style.map(light).sort((a, b) => b - a);
    return (both[0] + 0.05) / (both[1] + 0.05); }"""


@pytest.mark.parametrize("theme", THEMES)
def test_small_bars_are_seen_in_both_themes(browser, tmp_path, theme):
    """They once had the color of a rule: 1.3 : 1 on a card of the dark theme."""
    x = torch.zeros(1, 2, 12, 4)
    x[..., 0, :] = 1
    sheet = Sheet.of(TextReading.of("A sink", {"layers.0": rg.Attention()(9 + x, 4 * x, x).weights}, WORDS[:12]))
    with opened(browser, write_page(tmp_path / "sink.html", [sheet]).as_uri(), color_scheme=theme) as page:
        page.wait_for_selector(".card-picture rect")
        assert page.evaluate(CONTRAST, ".card-picture rect:nth-of-type(3)") >= 3


def test_a_phone_has_room_for_numbers_heads_and_arcs(browser, file):
    """A scroll bar lay over the numbers of tiles, columns beyond the screen made a tall empty head of the table."""
    bottom = "one => { const box = one.getBoundingClientRect(); return box.top + box.height; }"
    with opened(browser, f"{file}#head?query=9", width=390, height=844) as page:
        until(page, "document.querySelectorAll('.stage .arcs path').length > 0")
        row, tile = (page.locator(one).first.evaluate(bottom) for one in (".head-tiles-row", ".head-tile"))
        assert row - tile >= 12
        words = page.locator(".head-words .words")
        line, height = words.evaluate(
            "one => [parseFloat(getComputedStyle(one).lineHeight), one.querySelector('span').offsetHeight]"
        )
        assert line - height >= 30, "between two lines an arc has room"
        page.goto(f"{file}#statistics?table=head&find=it")
        page.wait_for_selector(".head-table tbody tr")
        assert page.locator(".head-table thead").bounding_box()["height"] <= 80
