"""The first view in a browser: what the page opens with, its headline, its cards, and the grid of heads."""

from __future__ import annotations

import re
from urllib.parse import parse_qs

import pytest
import torch
from PIL import Image

import regard as rg
from page_browser import NEEDS_CHROMIUM, address, browser, file, menu, opened, server, texts
from pages import WORDS, maps_of, reading, translation, until
from regard.types import TextReading
from regard.viewer import Sheet, write_page
from regard.viewer.findings import joined

pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]


@pytest.fixture(scope="module")
def sink(tmp_path_factory):
    """A model with a name, 30 layers of 24 heads, and a sink at the first token."""
    torch.manual_seed(0)
    maps = {}
    for layer in range(30):
        q, k = torch.randn(1, 24, 30, 4), torch.randn(1, 24, 30, 4)
        q[..., 0], k[:, :, 0, 0] = 4.0, 4.0
        maps[f"layers.{layer}"] = rg.Attention()(q, k, k).weights
    tokens = ["[CLS]", *(f"word{n}" for n in range(28)), "it"]
    text = TextReading.of("A wide model", maps, tokens, model="tiny-wide")
    page = write_page(tmp_path_factory.mktemp("wide") / "index.html", [Sheet.of(text)])
    return page.as_uri(), text


def received(text):
    """The share of the weight of all heads and words on the first token."""
    return float(torch.stack([weights.dense()[0, :, :, 0] for weights in text.maps.values()]).mean())


def plain(page, selector):
    return " ".join(page.locator(selector).first.inner_text().split())


def opening(lead):
    return "".join(text for parts, _ in lead["heading"] for text, _ in parts)


def test_the_page_opens_with_the_finding(browser, address, texts):
    about = texts["short"].about
    with opened(browser, address) as page:
        assert plain(page, "h1") == opening(about["lead"])
        assert page.locator(".lead-words span").all_inner_texts() == WORDS
        assert page.locator(".lead-query").inner_text() == "it"
        told = [link for link in (about["lead"], about["lead"]["other"]) if link]
        drawn = [key for link in told for key, weight in link["links"] if weight >= 0.03 and key != link["query"]]
        until(page, f"document.querySelectorAll('.lead-stage .arcs path').length === {len(drawn)}")
        phrases = page.locator(".lead-sentence a").evaluate_all("all => all.map((one) => one.getAttribute('href'))")
        assert len(phrases) == (2 if about["lead"]["other"] else 0)
        for link, phrase in zip(told, phrases, strict=False):
            assert phrase.startswith("#head?") and places(phrase) == {name: link[name] for name in PLACE}
        assert page.locator(".identity summary").inner_text().split("\n") == ["2 layers × 3 heads", "15 tokens"]
        names = page.locator("[role=gridcell]").evaluate_all("all => all.map((one) => one.title.split(':')[0])")
        assert names == [f"L{layer}.H{head}" for layer in range(2) for head in range(3)]
        assert "rows attend" in plain(page, ".key-rows") and "columns are attended to" in plain(page, ".key-columns")
        assert about["lead"]["left_out"] in plain(page, ".first-rest > .hint:not(.depth-said)")
        page.get_by_role("link", name="All heads for “it”").click()
        until(
            page, "document.querySelector('.charts-table')?.textContent.includes('What “it” attends to in each head')"
        )


PLACE = ("layer", "head", "query", "key")


def places(address):
    """The layer, the head and the link that an address names."""
    found = parse_qs(address.partition("?")[2])
    return {name: int(found.get(name, ["-1" if name == "key" else "0"])[0]) for name in PLACE}


