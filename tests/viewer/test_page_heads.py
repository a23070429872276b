"""Working with heads in the page: tiles, the head and the model view, the strip, pins, and the table of heads."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from page_browser import NEEDS_CHROMIUM, address, all_digits, browser, file, opened, server, settled, texts
from pages import WORDS, idle, painted, reading, told, until
from regard.types import RoleTable
from regard.viewer import Sheet, write_page

pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]
CHOSEN = [(0, 1), (1, 2)]  # layer, head
CHOSEN_TILES = "[...document.querySelectorAll('.head-tile[aria-pressed=true], .picked')]"
LINES_DRAWN = """all => all.map((one) => [one.getAttribute('stroke'), one.dataset.query, one.dataset.key,
    +one.getAttribute('stroke-width')])"""
#: How many lines the paths of a head of the model view have.
PATHS_DRAWN = """place => [...document.querySelectorAll(`.cell[data-place='${place}'] path`)]
    .reduce((count, one) => count + one.getAttribute('d').split('M').length - 1, 0)"""


def mean_of(sheet, heads):
    return torch.stack([sheet.maps[layer].dense()[0, head] for layer, head in heads]).mean(0)


def pair_weight(page):
    until(page, "document.querySelector('.chosen-pair .weight') !== null")
    return all_digits(page.locator(".chosen-pair .weight"))


def away(page):
    page.mouse.move(2, 2)


def test_toggled_heads_are_the_mean_of_the_api(browser, address, texts):
    sheet = texts["short"]
    with opened(browser, address + "#head?layer=0&head=1&query=9&key=3&heads=0.1,1.2") as page:
        assert pair_weight(page) == pytest.approx(float(mean_of(sheet, CHOSEN)[9, 3]), rel=2e-5)
        tiles = page.locator(".head-tile")
        assert tiles.count() == 3 and page.locator(".picked").inner_text().startswith("L1.H2")
        tiles.nth(0).click()
        away(page)
        until(page, "document.querySelector('.chosen-pair').textContent.includes('L0.H0')")
        more = [*CHOSEN, (0, 0)]
        assert pair_weight(page) == pytest.approx(float(mean_of(sheet, more)[9, 3]), rel=2e-5)
        colors = page.evaluate(f"{CHOSEN_TILES}.map((one) => one.style.getPropertyValue('--own'))")
        assert len(set(colors)) == 3, "each chosen head has a color of its own"
        page.reload()
        page.wait_for_selector(".chosen-pair .weight")
        assert pair_weight(page) == pytest.approx(float(mean_of(sheet, more)[9, 3]), rel=2e-5)
        tiles.nth(2).hover()
        until(page, "document.querySelector('.looks').textContent.endsWith('in layer 0, head 2.')")
        row = sheet.maps[0][0, 2, 9]
        best = int(row.argmax())
        assert f"attends to {WORDS[best]} {float(row[best]):.3f}" in page.locator(".looks").inner_text()
        away(page)
        page.locator(".head-words .words").focus()
        page.keyboard.press("Shift+ArrowRight")
        until(page, "document.querySelector('.chosen-pair').textContent.includes(' 4: ')")
        assert pair_weight(page) == pytest.approx(float(mean_of(sheet, more)[9, 4]), rel=2e-5)


def test_a_tile_that_is_drawn_below_a_resting_pointer_is_not_pointed_at(browser, file):
    """In the first step of the tour the pointer rested where a tile came to be, and the words were of its head."""
    with opened(browser, f"{file}#head?layer=1&head=0&query=9") as page:
        until(page, "document.querySelector('.looks')?.textContent.endsWith('in layer 1, head 0.')")
        box = page.locator(".head-tile").nth(2).bounding_box()
        page.keyboard.press("1")
        page.wait_for_selector(".lead-words")
        page.mouse.move(box["x"] + 10, box["y"] + 10)
        page.keyboard.press("2")
        until(page, "document.querySelector('.looks')?.textContent.includes('attends to')")
        painted(page)
        page.wait_for_timeout(200)
        assert page.locator(".looks").inner_text().endswith("in layer 1, head 0.")
        page.mouse.move(box["x"] + 12, box["y"] + 12)
        until(page, "document.querySelector('.looks').textContent.endsWith('in layer 1, head 2.')")


def test_a_click_on_a_tile_goes_to_its_head_and_among_several_chooses_it(browser, address):
    with opened(browser, address + "#head?layer=0&head=1&query=9") as page:
        tiles, title = page.locator(".head-tile"), page.locator("h1 b")
        pressed = f"{CHOSEN_TILES}.map((one) => one.dataset.place ?? one.textContent).join()"
        tiles.nth(2).click()
        assert title.inner_text() == "Layer 0, head 2" and page.evaluate(pressed) == "0.2"
        tiles.nth(0).click(modifiers=["Shift"])
        assert title.inner_text() == "Layer 0, head 0" and page.evaluate(pressed) == "0.0,0.2"
        tiles.nth(1).click()
        assert page.evaluate(pressed) == "0.0,0.1,0.2" and "heads=0.2%2C0.0%2C0.1" in page.url
        tiles.nth(1).click()
        assert page.evaluate(pressed) == "0.0,0.2"
        page.get_by_label("Heads", exact=True).select_option("one")
        page.get_by_label("Heads", exact=True).select_option("set")  # by touch there is no Shift
        tiles.nth(0).click()
        assert page.evaluate(pressed) == "0.0,0.1" and page.locator(".head-map").is_visible()


def test_old_links_of_heads_name_heads_of_their_layer(browser, file, texts):
    with opened(browser, file + "#head?layer=1&head=0&query=9&key=3&heads=0,2") as page:
        expected = mean_of(texts["short"], [(1, 0), (1, 2)])[9, 3]
        assert pair_weight(page) == pytest.approx(float(expected), rel=2e-5)


def test_the_head_view_draws_each_chosen_head_in_its_color(browser, address, texts):
    maps = [texts["short"].maps[layer].dense()[0, head] for layer, head in CHOSEN]
    counts = sorted(int((weights >= 0.03).sum()) for weights in maps)
    with opened(browser, address + "#head?way=lines&heads=0.1,1.2") as page:
        until(page, f"document.querySelectorAll('.lines line').length === {sum(counts)}")
        lines = page.locator(".lines line").evaluate_all(LINES_DRAWN)
        colors = sorted({color for color, *_ in lines})
        assert sorted(sum(line[0] == color for line in lines) for color in colors) == counts
        for color in colors:
            drawn = {(int(i), int(j)): width for one, i, j, width in lines if one == color}
            weights = next(
                w for w in maps if int((w >= 0.03).sum()) == len(drawn) and all(w[at] >= 0.03 for at in drawn)
            )
            assert all(width == pytest.approx(0.6 + 2.6 * float(weights[at]), rel=1e-4) for at, width in drawn.items())


def test_the_model_view_draws_the_weights_of_every_head(browser, address, texts):
    with opened(browser, address + "#overview?grid=lines&layer=0&head=0", color_scheme="light") as page:
        for layer, weights in enumerate(texts["short"].maps):
            for head, values in enumerate(weights.dense()[0]):
                cell = f".cell[data-place='{layer}.{head}']"
                count = int((values >= 0.04).sum())
                until(page, f"place => ({PATHS_DRAWN})(place) === {count}", f"{layer}.{head}")
                page.locator(cell).hover()
                said = page.locator(".model-readout").inner_text()
                assert said.startswith(f"Layer {layer}, head {head}") and f"{float(values.max()):.3f}" in said
        ground = "getComputedStyle(document.querySelector('.model-ground')).backgroundColor"
        assert page.evaluate(ground) == "rgb(13, 17, 21)", "dark in either theme"
        page.locator(".cell[data-place='1.1']").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Space")
        until(page, "location.hash.includes('1.2')")
        page.keyboard.press("Enter")
        page.wait_for_selector(".lines")
        assert page.locator("h1").inner_text().startswith("Layer 1, head 2")


OUTSIDE = """() => { const box = document.querySelector('.arcs').getBoundingClientRect();
    return [...document.querySelectorAll('.arcs path')].filter((one) => { const b = one.getBBox();
        const w = Number(one.getAttribute('stroke-width')) / 2;
        return b.x - w < 0 || b.y - w < 0 || b.x + b.width + w > box.width || b.y + b.height + w > box.height;
    }).length; }"""


#: Points of arcs that are drawn over a word.
OVER_WORDS = """() => { document.querySelectorAll('.arcs').forEach((one) => { one.style.pointerEvents = 'auto'; });
    return [...document.querySelectorAll('.arcs path')].flatMap((path) => {
        path.style.pointerEvents = 'stroke';
        const box = path.ownerSVGElement.getBoundingClientRect();
        const points = Array.from({length: 40}, (_, at) => path.getPointAtLength(path.getTotalLength() * at / 39));
        return points.filter(({x, y}) => document.elementsFromPoint(box.x + x, box.y + y).some((one, at, all) =>
            one.closest('.words span') && all.slice(0, at).some((above) => above === path)));
    }).length; }"""


def test_arcs_of_a_wrapped_text_pass_between_its_lines_and_behind_its_words(browser, file):
    with opened(browser, file, width=390) as page:
        for link in ("text=0&query=9", "text=0&side=in&query=0", "text=3&query=1"):
            page.goto(f"{file}#head?{link}")
            until(page, "document.querySelectorAll('.arcs path').length > 0")
            page.locator(".arcs").scroll_into_view_if_needed()
            assert page.evaluate(OVER_WORDS) == 0, link


@pytest.mark.parametrize("width", [1440, 768, 390])
def test_no_arc_leaves_its_box(browser, file, width):
    links = ["text=0&side=in&query=9", "text=0&query=0", "text=1&query=299&heads=layer", "text=3&query=1"]
    with opened(browser, file, width=width) as page:
        for link in links:
            page.goto(f"{file}#head?{link}")
            until(page, "document.querySelectorAll('.arcs path').length > 0")
            assert page.evaluate(OUTSIDE) == 0, link
            page.evaluate("document.querySelector('.words').scrollTop = 150")
            painted(page)
            assert page.evaluate(OUTSIDE) == 0, f"{link}, scrolled"


def numbers(page):
    return [all_digits(one) for one in page.locator(".pin-readout output").all()]


def test_pins_show_two_heads_and_their_difference(browser, address, texts):
    a, b = (texts["short"].maps[layer].dense()[0, head] for layer, head in CHOSEN)
    with opened(browser, address + "#head?layer=0&head=1&query=9&key=3") as page:
        settled(page)
        page.keyboard.press("p")
        page.keyboard.press("]")
        page.locator(".head-tile").nth(0).click()
        page.goto(address + "#pins?pins=0.0.1,0.1.2&query=9&key=3")
        for _ in range(2):
            page.wait_for_selector(".pin-readout output")
            assert numbers(page) == pytest.approx([float(a[9, 3]), float(b[9, 3]), float(a[9, 3] - b[9, 3])], rel=1e-4)
            assert "#compare?" in page.url and "pair=heads" in page.url, "an address of an earlier page leads here"
            page.reload()
        page.wait_for_selector(".pin-readout output")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowUp")
        until(page, "document.querySelector('.pin-readout').textContent.includes(' 8 → ')")
        assert numbers(page) == pytest.approx([float(a[8, 4]), float(b[8, 4]), float(a[8, 4] - b[8, 4])], rel=1e-4)
        moved = float((a - b).abs().sum(-1).mean() / 2)
        assert float(page.locator(".moved output").inner_text().split()[0]) == pytest.approx(moved, abs=6e-4)
        assert page.locator(".pin-key svg").count() >= 1 and page.locator(".pin-key .legend").count() == 1
        bounds = page.locator(".pin-map").nth(2).bounding_box()
        page.mouse.move(bounds["x"] + bounds["width"] * 0.8, bounds["y"] + bounds["height"] * 0.8)
        said = re.search(r" (\d+) → .* (\d+): ", page.locator(".pin-readout").inner_text())
        i, j = int(said[1]), int(said[2])
        assert numbers(page)[2] == pytest.approx(float(a[i, j] - b[i, j]), rel=1e-4, abs=1e-6)
        changes = (a[8] - b[8]).abs()
        first = page.locator(".changes tbody td").nth(2).inner_text().replace("−", "-")
        assert float(first) == pytest.approx(float((a[8] - b[8])[changes.argmax()]), abs=6e-4)


def test_pins_of_a_long_text_are_cells_until_a_click(browser, address, texts):
    a, b = texts["long"].maps[0].dense()[0, :2]
    pooled = [weights[248:256].sum(0)[96:104].sum() / 8 for weights in (a, b)]
    with opened(browser, address + "#compare?pair=heads&text=1&pins=1.0.0,1.0.1&query=250&key=100") as page:
        page.wait_for_selector(".pin-readout output")
        assert numbers(page)[:2] == pytest.approx([float(value) for value in pooled], rel=3e-3)
        page.get_by_role("button", name="Show 48 words").click()
        until(page, "!document.querySelector('.pin-readout').textContent.includes('cells of')")
        assert numbers(page)[2] == pytest.approx(float(a[250, 100] - b[250, 100]), rel=1e-4, abs=1e-6)


def test_pins_of_two_texts_have_a_difference_if_they_are_as_long(browser, file, texts):
    a, b = texts["short"].maps[0][0, 1, 9, 3], texts["curves"].maps[1][0, 2, 9, 3]
    with opened(browser, file + "#compare?pair=heads&pins=0.0.1,4.1.2&query=9&key=3") as page:
        page.wait_for_selector(".pin-readout output")
        assert numbers(page) == pytest.approx([float(a), float(b), float(a - b)], rel=1e-4)
        assert page.locator(".pin-key .legend").count() == 1
        page.goto(file + "#compare?pair=heads&pins=0.0.1,0.0.1&query=9&key=3")
        until(page, "document.querySelector('.pin-key')?.textContent.includes('every difference is 0')")
        assert page.locator(".pin-key .legend").count() == 0
        page.goto(file + "#compare?pair=heads&pins=0.0.1,1.0.1&query=9&key=3")
        page.wait_for_selector(".no-difference")
        assert page.locator(".pin-map").count() == 2 and len(numbers(page)) == 2
        assert page.locator(".no-difference").inner_text() == (
            "The difference cannot be drawn: the texts have different numbers of words."
        )


def test_each_number_of_a_pin_has_the_words_of_its_own_text(browser, texts, tmp_path):
    other = Sheet.of(reading([f"w{at}" for at in range(len(WORDS))], title="Other words"))
    fewer = Sheet.of(reading(["one", "two", "three", "four"], title="Four words"))
    page_file = write_page(tmp_path / "index.html", [texts["short"], other, fewer]).as_uri()
    a, b = float(texts["short"].maps[0][0, 1, 9, 3]), float(other.maps[1][0, 2, 9, 3])
    with opened(browser, page_file + "#compare?pair=heads&pins=0.0.1,1.1.2&query=9&key=3") as page:
        page.wait_for_selector(".pin-readout output")
        said = page.locator(".pin-readout").inner_text()
        assert re.sub(r"-?[\d.]+(e-\d+)?(?=,|$)", "#", said) == "A it 9 → did 3: #, B w9 9 → w3 3: #, A − B #"
        assert numbers(page) == pytest.approx([a, b, a - b], rel=1e-4)
        assert page.locator(".changes th[scope=row]").first.inner_text().split(" | ")[1].startswith("w")
        page.goto(page_file + "#compare?pair=heads&pins=0.0.1,2.1.2&query=9&key=3")
        page.wait_for_selector(".no-difference")
        said = page.locator(".pin-readout").inner_text()
        assert said.startswith("A it 9 → did 3: ") and said.endswith(", B – 9 → four 3: no such words")
        assert numbers(page) == pytest.approx([a], rel=1e-4)


def test_the_tiles_and_the_words_on_the_axes_of_the_map(browser, file):
    with opened(browser, file + "#head?layer=1&head=0") as page:
        settled(page)
        labels = page.locator(".labels text").all_text_contents()
        assert sum(label.startswith("the (1)") for label in labels) == sum("the (2)" in label for label in labels) == 2
        assert any("← attends" in label for label in labels) and any("is attended to →" in label for label in labels)
        strip = page.locator(".head-tile")
        assert strip.count() == 3
        strip.nth(2).click()
        assert page.locator("h1 b").inner_text() == "Layer 1, head 2"
        page.keyboard.press("ArrowUp")
        assert page.locator("h1 b").inner_text() == "Layer 1, head 1"
        assert page.locator(".head-tile[aria-pressed=true]").get_attribute("data-place") == "1.1"
        page.get_by_label("Jump to a token").fill("the (2)")
        page.keyboard.press("Enter")
        until(page, f"location.hash.includes('query={[at for at, word in enumerate(WORDS) if word == 'the'][1]}')")


def places(page):
    return page.locator(".head-table tbody tr").evaluate_all("all => all.map((one) => one.dataset.place)")


def test_the_table_sorts_by_every_column_and_finds_roles_and_words(browser, address, texts):
    sheet = texts["short"]
    with opened(browser, address + "#statistics?table=-entropy") as page:
        until(page, "document.querySelectorAll('.head-table tbody tr').length === 6")
        values = {
            f"{at}.{head}": one["values"]
            for at, layer in enumerate(sheet.about["layers"])
            for head, one in enumerate(layer["heads"])
        }
        for name in values["0.0"]:
            page.locator(f".head-table [data-column='{name}']").click()
            shown = [values[place][name] for place in places(page)]
            assert shown == sorted(shown, reverse="↓" in page.locator("[data-sorted=true]").inner_text()), name
        page.get_by_label("Search for a role").fill("no such word")
        until(page, "document.querySelectorAll('.head-table tbody tr').length === 0")
        page.get_by_label("Search for a role").fill("prev")
        until(page, "document.querySelectorAll('.head-table tbody tr').length === 1")
        assert places(page) == ["1.1"] and "previous 0.91" in page.locator(".head-table tbody").inner_text()
        page.get_by_label("Search for a role").fill("it")
        until(page, "document.querySelectorAll('.head-table tbody tr').length === 6")
        until(page, "document.querySelector('.head-table thead').textContent.includes('“it” attends to')")
        expected = told(reading(title="Short")).notable(9, 6)
        assert places(page) == [f"{link.layer}.{link.head}" for link in expected]
        said = page.locator(".head-table tbody tr td:nth-child(3)").all_inner_texts()
        assert [float(each.split()[-1]) for each in said] == pytest.approx(
            [link.link.weight for link in expected], abs=6e-4
        )
        page.reload()
        until(page, "document.querySelectorAll('.head-table tbody tr').length === 6")
        page.locator(".head-table tbody button").nth(0).press("Enter")
        page.wait_for_selector(".chosen-pair .weight")
        best = expected[0]
        assert page.locator("h1 b").inner_text() == f"Layer {best.layer}, head {best.head}"
        assert pair_weight(page) == pytest.approx(best.link.weight, rel=2e-5)


def test_roles_of_a_sample_say_so(browser, tmp_path):
    text = told(reading(title="Sampled"))
    for roles in ([], text.roles.roles):
        sampled = replace(text, roles=RoleTable(roles, sampled=(4096, 32768)))
        path = write_page(tmp_path / "index.html", [sampled]).as_uri()
        with opened(browser, path + "#overview") as page:
            until(page, "document.body.innerText.includes('means over 4096 of 32768 queries, drawn at random')")


def test_all_heads_of_a_long_text_do_not_freeze_the_page(browser, tmp_path):
    sheet = Sheet.of(reading(title="440", length=440, layers=6, heads=4, width=32))
    path = write_page(tmp_path / "index.html", [sheet]).as_uri()
    with opened(browser, path + "#overview") as page:
        page.evaluate(
            "() => { window.longest = 0; new PerformanceObserver((list) => { for (const one of list.getEntries())"
            " window.longest = Math.max(window.longest, one.duration); }).observe({ type: 'longtask' }); }"
        )
        for link, kind in (
            ("head?way=lines&heads=all", ".lines text"),
            ("overview?grid=lines", "path"),
            ("head?heads=all", ".words span"),
        ):
            page.goto(f"{path}#{link}")
            until(page, f"document.querySelectorAll('.view {kind}').length > 20")
            idle(page)
        loop = page.evaluate(
            "() => { const began = performance.now(); let x = 0;"
            " for (let i = 0; i < 2e7; i++) x += Math.sqrt(i); return performance.now() - began; }"
        )
        assert page.evaluate("window.longest") < 200 * max(1, loop / 40), "200 ms on a machine at rest"


LINE_BESIDE_MAP = """() => {
  const canvas = document.querySelector(".map-box canvas");
  const copy = Object.assign(document.createElement("canvas"), { width: canvas.width, height: 1 });
  const pen = copy.getContext("2d", { willReadFrequently: true });
  pen.drawImage(canvas, 0, 0);
  const pixels = pen.getImageData(0, 0, copy.width, 1).data;
  return Array.from({ length: copy.width }, (_, x) => pixels[4 * x + 3] > 0).lastIndexOf(true) / copy.width;
}"""


def test_the_frame_of_a_map_ends_where_the_map_ends(browser, address):
    """The frame of a short text was as wide as the window, with an empty part beside the map."""
    with opened(browser, address + "#head?text=0&query=9", width=768) as page:
        settled(page)
        last = page.evaluate(LINE_BESIDE_MAP)
        assert 0.5 < last < 0.9
        page.get_by_role("button", name="Zoom in", exact=True).click()
        until(page, f"({LINE_BESIDE_MAP})() > {last}")


@pytest.mark.parametrize("width", [768, 1440])
def test_two_texts_stand_side_by_side_with_cells_of_one_size_and_numbers_where_there_is_room(
    browser, address, texts, width
):
    """At 768 pixels one map stood below the other; words of other lengths moved the cells; no cell had a number."""
    with opened(browser, address + "#compare?text=0&other=4&layer=1&head=2&query=9", width=width) as page:
        until(page, "document.querySelectorAll('.compare .pin-map').length === 2")
        painted(page)
        boxes = [page.locator(".pin-map .cells rect").nth(at).bounding_box() for at in (0, 225)]
        assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] < boxes[1]["x"]
        assert boxes[0]["width"] == pytest.approx(boxes[1]["width"])
        said = page.locator(".pin-map").first.locator(".cells text").all_text_contents()
        weights = texts["short"].maps[1].dense()[0, 2].flatten()
        cells = ["" if value < 0.005 else f"{value:.2f}".removeprefix("0") for value in weights.tolist()]
        assert said == (cells if width == 1440 else [])
