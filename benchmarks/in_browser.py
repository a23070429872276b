"""The goals of the page in a browser: the first picture, a key press, and how long a task may hold up the page."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measure import Goal
from benchmarks.page_server import in_thread
from benchmarks.texts import HEADS, LAYERS, LENGTH, long_text, many_heads, page_of_words
from regard.viewer import load_run, save_run, write_page
from regard.viewer.server import application
from regard.viewer.story import VIEWS

#: The keys that are pressed in every view, and how often all of them.
KEYS, ROUNDS = ["]", "[", "}", "{", "ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp"], 3
#: Collects how long each key press took until its picture, and each task that held up the page for 50 ms or more.
OBSERVED = """
window.pressed = []; window.tasks = [];
new PerformanceObserver((list) => list.getEntries().forEach((one) => {
  if (one.name === "keydown") window.pressed.push(one.duration); })).observe({type: "event", durationThreshold: 16});
new PerformanceObserver((list) => list.getEntries().forEach((one) => window.tasks.push(one.duration)))
  .observe({type: "longtask", buffered: true});
"""
#: When the first picture of a view is complete.
DRAWN = {
    "overview": "document.querySelectorAll('.view canvas, .view svg').length > 0",
    "head": "document.querySelector('.map-box')?.dataset.waiting === '0'",
}
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


def goals() -> Iterator[Goal]:
    """Every goal, in Debian's chromium; nothing without it."""
    path = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
    if path is None:
        print("No chromium here (apt-get install chromium), so the page in a browser is not measured.")
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as running, tempfile.TemporaryDirectory() as folder:
        browser = running.chromium.launch(executable_path=path, args=FLAGS)
        yield from first_picture(browser, Path(folder))
        yield from key_press(browser, write_page(Path(folder) / "heads.html", [many_heads()]))
        yield from long_tasks(browser, write_page(Path(folder) / "words.html", [page_of_words()]))
        browser.close()


def first_picture(browser: Any, folder: Path) -> Iterator[Goal]:
    """From the address to the picture, of a saved text that is opened as `regard view` does."""
    save_run(folder / "run", [long_text()])
    with in_thread(application(load_run(folder / "run"))) as address:
        for view, drawn in DRAWN.items():
            seconds = min(until_drawn(browser, f"{address}#{view}", drawn) for _ in range(3))
            work = f"address to first picture of {view}, {LAYERS} layers x {HEADS} heads, n = {LENGTH}"
            yield Goal(work, seconds, 1, "s")


def until_drawn(browser: Any, address: str, drawn: str) -> float:
    with opened(browser) as page:
        start = time.perf_counter()
        page.goto(address, wait_until="commit")
        page.wait_for_function(drawn)
        return time.perf_counter() - start


def key_press(browser: Any, file: Path) -> Iterator[Goal]:
    """The longest time from a key press to its picture, in each view."""
    with opened(browser) as page:
        for view in VIEWS:
            page.goto(f"{file.as_uri()}#{view}")
            page.wait_for_selector(".view > *")
            page.wait_for_timeout(500)
            page.evaluate("window.pressed.length = 0")
            for key in ROUNDS * KEYS:
                page.keyboard.press(key)
                page.wait_for_timeout(60)
            slowest = page.evaluate("Math.max(0, ...window.pressed)")
            yield Goal(f"slowest key press in {view}, 144 layers x 24 heads", slowest, 100, "ms")


def long_tasks(browser: Any, file: Path) -> Iterator[Goal]:
    """The longest task while a reader goes through all views of a text of 2,000 tokens."""
    for view in VIEWS:
        with opened(browser) as page:
            page.goto(f"{file.as_uri()}#{view}")
            page.wait_for_selector(".view > *")
            page.wait_for_timeout(800)
            for key in KEYS:
                page.keyboard.press(key)
                page.wait_for_timeout(80)
            slowest = page.evaluate("Math.max(0, ...window.tasks)")
        yield Goal(f"longest task in {view}, n = 2,000", slowest, 200, "ms")


@contextmanager
def opened(browser: Any) -> Iterator[Any]:
    """A page whose times are observed from its start."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, bypass_csp=True)
    context.add_init_script(OBSERVED)
    yield context.new_page()
    context.close()