def test_a_word_opens_its_link_if_the_sentence_tells_one_and_else_what_it_attends_to(browser, wide):
    """A click on the key of a told link once opened the row of the key."""
    link, lead = wide
    told = {one["key"]: {name: one[name] for name in PLACE} for one in (lead, lead["other"])}
    with opened(browser, link) as page:
        assert page.locator(".lead-words span").nth(2).evaluate("one => getComputedStyle(one).cursor") == "pointer"
        for at in [*told, next(at for at in range(15) if at not in told)]:
            page.locator(".lead-words span").nth(at).click()
            page.wait_for_selector(".head-words .words")
            wanted = told.get(at, {"layer": lead["layer"], "head": lead["head"], "query": at, "key": -1})
            assert "#head" in page.url and places(page.url) == wanted
            page.go_back()
            page.wait_for_selector(".lead-words")
        phrase = page.locator(".lead-sentence a").nth(1)
        phrase.click()
        until(page, "document.querySelector('.head-words .chosen-pair')?.textContent")
        assert places(page.url) == told[lead["other"]["key"]], "the click is answered where the reader looks"
        page.go_back()
        page.wait_for_selector(".lead-words")
        page.locator(".lead-words").focus()
        page.keyboard.press("ArrowLeft")
        at = lead["query"] - 1
        assert page.locator(".lead-words [aria-selected=true]").inner_text() == WORDS[at]
        page.keyboard.press("Enter")
        until(page, "location.hash.startsWith('#head')")
        assert places(page.url)["query"] == (lead["query"] if at in told else at)


def test_the_sentence_names_the_next_heads_of_each_link(browser, wide):
    """Of MiniLM one head puts 0.677 on "animal", another 0.673, where every word attends to it."""
    link, lead = wide
    dense = torch.stack([weights.dense()[0] for weights in wide_maps().values()])
    rows, received = dense[:, :, lead["query"]], dense.sum(2)  # (L, H, J)
    with opened(browser, link, width=1440, height=900) as page:
        page.wait_for_selector(".link-heads li")
        for line, one in zip(page.locator(".link-heads li").all(), (lead, lead["other"]), strict=True):
            best = rows[:, :, one["key"]].flatten().topk(3)
            shares = best.values / received[:, :, one["key"]].flatten()[best.indices]
            heads = [
                f"L{at // 12}.H{at % 12} {weight:.3f}"
                for at, weight in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            ]
            said = " ".join(line.inner_text().split())
            assert re.sub(r" \(.*?\)", "", said) == f"it → {WORDS[one['key']]}: {', '.join(heads)}"
            found = [float(number) for number in re.findall(r"\((.*?)\)", said)]
            assert found == pytest.approx(shares.tolist(), abs=0.006), "sums of the page have three digits"
            assert line.bounding_box()["y"] < 500
        number = page.locator(".lead-sentence").inner_text()
        assert f"{lead['weight']:.3f}" in number and "%" not in number, "one format of numbers"


def test_a_phone_shows_every_head_on_its_first_screen(browser, wide):
    with opened(browser, wide[0], width=390, height=844) as page:
        page.wait_for_selector(".link-heads li")
        box = page.locator(".heads").bounding_box()
        assert box["y"] + box["height"] <= 844 and page.locator("[role=gridcell]").count() == 72


def test_cards_say_the_sentences_of_the_api_and_lead_to_their_place(browser, sink):
    link, text = sink
    cards = Sheet.of(text).about["cards"]
    assert "sink" in [card["kind"] for card in cards]
    with opened(browser, link) as page:
        assert plain(page, ".identity .model") == "tiny-wide"
        said = [" ".join(each.split()) for each in page.locator(".card-sentence").all_inner_texts()]
        assert said == [re.sub("[“”]", "", joined(card["sentence"])) for card in cards]
        page.locator(".card-sink").click()
        until(page, "document.querySelector('.looks')?.textContent.includes('receives attention from')")
        mean = "Number(/mean over all words: ([\\d.]+)/.exec(document.querySelector('.looks').textContent)?.[1])"
        until(page, f"card => Math.abs({mean} - card) < 6e-4", received(text))  # as the card says
        assert plain(page, ".bar h1") == "Mean of all heads"
        page.go_back()
        page.wait_for_selector(".cards")
        page.locator("[role=gridcell][tabindex='0']").focus()
        before = page.url
        page.keyboard.press("ArrowUp")
        until(page, f"location.href !== {before!r}")
        href = page.locator(".card-sink").get_attribute("href")
        page.locator(".card-sink").click()
        assert page.url.endswith(href), "a click shows what the link says"
        until(page, "document.querySelector('.looks')?.textContent.includes('receives attention from')")
        assert "#head?" in page.url and "side=in" in page.url and "mean of all heads" in plain(page, ".looks")
        page.go_back()
        page.wait_for_selector(".cards")
        assert page.locator(".card-sink").get_attribute("href").startswith("#head?")


