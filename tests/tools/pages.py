"""What tests of the page share: small readings with known weights, a server in a thread, a browser."""

from __future__ import annotations

import shutil
from dataclasses import replace

import torch

import regard as rg
from regard.types import Finding, Role, RoleTable, TextReading

TEXT = "[CLS] the animal did not cross the street because it was too tired . [SEP]"
WORDS = TEXT.split()
#: Texts that would be markup, or cannot be seen.
HOSTILE = ["</script><img src=x onerror=alert(1)>", "<!--", "&amp;", "\u2028", "<!--data-->", '"\\', "]]>", "<b>b</b>"]
UNUSUAL = ["👩‍👩‍👧", "שלום", "مرحبا", "\u200b", "\u202e", "é", "\t", "a\u200bb"]
#: What a browser without a screen is started with.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]


def maps_of(length, heads=3, layers=2, keys=None, mask=None, width=8):
    torch.manual_seed(1)
    found = {}
    for layer in range(layers):
        q = torch.randn(1, heads, length, width) * 2
        k, v = (torch.randn(1, heads, keys or length, width) for _ in range(2))
        found[f"layer.{layer}"] = rg.Attention(mask=mask)(q, k, v).weights
    return found


def reading(tokens=None, title="A text", length=None, **options):
    tokens = [f"t{i}" for i in range(length)] if length else list(tokens or WORDS)
    return TextReading.of(title, maps_of(len(tokens), **options), tokens)


def told(text):
    """Roles on head 1 of layer 1, one of them earned, and a warning about the mask of layer 1."""
    table = [Role("previous", 1, 1, 0.91, 0.88, True, 0.1, 30), Role("next", 1, 1, 0.1, 0.1, False, 0.1, 30)]
    return replace(text, roles=RoleTable(table), masks=[Finding("leak", 1, (0,), 0.5, "L1.H0 attends to the future.")])


def translation(title="Bahdanau"):
    source, target = ["das", "Haus", "ist", "sehr", "klein"], ["the", "house", "is", "tiny"]
    return TextReading.of(title, maps_of(4, keys=5, heads=2, layers=1), source, queries=target)


def served(sheets, asking=10, **options):
    """The address of a server of these texts; a client has `asking` seconds for its request."""
    from benchmarks.page_server import in_thread

    from regard.viewer.server import application

    return in_thread(application(sheets, **options), asking)


def chromium():
    """Where a browser is, or None. The one without windows takes a third of the processor time for a page."""
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


def painted(page):
    """Wait until the page waits for no numbers, and has drawn them."""
    until(page, """!document.querySelector("[data-waiting]:not([data-waiting='0'])")""")
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def idle(page):
    """Wait until the page is painted, and its browser has nothing more to do for it (at most for a second)."""
    painted(page)
    page.evaluate("() => new Promise((done) => requestIdleCallback(done, { timeout: 1000 }))")


def until(page, said, *given):
    """Wait for an expression to hold; asked from outside, as the page itself may evaluate nothing."""
    for _ in range(300):
        if page.evaluate(said, *given):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never came true: {said}")
