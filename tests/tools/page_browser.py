"""A browser, pages of small readings as one file and from a server, and how tests open them."""

from __future__ import annotations

from contextlib import contextmanager
from importlib.util import find_spec

import pytest

import regard as rg
from pages import FLAGS, HOSTILE, UNUSUAL, chromium, reading, served, told, translation, until
from regard.viewer import Sheet, write_page

NEEDS_CHROMIUM = pytest.mark.skipif(chromium() is None, reason="needs a browser: chromium-headless-shell")


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=chromium(), args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def texts():
    long = reading(title="Long", length=300, mask=rg.causal(), layers=1)
    hostile = reading(HOSTILE + UNUSUAL, title=HOSTILE[0])
    gold = [(0, 0, True), (3, 4, False)]
    return {
        "short": Sheet.of(told(reading(title="Short"))),
        "long": Sheet.of(long),
        "hostile": Sheet.of(hostile),
        "pair": Sheet.of(translation(), gold=gold, aligned="output"),
        "curves": Sheet.of(
            reading(title="Curves"),
            charts=[
                {
                    "title": "BLEU by step",
                    "x": "step",
                    "y": "BLEU",
                    "series": [{"name": "a", "points": [[0, 1], [1, 2]]}],
                }
            ],
        ),
    }


@pytest.fixture(scope="module")
def file(texts, tmp_path_factory):
    return write_page(tmp_path_factory.mktemp("page") / "index.html", list(texts.values())).as_uri()


@pytest.fixture(scope="module")
def server(texts):
    with served(list(texts.values())) as address:
        yield address


@contextmanager
def opened(browser, address, width=1280, height=900, **options):
    """A page; what it complains about, or asks of anyone else, fails the test."""
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    page, wrong = context.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    page.on(
        "request",
        lambda asked: (
            None if asked.url.startswith((address.split("#")[0], "data:", "blob:")) else wrong.append(asked.url)
        ),
    )
    page.goto(address)
    page.wait_for_selector(".view > *")
    yield page
    context.close()
    assert not wrong, wrong


def menu(page, act):
    """Choose an action of the menu."""
    page.get_by_role("button", name="Menu").click()
    page.locator(".help-buttons").get_by_role("button", name=act).click()


def settled(page):
    """The map, once all its tiles are there."""
    until(page, "document.querySelector('.map-box').dataset.waiting === '0'")
    return page.locator(".map-box")


def weight(page):
    until(page, "document.querySelector('.readout .weight')?.textContent !== '…'")
    return all_digits(page.locator(".readout .weight"))


def all_digits(number):
    """A number with the digits of its tooltip; the page shows it with three after the point."""
    exact = float(number.get_attribute("title"))
    assert abs(exact) < 0.0005 or number.inner_text().replace("−", "-") == f"{exact:.3f}"
    return exact


@pytest.fixture(params=["file", "server"])
def address(request):
    return request.getfixturevalue(request.param)


def axe_violations(page, place="body"):
    """What axe-core finds in a part of the page; nothing where it is not installed."""
    if find_spec("axe_playwright_python") is None:
        return []
    from axe_playwright_python.base import AXE_SCRIPT

    page.evaluate(AXE_SCRIPT)
    found = page.evaluate("place => axe.run(place, {resultTypes: ['violations']})", place)["violations"]
    return [(rule["id"], node["html"][:200]) for rule in found for node in rule["nodes"]]