def test_a_key_press_in_the_grid_changes_two_buttons(browser, sink):
    """Whatever the number of heads. Rows are drawn, and their buttons made, when they come near the screen."""
    link, _ = sink
    with opened(browser, link, width=740, height=660) as page:
        assert page.locator("[role=grid] [role=row]").count() == 31, "30 layers, and the names of the heads"
        drawn = "[...document.querySelectorAll('.row-maps')].filter((one) => one.width > 0).length"
        until(page, f"{drawn} > 3")
        assert page.evaluate(drawn) < 30, "rows far below the screen are not drawn"
        page.locator("[role=gridcell][tabindex='0']").focus()
        page.evaluate("""() => { window.changed = 0; new MutationObserver((all) => { window.changed += all.length; })
            .observe(document.querySelector('.heads'), { subtree: true,
                attributeFilter: ['tabindex', 'aria-selected', 'aria-label', 'title'] }); }""")
        page.keyboard.press("ArrowRight")
        until(page, "window.changed > 0")
        assert page.evaluate("window.changed") == 4, "tabindex and aria-selected of two buttons"
        chosen = page.locator("[role=gridcell][aria-selected='true']")
        assert chosen.count() == 1 and chosen.get_attribute("title").startswith(
            plain(page, ".chosen-head h2").split()[0]
        )


def test_the_scrubber_shows_the_mean_of_each_layer(browser, sink):
    """The word of the first sentence in every layer; the address has the layer, and the row of the grid is marked."""
    link, text = sink
    with opened(browser, link, reduced_motion="reduce") as page:
        tokens = page.locator(".lead-words span").all_inner_texts()
        query = tokens.index("it")
        slider = page.get_by_role("slider", name="Layer of the arcs")
        play = page.get_by_role("button", name="Play the layers")
        for layer, weights in enumerate(list(text.maps.values())[:3]):
            play.click() if layer == 0 else slider.press("ArrowRight")  # without motion, a press goes one layer on
            until(page, f"location.hash.includes('depth={layer}') && !!document.querySelector('.at-depth')")
            mean = weights.dense()[0, :, query].mean(0)
            best = mean.topk(3)
            said = ", ".join(f"{tokens[key]} {mean[key]:.3f}" for key in best.indices.tolist())
            until(page, "said => document.querySelector('.depth-said').textContent.endsWith(said)", said)
            assert plain(page, ".depth-said").startswith(f"Layer {layer}, mean of 24 heads: {tokens[query]} →")
            assert plain(page, ".at-depth [role=rowheader]") == f"L{layer}"
            said = plain(page, ".first-rest .hint:not(.depth-said)")
            assert f"in layer {layer}, mean of 24 heads: a thicker arc" in said, (
                "the text is of the arcs that are drawn"
            )
        page.wait_for_timeout(1000)
        assert "depth=2" in page.url, "nothing plays"
        slider.press("Home")
        until(page, "!location.hash.includes('depth')")
        assert page.locator(".at-depth").count() == 0


def test_a_card_is_saved_and_the_link_is_copied(browser, sink, tmp_path):
    link, _ = sink
    with opened(browser, link, accept_downloads=True) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        with page.expect_download() as saved:
            menu(page, "Save card")
        picture = Image.open(saved.value.path())
        assert picture.format == "PNG" and picture.size == (1200, 675)
        colors = {color for _, color in picture.convert("RGB").getcolors(1 << 20)}
        assert (252, 251, 248) in colors and len(colors) > 200, "paper, and the maps of the heads"
        menu(page, "Copy link")
        until(page, "document.querySelector('.help .hint').textContent === 'The link is copied.'")
        assert page.evaluate("navigator.clipboard.readText()") == page.url


