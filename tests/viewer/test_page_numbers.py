"""Numbers that the page shows equal those of the API, at drawn places of every view, in a file and from a server."""

from __future__ import annotations

import random
import re

import pytest
import torch

import regard as rg
from page_browser import NEEDS_CHROMIUM, address, browser, file, opened, server, settled, texts, weight
from pages import painted, reading, until
from regard.stats import contact_maps
from regard.types import TextReading
from regard.viewer import Sheet, write_page

pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]

#: The texts of `page_browser.texts`, by their number in the page.
SHORT, LONG, PAIR = 0, 1, 3
NUMBER = r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?"


@pytest.fixture(scope="module")
def drawn():
    return random.Random(20)


def dense(texts, name):
    """The weights (layers, H, I, J) of a text, by the API."""
    return torch.stack([weights.dense()[0] for weights in texts[name].maps])


def entropies(weights):
    """The entropy of every row, by its definition."""
    return -torch.xlogy(weights, weights).sum(-1)


def numbers_in(text):
    return [float(found) for found in re.findall(NUMBER, text.replace("−", "-"))]


def test_the_overview_shows_the_statistic_of_each_head(browser, address, texts, drawn):
    expected = entropies(dense(texts, "short")).mean(-1)
    with opened(browser, f"{address}#overview?color=entropy") as page:
        page.wait_for_selector("[data-place]")
        for layer, head in {(drawn.randrange(2), drawn.randrange(3)) for _ in range(4)}:
            label = page.locator(f"[data-place='{layer}.{head}']").get_attribute("aria-label")
            said = float(re.search(rf"entropy\)? ({NUMBER})", label)[1])
            assert said == pytest.approx(float(expected[layer, head]), abs=6e-4), label


