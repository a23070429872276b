"""The goal of the overview: how fast a key press is in the grid of a large model, in a browser."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

import regard as rg
from regard.bench.measure import Goal
from regard.stats import TextReading
from regard.viewer import write_page

LAYERS, HEADS, TOKENS, PRESSES = 144, 24, 16, 12
#: Milliseconds from a key press to the frame after it.
TIMED = """(key) => new Promise((done) => {
  const start = performance.now();
  document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, composed: true }));
  requestAnimationFrame(() => setTimeout(() => done(performance.now() - start)));
})"""


def goals() -> Iterator[Goal]:
    """Nothing where no browser is installed."""
    chromium = shutil.which("chromium")
    if find_spec("playwright") is None or chromium is None:
        return
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as running:
        page_file = write_page(Path(folder) / "index.html", [large_model()])
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(page_file.as_uri())
        page.wait_for_selector("[role=gridcell]", timeout=120_000)
        page.locator("[role=gridcell][tabindex='0']").focus()
        times = [page.evaluate(TIMED, key) for key in ("ArrowRight", "ArrowDown", "ArrowLeft") * (PRESSES // 3)]
        yield Goal(f"a key press, {LAYERS} layers x {HEADS} heads, median", statistics.median(times), 100, "ms")
        yield Goal("the same, longest", max(times), 100, "ms")
        browser.close()


def large_model() -> TextReading:
    torch.manual_seed(0)
    maps = {}
    for layer in range(LAYERS):
        q, k = torch.randn(1, HEADS, TOKENS, 8), torch.randn(1, HEADS, TOKENS, 8)
        maps[f"layers.{layer}"] = rg.attend(rg.Attention(), q, k, k).weights
    return TextReading.of("A large model", maps, [f"word{n}" for n in range(TOKENS)], model="large")