def test_a_phone_folds_the_model_and_has_no_sideways_scroll(browser, sink):
    link, _ = sink
    with opened(browser, link, width=390, height=800) as page:
        until(page, "document.querySelectorAll('.lead-stage .arcs path').length > 0")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        for part in (".heads", ".lead-words"):
            beyond = page.locator(part).first.evaluate("(one) => one.scrollWidth - one.clientWidth")
            assert beyond < 2, part
        assert not page.locator(".texts").is_visible() and page.locator(".identity .model").is_visible()
        page.locator(".identity summary").click()
        assert page.locator(".texts").is_visible()


def test_a_translation_opens_on_its_alignment_and_a_generation_on_its_words(browser, tmp_path):
    pair = Sheet.of(translation(), gold=[(0, 0, True)], aligned="output")
    tokens = [f"t{n}" for n in range(7)]
    step = TextReading.of("A step", maps_of(2, keys=7, mask=rg.causal()), tokens, queries=tokens[-2:])
    page_file = write_page(tmp_path / "index.html", [pair, step, reading()]).as_uri()
    with opened(browser, page_file) as page:
        page.wait_for_selector(".matrix")
        assert page.get_by_role("button", name="Linear").get_attribute("aria-pressed") == "true"
        page.get_by_label("Text", exact=True).select_option("1")
        page.wait_for_selector(".words [role=option]")
        page.get_by_label("Text", exact=True).select_option("2")
        page.wait_for_selector(".lead-sentence")
        page.keyboard.press("3")
        page.get_by_label("Text", exact=True).select_option("0")
        assert "#statistics" in page.url, "a view that was chosen stays"


def test_a_run_of_an_earlier_version_opens(browser, tmp_path):
    old = Sheet.of(reading())
    for name in ("model", "lead", "cards", "warnings"):
        del old.about[name]
    with opened(browser, write_page(tmp_path / "index.html", [old]).as_uri()) as page:
        assert page.locator("[role=gridcell]").count() == 6 and page.locator(".cards").count() == 0


def test_warnings_fold_and_missing_roles_have_their_reason(browser, file, texts):
    with opened(browser, file) as page:
        lines = page.locator(".warnings summary").all_inner_texts()
        assert lines == list(texts["short"].about["warnings"].values())
        dots = page.locator(".heads .warned").count()
        assert dots and page.locator(".warned-key").inner_text() == "● a warning names this head"
        assert page.locator(".warnings li").count() == 0
        page.locator(".warnings summary").first.click()
        page.wait_for_selector(".warnings li")
        page.get_by_label("Text", exact=True).select_option("1")
        until(page, "document.querySelector('.beside').textContent.includes('Roles were not computed for this text')")
        page.get_by_label("Text", exact=True).select_option("4")
        until(page, "document.querySelector('.beside').textContent.includes('Roles need a text with more than 25')")