def test_the_map_shows_pooled_cells_and_single_weights(browser, address, texts, drawn):
    weights = dense(texts, "long")[0]
    with opened(browser, f"{address}#head?text={LONG}", width=700, height=420) as page:
        for pool in ("mean", "max"):
            head, i, j = drawn.randrange(3), drawn.randrange(300), drawn.randrange(300)
            link = f"#head?text={LONG}&head={head}&query={i}&key={j}&pool={pool}"
            page.goto(address + link)
            page.wait_for_selector('[data-level]:not([data-level="0"])')  # before its layout the map has no room
            size = 2 ** int(settled(page).get_attribute("data-level"))
            part = weights[head][i // size * size :, j // size * size :][:size, :size]
            expected = part.amax() if pool == "max" else part.sum(-1).mean()
            assert size > 1 and weight(page) == pytest.approx(float(expected), rel=2e-3, abs=2e-5)
            page.goto(f"{address}{link}&x={j + 0.5}&y={i + 0.5}&zoom=5.5")
            until(page, "document.querySelector('.map-box').dataset.level === '0'")
            settled(page)
            assert weight(page) == pytest.approx(float(weights[head, i, j]), rel=2e-5)


def test_the_words_and_their_layers_show_rows(browser, address, texts, drawn):
    weights = dense(texts, "short")
    layer, head, query = drawn.randrange(2), drawn.randrange(3), drawn.randrange(15)
    with opened(browser, f"{address}#head?layer={layer}&head={head}&query={query}") as page:
        row, column = weights[layer, head, query], weights[layer, head, :, query]
        until(page, "document.querySelector('.looks').textContent.includes('receives attention')")
        looks, receives = page.locator(".looks").inner_text().split("receives attention from")
        shown = numbers_in(looks.split("attends to")[1])
        assert shown == pytest.approx(row.topk(len(shown)).values.tolist(), abs=6e-4) and shown
        shown = numbers_in(re.split(r"mean over|, in ", receives)[0])
        assert shown == pytest.approx(column.topk(len(shown)).values.tolist(), abs=6e-4) and shown
        until(page, "document.querySelectorAll('.strip rect').length === 30")
        cells = page.locator(".strip rect title").all_text_contents()
        for at in drawn.sample(range(30), 8):
            expected = weights[at // 15, :, query, at % 15].mean()
            assert numbers_in(cells[at])[-1] == pytest.approx(float(expected), abs=1e-3)


def test_the_lines_of_a_head_are_its_weights(browser, address, texts, drawn):
    layer, head, query = drawn.randrange(2), drawn.randrange(3), drawn.randrange(15)
    weights = dense(texts, "short")[layer, head]
    with opened(browser, f"{address}#head?layer={layer}&head={head}&query={query}&way=lines") as page:
        until(page, f"document.querySelectorAll('.lines line').length === {int((weights >= 0.03).sum())}")
        widths = page.locator(f".lines line[data-query='{query}']").evaluate_all(
            "lines => lines.map((line) => Number(line.getAttribute('stroke-width')))"
        )
        row = weights[query][weights[query] >= 0.03]
        assert widths == pytest.approx((0.6 + 2.6 * row).tolist(), rel=1e-4)


def test_neurons_show_the_weight_and_the_score(browser, address, texts, drawn):
    layer, head, query = drawn.randrange(2), drawn.randrange(3), drawn.randrange(15)
    seen = texts["short"].maps[layer]
    with opened(browser, f"{address}#head?layer={layer}&head={head}&query={query}&why=yes") as page:
        page.wait_for_selector(".neurons")
        said = page.locator(".neurons text").all_text_contents()
        best = seen.dense()[0, head, query].topk(14)
        scores = seen._prepared.query[0, head, query] @ seen._prepared.key[0, head].mT * 8**-0.5
        weights = [text for text in said if text.startswith("weight")]
        shown = [0.0 if "<" in text else numbers_in(text)[0] for text in weights]
        assert shown == pytest.approx(best.values.tolist(), abs=6e-4)
        shown = [numbers_in(text)[0] for text in said if text.startswith("score")]
        assert shown == pytest.approx(scores[best.indices].tolist(), abs=6e-3)


def test_the_alignment_shows_means_of_heads_and_single_heads(browser, address, texts, drawn):
    weights = dense(texts, "pair")[0]
    with opened(browser, f"{address}#alignment?text={PAIR}") as page:
        until(page, "document.querySelectorAll('.matrix rect title').length === 20")
        cells = page.locator(".matrix rect title").all_text_contents()
        for at in drawn.sample(range(20), 6):
            expected = weights.mean(0)[at // 5, at % 5]
            assert numbers_in(cells[at])[-1] == pytest.approx(float(expected), abs=1e-3)
        page.goto(f"{address}#alignment?text={PAIR}&panels=heads")
        until(page, "document.querySelectorAll('.matrix rect title').length === 40")
        cells = page.locator(".matrix rect title").all_text_contents()
        for at in drawn.sample(range(40), 6):
            expected = weights[at // 20, at % 20 // 5, at % 5]
            assert numbers_in(cells[at])[-1] == pytest.approx(float(expected), abs=1e-3)


def table(page, title):
    """The numbers below a chart, with the digits of their tooltips: {column: values}."""
    figure = page.locator("figure", has_text=title).first
    figure.locator("summary").focus()
    page.keyboard.press("Enter")
    figure.locator("tbody tr").first.wait_for()
    names = figure.locator("thead th").all_inner_texts()
    rows = figure.locator("tbody tr").evaluate_all(
        "rows => rows.map((row) => [...row.cells].map((one) => one.title || one.innerText))"
    )
    return {name: [row[at] for row in rows] for at, name in enumerate(names)}


def test_statistics_show_what_the_api_computes(browser, address, texts, drawn):
    weights, (layer, head) = dense(texts, "short"), (drawn.randrange(2), drawn.randrange(3))
    with opened(browser, f"{address}#statistics?layer={layer}&head={head}") as page:
        shown = table(page, re.compile("Map of .*entropy"))
        assert shown["head"] == [f"L{layer}.H{head}" for layer in range(2) for head in range(3)]
        expected = entropies(weights).mean(-1).flatten()
        assert list(map(float, shown[next(name for name in shown if "entropy" in name)])) == pytest.approx(
            expected.tolist(), rel=6e-4
        )
        shown, mine = table(page, "Relative offsets"), weights[layer, head]
        expected = [float(mine.diagonal(int(by)).sum() / 15) for by in shown["offset"]]
        assert list(map(float, shown["weight"])) == pytest.approx(expected, rel=1e-3, abs=1e-6)
        shown = table(page, "Weight received")
        assert list(map(float, shown["weight received"])) == pytest.approx(mine.sum(0).tolist(), rel=1e-3)
        shown, flat = table(page, "Similarity of heads"), weights[layer].flatten(1)
        expected = torch.nn.functional.cosine_similarity(flat[:, None], flat[None], dim=-1).flatten().tolist()
        assert list(map(float, shown["cosine"])) == pytest.approx(expected, abs=1e-3)


def test_a_protein_has_the_contact_map_of_the_api(browser, tmp_path):
    chain = "MKTAYIAKQRQISFVKSH"
    protein = Sheet.of(reading(["<cls>", *chain, "<eos>"], title="Protein"))
    file = write_page(tmp_path / "protein.html", [protein, Sheet.of(reading(title="Short"))]).as_uri()
    special = protein.about["special"]
    assert special == [0, 19]
    contacts = contact_maps(protein.maps[1], special=special)[2]
    i, j = torch.triu_indices(18, 18, 6)
    best = contacts[i, j].argsort(descending=True)[:20]
    with opened(browser, f"{file}#statistics?layer=1&head=2") as page:
        page.wait_for_selector(".contacts figcaption")
        shown = table(page, "Contact map")
        assert shown["residues"] == [f"{chain[i[at]]}{i[at] + 1}, {chain[j[at]]}{j[at] + 1}" for at in best]
        assert list(map(float, shown["contact"])) == pytest.approx(contacts[i, j][best].tolist(), rel=1e-3, abs=1e-5)
        page.goto(f"{file}#statistics?text=1")
        until(page, "document.querySelector('.charts')?.dataset.waiting === '0'")
        assert page.locator(".contacts").count() == 0, "words are no residues"


def test_heads_are_chosen_from_the_numbers_of_a_chart_by_keyboard(browser, file):
    with opened(browser, f"{file}#statistics") as page:
        figure = page.locator("figure", has_text=re.compile("Map of .*entropy")).first
        figure.locator("summary").focus()
        page.keyboard.press("Enter")
        figure.locator("tbody tr").first.wait_for()
        for _ in range(9):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.textContent") == "L1.H2":
                break
        page.keyboard.press("Enter")
        until(page, "location.hash.includes('layer=1') && location.hash.includes('head=2')")


#: What a canvas writes after a change of the page, by its position in the list of calls.
WRITTEN = """() => { window.written = []; const of = CanvasRenderingContext2D.prototype, before = of.fillText;
    of.fillText = function (...all) { window.written.push(all); return before.apply(this, all); } }"""


def in_cell(weight):
    """A weight in a cell of the map, as on paper: two digits without the zero, nothing where they would be 0."""
    return "" if weight < 0.005 else "1" if weight >= 0.995 else f"{weight:.2f}"[1:]


def test_a_head_has_one_share_of_the_previous_token_and_one_strongest_link(browser, tmp_path):
    """Once 0.937 and 100 % stood on one screen: over all words, and over those that have a previous one."""
    n = 16
    rows = 20 * torch.eye(n).roll(1, 0)[None, None]
    text = TextReading.of(
        "One",
        {"layers.0": rg.Attention(rg.Dot(scale=1.0))(rows, torch.eye(n)[None, None], rows).weights},
        [f"word{at}" for at in range(n)],
    )
    dense = text.maps["layers.0"].dense()[0, 0]
    share = float(dense.diagonal(-1)[1:].mean())
    i, j = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    far = dense.where(((i - j).abs() > 1) & (j > 0), torch.zeros(()))
    query, key = divmod(int(far.argmax()), n)
    file = write_page(tmp_path / "one.html", [Sheet.of(text)]).as_uri()
    with opened(browser, f"{file}#overview") as page:
        page.wait_for_selector(".about")
        assert re.findall(r"\d\.\d+|\d+ %", page.locator(".card-previous").inner_text()) == [f"{share:.3f}"]
        row = page.locator(".about tr", has_text="(previous)").locator("td")
        assert float(row.inner_text()) == pytest.approx(share, abs=6e-4)
        link = f"“word{query}” → “word{key}” {shown(float(far.max()))}."
        assert link in page.locator(".about").inner_text()
        page.goto(f"{file}#head")
        settled(page)
        assert link in page.locator(".about-map").inner_text()
        page.goto(f"{file}#statistics?table=head")
        page.wait_for_selector(".charts-table tbody tr")
        assert shown(share) in page.locator(".charts-table tbody tr").first.inner_text().split()


def shown(weight):
    return "<0.001" if weight < 0.0005 else f"{weight:.3f}"


@pytest.mark.parametrize("width", [1440, 768])
def test_cells_of_a_map_have_numbers_and_masked_cells_none(browser, tmp_path, width):
    text = reading(length=16, mask=rg.causal())
    file = write_page(tmp_path / "causal.html", [Sheet.of(text)]).as_uri()
    expected = [in_cell(weight) for weight in text.maps["layer.0"].dense()[0, 1].flatten().tolist()]
    with opened(browser, f"{file}#head?layer=0&head=0", width=width) as page:
        settled(page)
        page.evaluate(WRITTEN)
        page.keyboard.press("]")
        settled(page)
        painted(page)
        page.evaluate("window.written = []")
        page.keyboard.press("ArrowDown")
        until(page, "window.written.length > 0")
        painted(page)
        written = page.evaluate("window.written.map(([text]) => text)")
        assert written[-256:] == expected and expected.count("") >= 120


TINY = "[...document.querySelectorAll('.view *')].flatMap((one) => [...one.childNodes]"
TINY += ".filter((each) => each.nodeType === 3).map((each) => each.data)).filter((text) => /\\de[-+−]\\d/.test(text))"


def test_no_number_is_written_with_an_exponent(browser, tmp_path):
    """A head with weights near 6e-9: readers of a page are no programs."""
    q, k = 20 * torch.eye(12)[None, None], torch.eye(12)[None, None]
    x = TextReading.of(
        "Sharp", {"layers.0": rg.Attention(rg.Dot(scale=1.0))(q, k, k).weights}, [f"t{n}" for n in range(12)]
    )
    file = write_page(tmp_path / "sharp.html", [Sheet.of(x)]).as_uri()
    views = ["overview", "head?query=3&key=8", "head?way=lines&query=3&key=8", "head?why=yes"]
    with opened(browser, file) as page:
        for view in [
            *views,
            "statistics",
            "statistics?table=head&find=t3",
            "compare?pair=heads&pins=0.0.0&query=3&key=8",
        ]:
            page.goto(f"{file}#{view}")
            painted(page)
            page.locator("summary").evaluate_all("all => all.forEach((one) => { one.parentElement.open = true; })")
            painted(page)
            assert page.evaluate(TINY) == [], view
        page.goto(f"{file}#head?query=3&key=8")
        settled(page)
        assert page.locator(".readout .weight").inner_text() == "<0.001"
        assert weight(page) == pytest.approx(float(x.maps["layers.0"].dense()[0, 0, 3, 8]), rel=2e-5)


#: The rectangles of crosses that a canvas draws from now on.
FRAMED = """() => { window.framed = []; const of = CanvasRenderingContext2D.prototype, before = of.strokeRect;
    of.strokeRect = function (...all) { window.framed.push(all); return before.apply(this, all); } }"""
CHOSEN = "Number(document.querySelector('.head-words [aria-selected=true]').dataset.at)"


def test_words_and_map_of_a_head_are_linked(browser, address, texts):
    """A word that is pointed at frames its row, and a cell that is pointed at colors the words with its row."""
    weights = texts["short"].maps[1].dense()[0, 2]
    with opened(browser, f"{address}#head?layer=1&head=2&query=9", width=1440) as page:
        settled(page)
        words = page.locator(".head-words [role=option]")
        assert words.count() == 15 and words.nth(9).get_attribute("aria-selected") == "true"
        top, map_top = (page.locator(each).bounding_box() for each in (".head-words", ".map-box"))
        assert top["y"] + top["height"] <= map_top["y"] and map_top["y"] + map_top["height"] <= 900
        page.evaluate(FRAMED)
        words.nth(4).hover()
        tall = (
            "(() => { const tall = window.framed.map(([, y]) => y); return Math.min(...tall) < Math.max(...tall); })()"
        )
        until(page, f"window.framed.length > 0 && {tall}")
        until(page, f"{CHOSEN} === 4")
        left, top, _, cell = page.evaluate("window.framed.at(-2)")  # the last one is the border of the map
        box = page.locator(".map-box canvas").bounding_box()
        page.mouse.move(box["x"] + left + 6.5 * cell, box["y"] + top + 7.5 * cell)
        until(page, f"{CHOSEN} === 11 && Number(document.querySelector('.key-pointed')?.dataset.at) === 6")
        tones = words.evaluate_all(
            "all => all.map((one) => getComputedStyle(one).backgroundColor.match(/\\d+/g).map(Number))"
        )
        dark = [sum(tone) for tone in tones]
        assert dark.index(min(dark)) == int(weights[11].argmax()), "the darkest word has the largest weight of the row"
        page.mouse.move(5, 5)
        until(page, f"{CHOSEN} === 9")
