"""One color scale in all views of the page: drawn colors equal the formula of the scale for weights of the API."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

import regard as rg
from page_browser import NEEDS_CHROMIUM, address, browser, file, opened, server, settled, texts
from pages import WORDS, painted, until
from ramps import colors_of, contrast, ramp, rgb, shares, variables
from regard.types import TextReading
from regard.viewer import Sheet, write_page

pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]

LENGTH = len(WORDS)
KINDS = {"linear": "Linear", "sqrt": "Square root", "log": "Log"}
#: The steps of the ramp change a channel by up to 2; weights of the page are float32.
NEAR = 4


def close(drawn, expected):
    np.testing.assert_allclose(np.array(drawn, float).reshape(np.shape(expected)), expected, atol=NEAR)


def go(page, address, link):
    """Another view of the open page, drawn."""
    page.goto(f"{address}#{link}")
    painted(page)


#: The pixels of a canvas, read from a copy: Chromium warns of a canvas that is drawn and read again and again.
PIXELS = """(canvas) => { const copy = document.createElement("canvas");
    copy.width = canvas.width; copy.height = canvas.height;
    const pen = copy.getContext("2d", { willReadFrequently: true });
    pen.drawImage(canvas, 0, 0);
    return pen.getImageData(0, 0, copy.width, copy.height); }"""


def thumbnail(page, layer, head, size=LENGTH):
    """The color in the middle of every cell of a small map, and of the gauge below it."""
    until(page, "document.querySelector('.row-maps')?.width > 0")
    drawn = page.evaluate(
        f"""([layer, head, size]) => {{ const button = document.querySelector(
        `.heads [data-place="${{layer}}.${{head}}"]`), canvas = button.parentElement.querySelector(".row-maps");
        const [box, whole] = [button, canvas].map((one) => one.getBoundingClientRect());
        const {{ data, width }} = ({PIXELS})(canvas);
        const pixel = (x, y) => {{ const at = 4 * (Math.floor(y) * width + Math.floor(box.left - whole.left + x));
          return [...data.slice(at, at + 3)]; }};
        const middles = [...Array(size).keys()].map((at) => ((at + 0.5) * box.width) / size);
        return [middles.map((y) => middles.map((x) => pixel(x, y))), pixel(2, box.width + 3)]; }}""",
        [layer, head, size],
    )
    return np.array(drawn[0]), np.array(drawn[1])


def stored(weights):
    """Weights after the bytes of a thumbnail: 0, or the square root in 254 steps, the least above 0."""
    return torch.where(weights > 0, (((254 * weights.sqrt()).round() / 254) ** 2).clamp(min=1e-6), 0.0)


def cells_of_map(page, pairs):
    """The color of the upper left part of some cells; labels of the tokens give the places."""
    return page.evaluate(
        f"(pairs) => {{ const pixels = {PIXELS};"
        """const canvas = document.querySelector(".map-box canvas");
        const nodes = [...document.querySelectorAll(".map-box .labels text:not(.axis-name)")];
        const across = nodes.filter((one) => one.getAttribute("transform"));
        const x = across.map((one) => Number(/translate\\(([\\d.]+)/.exec(one.getAttribute("transform"))[1]));
        const y = nodes.filter((one) => !one.getAttribute("transform")).map((one) => Number(one.getAttribute("y")));
        const ratio = canvas.width / canvas.getBoundingClientRect().width;
        const { data, width } = pixels(canvas);
        return pairs.map(([i, j]) => { const part = 0.3 * (x[1] - x[0]);
          const at = 4 * (Math.floor((y[i] - part) * ratio) * width + Math.floor((x[j] - part) * ratio));
          return [...data.slice(at, at + 3)]; }); }""",
        pairs,
    )


def test_colors_of_every_view_are_those_of_the_weights(browser, address, texts):
    short, pair = texts["short"].maps, texts["pair"].maps[0]
    with opened(browser, address) as page:
        for kind in KINDS:
            go(page, address, f"overview?scale={kind}")
            close(thumbnail(page, 1, 2)[0], colors_of(stored(short[1].dense()[0, 2]), kind, LENGTH))

            go(page, address, f"head?layer=1&head=2&scale={kind}")
            settled(page)
            pairs = [(i, j) for i in range(0, LENGTH, 3) for j in range(LENGTH)]
            close(cells_of_map(page, pairs), colors_of([short[1][0, 2, i, j].item() for i, j in pairs], kind, LENGTH))

            go(page, address, f"head?layer=1&head=2&query=9&side=out&scale={kind}")
            until(page, "document.querySelector('.looks')?.textContent.startsWith('it ')")
            words = page.locator(".words [role=option]").evaluate_all("all => all.map((one) => one.style.background)")
            close([rgb(color) for color in words], colors_of(short[1][0, 2, 9], kind, LENGTH))
            until(page, "document.querySelectorAll('.strip rect').length === 30")
            means = torch.stack([layer[0, :, 9].mean(0) for layer in short])
            fills = page.locator(".strip rect").evaluate_all("all => all.map((one) => one.getAttribute('fill'))")
            close([rgb(color) for color in fills], colors_of(means, kind, LENGTH).reshape(-1, 3))

            go(page, address, f"compare?layer=1&head=2&query=9&other=4&scale={kind}")
            until(page, "document.querySelector('.side .words [role=option]')?.style.background")
            words = page.locator(".side").first.locator(".words [role=option]")
            words = words.evaluate_all("all => all.map((one) => one.style.background)")
            close([rgb(color) for color in words], colors_of(short[1][0, 2, 9], kind, LENGTH))

            go(page, address, f"alignment?text=3&panels=heads&scale={kind}")
            until(page, "document.querySelectorAll('.matrix').length === 2")
            for head in range(2):
                cells = page.locator(".matrix").nth(head).locator("rect:not(.gold, .halo)")
                fills = cells.evaluate_all("all => all.map((one) => one.getAttribute('fill'))")
                close([rgb(color) for color in fills], colors_of(pair[0, head], kind, 5).reshape(-1, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_only_an_exact_zero_has_the_color_of_zero(browser, kind, tmp_path):
    generator = torch.Generator().manual_seed(len(kind))
    q, k = (6 * torch.randn(1, 2, LENGTH, 4, generator=generator) for _ in range(2))
    weights = rg.Attention(mask=rg.causal())(q, k, k).weights
    exact = weights.dense()[0, 1]
    assert ((exact > 0) & (exact < 1e-7)).sum() > 3, "drawn weights below the least step of a byte"
    page_file = write_page(
        tmp_path / "index.html", [Sheet.of(TextReading.of("Small", {"layer.0": weights}, WORDS))]
    ).as_uri()
    zero = variables()["none"]
    with opened(browser, f"{page_file}#overview?scale={kind}") as page:
        small = thumbnail(page, 0, 1)[0]
        assert (((small == zero).all(-1)) == (exact == 0).numpy()).all()
        go(page, page_file, f"head?layer=0&head=1&scale={kind}")
        settled(page)
        pairs = [(i, j) for i in range(1, LENGTH, 2) for j in range(LENGTH)]
        drawn = np.array(cells_of_map(page, pairs))
        assert (((drawn == zero).all(-1)) == np.array([exact[i, j].item() == 0 for i, j in pairs])).all()


def test_the_dark_theme_turns_the_ramp(browser, file, texts):
    row = texts["short"].maps[1][0, 2, 9]
    for scheme in ("dark", "light"):
        with opened(browser, file + "#head?layer=1&head=2&query=9", color_scheme=scheme) as page:
            until(page, "document.querySelector('.looks')?.textContent.startsWith('it ')")
            words = page.locator(".words [role=option]").evaluate_all(
                "all => all.map((one) => [getComputedStyle(one).backgroundColor, getComputedStyle(one).color])"
            )
            close([rgb(back) for back, _ in words], colors_of(row, "sqrt", LENGTH, scheme == "dark"))
            assert min(contrast(rgb(back), rgb(text)) for back, text in words) >= 4.5


def legend(page):
    """The ticks of the legend as (place on the ramp, value), the place of a uniform row, and what is said of it."""
    ticks = page.locator(".scale .legend .tick").evaluate_all("all => all.map((one) => Number(one.getAttribute('x1')))")
    labels = page.locator(".scale .legend text").all_text_contents()
    values = [float(label.replace("−", "-")) for label in labels[1:-1]]
    uniform = page.locator(".scale .legend .uniform").get_attribute("d")
    return np.array(ticks) / 240, values, float(re.search(r"L([\d.]+),0Z", uniform)[1]) / 240, labels[0], labels[-1]


def test_the_legend_is_that_of_the_switch_in_every_view(browser, file):
    views = ["overview", "head", "alignment", "statistics"]
    with opened(browser, file) as page:
        for kind in KINDS:
            page.get_by_role("button", name=KINDS[kind], exact=True).click()
            for view in views:
                go(page, file, f"{view}{'&' if '?' in view else '?'}scale={kind}")
                places, values, uniform, zero, said = legend(page)
                np.testing.assert_allclose(places, shares(values, kind, LENGTH), atol=1e-6)
                assert values[-1] == 1 and zero == "0" and len(values) >= 3
                assert uniform == pytest.approx(float(shares(1 / LENGTH, kind, LENGTH)), abs=1e-4)
                assert said == f"equal weights: 1/{LENGTH} each"
                assert page.locator("[aria-pressed=true]", has_text=KINDS[kind]).count() == 1
        go(page, file, "overview?text=1")
        assert legend(page)[-1] == "equal weights: 1/300 each", (
            "those of the text, as in Text and in a map of single weights"
        )
        page.set_viewport_size({"width": 700, "height": 420})
        go(page, file, "head?text=1")
        level = int(settled(page).get_attribute("data-level"))
        assert level in (1, 2) and legend(page)[-1] == f"equal weights: 1/{300 >> level} each"


def test_the_switch_is_in_the_link_and_survives_a_reload(browser, file):
    with opened(browser, file + "#overview") as page:
        before = thumbnail(page, 0, 0)[0]
        page.get_by_role("button", name="Log", exact=True).click()
        assert "scale=log" in page.url and (thumbnail(page, 0, 0)[0] != before).any()
        page.keyboard.press("2")
        settled(page)
        page.reload()
        settled(page)
        assert (
            "scale=log" in page.url and page.get_by_role("button", name="Log").get_attribute("aria-pressed") == "true"
        )
        page.go_back()
        page.wait_for_selector(".row-maps")
        assert page.get_by_role("button", name="Log").get_attribute("aria-pressed") == "true"


def test_statistics_go_from_their_lowest_to_their_highest_value(browser, file, texts):
    values = np.array(
        [[head["values"]["entropy"] for head in layer["heads"]] for layer in texts["short"].about["layers"]]
    )
    expected = ramp(np.maximum((values - values.min()) / np.ptp(values), 0.004)).reshape(-1, 3)
    with opened(browser, file + "#statistics?color=entropy") as page:
        chart = page.locator("figure", has_text=re.compile(r"Map of .*entropy")).first
        low, high, name = chart.locator(".legend text").all_text_contents()
        assert (float(low), float(high)) == (round(values.min(), 3), round(values.max(), 3)) and "entropy" in name
        cells = chart.locator(".cells").first.locator("rect")
        close([rgb(fill) for fill in cells.evaluate_all("all => all.map((one) => one.getAttribute('fill'))")], expected)
        go(page, file, "overview?color=entropy")
        gauges = [thumbnail(page, layer, head)[1] for layer in range(2) for head in range(3)]
        close(gauges, expected)