def wide_maps():
    torch.manual_seed(3)
    maps = {}
    for layer in range(6):
        q, k = 2 * torch.randn(1, 12, len(WORDS), 8), 2 * torch.randn(1, 12, len(WORDS), 8)
        maps[f"layers.{layer}"] = rg.Attention()(q, k, k).weights
    return maps


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model of 6 layers with 12 heads, as the one of the demo, and a sentence about two of them."""
    sheet = Sheet.of(TextReading.of("A sentence", wide_maps(), WORDS, model="small"))
    return write_page(tmp_path_factory.mktemp("told") / "index.html", [sheet]).as_uri(), sheet.about["lead"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_first_screen_has_the_sentence_both_links_and_every_head(browser, wide, scheme):
    """At 1,440 x 900; once the grid of heads began at the lower end of the window, and one of two links was drawn."""
    link, lead = wide
    assert lead["other"], "the sentence tells two links"
    with opened(browser, link, width=1440, height=900, color_scheme=scheme) as page:
        until(page, "document.querySelectorAll('.lead-stage .arcs path').length > 1")
        box = page.locator(".heads").bounding_box()
        assert box["y"] + box["height"] < 900 and page.locator("[role=gridcell]").count() == 72
        words = page.locator(".lead-words").bounding_box()
        assert words["x"] + words["width"] <= box["x"] and words["y"] + words["height"] < 900
        size = float(page.locator("h1.lead-sentence").evaluate("one => parseFloat(getComputedStyle(one).fontSize)"))
        assert 28 <= size <= 34
        colors = page.locator(".lead-stage .arcs path").evaluate_all(
            "all => all.map((one) => one.getAttribute('stroke'))"
        )
        phrases = page.locator(".lead-sentence a").evaluate_all(
            "all => all.map((one) => one.style.getPropertyValue('--own'))"
        )
        assert len(set(colors)) == 2 and set(colors) == set(phrases)
        for of, color in zip((lead, lead["other"]), phrases, strict=True):
            place = page.locator(f"[data-place='{of['layer']}.{of['head']}']")
            assert place.evaluate("one => one.style.getPropertyValue('--own')") == color, (
                "the grid marks the head in it"
            )
            paths = [weight for key, weight in of["links"] if weight >= 0.03 and key != of["query"]]
            assert colors.count(color) == len(paths)


def test_the_page_grows_with_the_window(browser, wide):
    link, _ = wide
    with opened(browser, link, width=1920, height=1080) as page:
        page.wait_for_selector(".heads canvas")
        wide_page = page.locator(".overview").bounding_box()["width"]
    assert wide_page > 1500


@pytest.mark.parametrize("width", [768, 1440])
def test_the_slider_of_the_layers_reaches_its_sentence(browser, file, width):
    """It was 110 pixels wide in a column of 180, and what it says stood apart from it."""
    with opened(browser, file, width=width) as page:
        slider, said = (page.locator(f".depth {part}").bounding_box() for part in ("input", ".depth-said"))
        assert said["x"] - 12 <= slider["x"] + slider["width"] <= said["x"]


#: The gaps in pixels between the arcs from the query to a told word of its own line and the words of the line above.
GAPS = """() => {
    const query = document.querySelector('.lead-query').getBoundingClientRect();
    const words = [...document.querySelectorAll('.lead-words span')].map((one) => one.getBoundingClientRect());
    const lower = Math.max(...words.filter((word) => word.bottom < query.top).map((word) => word.bottom));
    const ends = [...document.querySelectorAll('.lead-key')].map((one) => one.getBoundingClientRect())
        .filter((end) => end.top === query.top).map((end) => end.left + end.width / 2);
    return [...document.querySelectorAll('.lead-stage .arcs path')].filter((path) => {
        const last = path.getPointAtLength(path.getTotalLength()).x + path.ownerSVGElement.getBoundingClientRect().x;
        return ends.some((end) => Math.abs(last - end) < 2);
    }).map((path) => path.getBoundingClientRect().top - Number(path.getAttribute('stroke-width')) / 2 - lower);
}"""


def test_an_arc_between_two_lines_does_not_touch_the_words_above(browser, tmp_path):
    """On a phone the arc from "it" to "tired" passed along the lower side of "animal", as if it led there."""
    tokens = ["the", "animal", "didn't", "cross", "the", "wide", "street", "because", "it", "was", "too", "tired", "."]
    q, k = torch.zeros(1, 2, len(tokens), 8), torch.zeros(1, 2, len(tokens), 8)
    for head, word in enumerate(("animal", "tired")):
        q[0, head, tokens.index("it"), head] = k[0, head, tokens.index(word), head] = 5.0
    sheet = Sheet.of(TextReading.of("A sentence", {"layers.0": rg.Attention()(q, k, k).weights}, tokens))
    page_file = write_page(tmp_path / "index.html", [sheet])
    with opened(browser, page_file.as_uri(), width=390, height=844) as page:
        until(page, "document.querySelectorAll('.lead-stage .arcs path').length > 1")
        gaps = page.evaluate(GAPS)
        assert len(gaps) == 1 and gaps[0] >= 3
