"""A live model behind the page in a real browser: a changed word is read, and both texts stand side by side."""

from __future__ import annotations

import json
import re
import time
from urllib.request import Request, urlopen

import pytest
import torch

import regard as rg
from page_browser import NEEDS_CHROMIUM, axe_violations, browser, file, opened, server, texts
from pages import WORDS, served, until
from regard.base.errors import RegardError
from regard.edits.layer_edits import EditedMap, LayerEdit, LayerEdits, Pairs
from regard.types import TextReading
from regard.viewer import Sheet, write_page
from regard.viewer.live_model import LiveModel, Stopped

pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]
SENTENCE = "the cat did not cross the street because it was too tired"


def read(text, check):
    sheet = sheet_of(text)
    return [Sheet(sheet.about | {"written": text}, sheet.maps, sheet.ready)]


def maps_of(text):
    """Maps that depend on the words, so that two texts differ."""
    torch.manual_seed(sum(map(ord, text)))
    size = (1, 3, len(text.split()), 8)
    return {f"layer.{layer}": rg.Attention()(*(torch.randn(size) * 2 for _ in range(3))).weights for layer in range(2)}


def sheet_of(text):
    return Sheet.of(TextReading.of(text, maps_of(text), text.split()))


def test_a_text_is_typed_on_the_overview_and_shown_there(browser):
    with (
        served([sheet_of(SENTENCE)], model=LiveModel("words", "text", read)) as address,
        opened(browser, f"{address}#overview") as page,
    ):
        page.locator(".overview-page .typed-text").fill("it was typed on the first screen")
        page.keyboard.press("Enter")
        until(page, "document.title.startsWith('it was typed') && location.hash.startsWith('#overview?text=1')")
        until(page, "document.querySelector('.lead-words')?.textContent === 'it was typed on the first screen'")


def test_a_changed_word_is_read_and_both_texts_stand_side_by_side(browser):
    with (
        served([sheet_of(SENTENCE)], model=LiveModel("words", "text", read)) as address,
        opened(browser, f"{address}#head?query=8&layer=0&head=0") as page,
    ):
        page.get_by_role("link", name="What if").click()
        page.locator(".changeable button", has_text="tired").click()
        page.locator(".changeable input").fill("wide")
        page.keyboard.press("Enter")
        until(page, "document.querySelectorAll('.compare .side .words').length === 2")
        other = SENTENCE.replace("tired", "wide")
        rows = [maps_of(text)["layer.0"][0, 0, 8] for text in (SENTENCE, other)]
        boxes = page.locator(".compare .words").all()
        for row, words, box in zip(rows, (SENTENCE, other), boxes, strict=True):
            shown = box.locator("span").evaluate_all("words => words.map((word) => word.title)")
            assert [title.split(": ")[0] for title in shown] == words.split()
            said = [float(title.split(": ")[1].replace("<", "")) for title in shown]  # "<0.001" is at most that
            assert said == pytest.approx(row.tolist(), abs=1e-3)
        # The head that changes most, by half of the sum of differences.
        layers = [[maps_of(text)[name][0, :, 8] for text in (SENTENCE, other)] for name in ("layer.0", "layer.1")]
        changes = torch.stack([(a - b).abs().sum(-1) / 2 for a, b in layers])
        place = divmod(int(changes.argmax()), 3)
        row = page.locator("table.changes tbody tr").first
        assert row.locator("th").inner_text() == f"L{place[0]}.H{place[1]}"
        assert float(row.locator("td").first.inner_text()) == pytest.approx(float(changes.max()), abs=6e-4)
        # The second text has its own maps, with words on their sides.
        assert page.locator(".compare .pin-map").nth(1).locator("text").last.inner_html() == "wide"
        # The text that was read can be changed again.
        assert page.locator(".typed-text").input_value() == other
        assert page.locator(".changeable button").all_inner_texts() == other.split()
        assert page.locator(".typed .hint").first.inner_text().startswith("Click a word of the second text")
        assert axe_violations(page) == []
        row.locator("button").click()
        until(page, f"document.querySelector('h1').textContent.includes('Layer {place[0]}, head {place[1]}')")
        link = page.url
        page.goto("about:blank")
        page.goto(link)
        until(page, "document.querySelectorAll('.compare .side .words').length === 2")
        assert page.locator(".compare .side h2").nth(1).inner_text() == other, "the link holds both texts"


def test_what_cannot_be_read_is_said_in_words_and_reading_can_be_stopped(browser):
    stopped = []

    def read(text, check):
        if text == "a mistake":
            raise ValueError("no such text")
        try:
            while True:
                check()
                time.sleep(0.01)
        except Stopped:
            stopped.append(text)
            raise

    with served([sheet_of(SENTENCE)], model=LiveModel("words", "text", read)) as address:
        page = browser.new_page()
        page.goto(f"{address}#whatif")
        for text, words in (
            ("", "The text is empty"),
            ("a mistake", "ValueError: no such text"),
            ("for ever", "words reads the text"),
        ):
            page.locator(".typed-text").fill(text)
            page.locator(".typed-text").press("Enter")
            until(page, f"document.querySelector('.typed .notice').textContent.includes('{words}')")
        page.get_by_role("button", name="Stop").click()
        until(page, "document.querySelector('.typed .notice').textContent === 'Stopped.'")
        page.context.close()
        for _ in range(100):
            time.sleep(0 if stopped else 0.05)
        assert stopped == ["for ever"]


def test_a_long_text_is_refused_in_words_before_it_is_sent(browser):
    asked, long = [], "word " * 5000
    with (
        served([sheet_of(SENTENCE)], model=LiveModel("words", "text", read)) as address,
        opened(browser, f"{address}#whatif") as page,
    ):
        page.wait_for_selector(".compare .pair .hint")
        assert page.locator(".compare .pair .hint").inner_text() == "The answer stands here, beside the text."
        assert page.locator(".compare .words span").all_inner_texts() == SENTENCE.split()
        assert page.locator(".typed .hint").first.inner_text().startswith("Click a word of the first text to change it")
        page.on("request", lambda request: asked.append(request.url))
        page.locator(".typed-text").fill(long)
        assert page.locator(".typed-length").inner_text() == f"{len(long.strip()):,} of 2,000 characters"
        page.locator(".typed-text").press("Enter")
        assert "at most 2,000 characters" in page.locator(".typed .notice").inner_text()
        assert page.locator(".typed-text").input_value() == long and asked == []


def test_a_text_that_the_model_refuses_is_answered_in_words_without_an_error_in_the_console(browser):
    def read(text, check):
        raise RegardError("The text has 300 tokens; the page reads at most 7.")

    with (
        served([sheet_of(SENTENCE)], model=LiveModel("words", "text", read, 7)) as address,
        opened(browser, f"{address}#whatif") as page,
    ):
        until(page, "document.querySelector('.typed .hint')?.textContent.endsWith('a new text of at most 7 tokens.')")
        page.locator(".typed-text").fill("word " * 300)
        page.locator(".typed-text").press("Enter")
        until(page, "document.querySelector('.typed .notice').textContent.startsWith('The text has 300 tokens;')")
        assert not page.get_by_role("button", name="Read it").is_disabled()


def test_words_of_unlike_texts_are_not_paired(browser):
    kept = [sheet_of(SENTENCE), sheet_of("she said that they were very kind and went home")]
    with served(kept) as address, opened(browser, f"{address}#compare?text=0&query=10") as page:
        page.wait_for_selector(".few-words")
        assert page.locator("table.changes").count() == 0
        assert page.locator(".compare .side").nth(1).locator("[aria-selected=true]").count() == 0
        for side, word in ((1, "kind"), (0, "cat")):  # a word in each
            page.locator(".compare .words").nth(side).locator("span", has_text=word).click()
        chosen = "[...document.querySelectorAll('[aria-selected=true]')].map((one) => one.textContent).join()"
        until(page, f"{chosen} === 'cat,kind'")


def test_unknown_pieces_are_named_and_a_line_under_the_text_keeps_its_direction(browser):
    def read(text, check):
        sheet = sheet_of(text)
        return [Sheet(sheet.about | {"written": text, "unknown": ["€", "漢字"]}, sheet.maps, sheet.ready)]

    arabic = "القط لم يعبر الشارع"
    with (
        served([sheet_of(arabic)], model=LiveModel("words", "translation", read)) as address,
        opened(browser, f"{address}#whatif") as page,
    ):
        page.locator(".typed-text").fill(f"{arabic} ▁")
        page.locator(".typed-text").press("Enter")
        page.wait_for_selector(".compare .unknown")
        assert page.locator(".unknown").inner_text() == "2 pieces of your text are unknown to this model (€, 漢字)."
        words = page.locator(".compare .words").nth(1)
        assert words.locator("span").last.inner_text() == "␣"
        directions = "all => all.map((one) => getComputedStyle(one).direction)"
        assert page.locator(".compare .readout").evaluate_all(directions) == ["ltr", "ltr"]
        assert page.locator(".compare .words").evaluate_all(directions) == ["rtl", "rtl"]


def test_number_keys_follow_the_tabs_that_are_shown(browser):
    with (
        served([sheet_of(SENTENCE), sheet_of(SENTENCE)]) as address,
        opened(browser, f"{address}#overview") as page,
    ):
        tabs = page.locator(".tabs a").all_inner_texts()
        assert "Picture" not in tabs and tabs[-1] == "What if"
        for number, tab in enumerate(tabs, 1):
            page.keyboard.press(str(number))
            until(page, f"location.hash.startsWith('#{tab.lower().replace(' ', '')}')")
            assert page.locator(".bar").is_hidden() == (tab == "Overview")
        page.keyboard.press("?")
        first = page.locator(".help dt, .help dd").all_inner_texts()[:2]
        assert first == [f"1 … {len(tabs)}", ", ".join(tabs)]


def test_a_link_to_a_text_that_is_not_kept_any_more_opens_the_first(browser, monkeypatch):
    monkeypatch.setattr("regard.viewer.live_request.KEPT", 1)
    with served([sheet_of(SENTENCE)], model=LiveModel("words", "text", read)) as address:
        for text in ("the first", "the second"):
            body = json.dumps({"text": text}).encode()
            urlopen(Request(f"{address}ask/read", body, {"Content-Type": "application/json"}), timeout=300).close()
        with opened(browser, f"{address}#head?text=1") as page:
            until(page, "document.querySelector('.looks')?.textContent.includes('attends to')")
            assert page.locator("header select option").all_inner_texts() == [SENTENCE, "the second"]
            page.evaluate("() => { location.hash = '#head?text=2&query=1' }")
            until(page, "document.querySelector('.looks').textContent.startsWith('second')")
            page.evaluate("() => { location.hash = '#head?text=1&query=3' }")
            until(page, f"document.querySelector('.looks').textContent.startsWith('{SENTENCE.split()[3]} ')")


def test_a_text_with_other_heads_stays_chosen_and_another_can_be_chosen(browser, file):
    other = "[...document.querySelectorAll('.compare select')].map((one) => one.value).join()"
    with opened(browser, f"{file}#compare?text=0") as page:
        page.wait_for_selector(".compare .side")
        page.get_by_label("Second text").focus()
        page.get_by_label("Second text").select_option("3")  # a translation: cross-attention with fewer heads
        until(page, "document.querySelector('.compare .pair')?.textContent.includes('different layers or heads')")
        assert page.evaluate(other) == "3" and "other=3" in page.url
        page.keyboard.press("ArrowDown")  # the list has kept the focus
        until(page, "document.querySelectorAll('.compare .words').length === 2")
        assert page.evaluate(other) == "4" and "other=4" in page.url
        page.keyboard.press("ArrowUp")
        until(page, f"{other} === '3'")
        page.goto(f"{file}#compare?text=3")  # no other text has its heads: none is chosen
        until(page, f"{other} === '-1'")
        page.get_by_label("Second text").select_option("0")
        until(page, f"{other} === '0'")


def test_without_a_model_texts_are_compared_but_not_typed(browser, file, server):
    for address in (file, server):
        with opened(browser, f"{address}#compare?text=0&query=8") as page:
            until(page, "document.querySelectorAll('.compare .side .words').length === 2")
            assert page.locator(".typed").count() == 0
            assert page.get_by_label("Head", exact=True).count() == 1
            page.get_by_role("button", name="Two heads").click()  # each side chooses its text, layer and head
            until(page, "document.querySelectorAll('.pin-map').length === 3")
            assert page.get_by_label("Head", exact=True).count() == 0
            page.get_by_role("button", name="Two texts").click()
            until(page, "document.querySelectorAll('.compare .side .words').length === 2")
            page.get_by_role("link", name="What if").click()
            until(page, "document.querySelector('.what-if .words') !== null")
            needs = " ".join(page.locator(".what-if > .hint").inner_text().split())
            assert "This page has no model" in needs and "regard view --model" in needs and "--knock-out" in needs
            assert page.locator(".typed, .offers button").count() == 0


@pytest.mark.parametrize(("query", "key"), [(4, 6), (8, 1), (2, -1)])
def test_without_a_model_the_command_names_the_chosen_link(browser, file, query, key):
    with opened(browser, f"{file}#whatif?text=0&layer=1&head=2&query={query}&key={key}") as page:
        until(page, "/--knock-out/.test(document.querySelector('.what-if > .hint').textContent)")
        [named] = re.findall(r'--knock-out "L1.H2: (.+?)"', page.locator(".what-if > .hint").inner_text())
    rg.Where.parse(f"L1.H2: {named}")
    ends = [int(x[1:]) if x.startswith("#") else WORDS.index(x) for x in named.split(" -> ")]
    assert ends[0] == query and (ends[1] == key if key >= 0 else ends[1] != query)
    assert all(WORDS.count(x) == 1 for x in named.split(" -> ") if not x.startswith("#"))


MISSING = "A knock-out asks the model, and this page has no model. To ask it, run regard view --model NAME."


def test_the_key_of_a_knock_out_says_what_is_missing(browser, file):
    """It was silent on a page without a model, though the menu names it."""
    with opened(browser, f"{file}#whatif?text=0&layer=1&head=2&query=8") as page:
        until(page, "document.querySelector('.what-if .words') !== null")
        notice = page.locator("section[aria-label='Knock out'] [role=status]")
        assert notice.is_hidden()
        page.keyboard.press("k")
        assert notice.is_visible() and notice.inner_text() == MISSING
        assert axe_violations(page) == []


def test_the_key_of_a_knock_out_says_that_a_model_takes_none(browser):
    model = LiveModel("words", "text", read)
    with served(read(SENTENCE, None), model=model) as address, opened(browser, f"{address}#whatif?query=8") as page:
        until(page, "document.querySelector('.what-if .words') !== null")
        page.keyboard.press("k")
        until(page, "document.querySelector('section[aria-label=\"Knock out\"] .notice').textContent !== ''")
        said = page.locator("section[aria-label='Knock out'] [role=status]").inner_text()
        assert said.startswith("words takes no knock-outs.")


def test_a_link_that_is_knocked_out_changes_the_prediction_and_can_be_put_back(browser):
    asked = []

    def edited(request, check):
        """The maps of another text, and a prediction that the number of edits changes."""
        asked.append(request.edits)
        [sheet] = read(request.text, check)
        top = [["wide", 0.5, 0.5 / (1 + len(request.edits))], ["small", 0.25, 0.75]]
        named = [[short, f"without {short}"] for short in request.edits]
        effect = {"of": request.text, "edits": named, "kind": "next token", "sentence": "It was wide and is small."}
        maps = list(maps_of(request.text + "!").values())
        about = sheet.about | {
            "title": f"{request.text} edited",
            "effect": effect | {"probabilities": top, "moved": []},
        }
        return [Sheet(about, maps, sheet.ready)]

    model = LiveModel("words", "text", read, questions={"edits": edited})
    with (
        served(read(SENTENCE, None), model=model) as address,
        opened(browser, f"{address}#whatif?query=8&key=1&layer=1&head=2", 1440, 900) as page,
    ):
        offers = page.locator(".offers button")
        until(page, "document.querySelectorAll('.offers button').length === 3")
        assert offers.all_inner_texts() == ["L1.H2: it → cat", "head L1.H2", "“it” in every head"]
        assert page.locator(".effect").count() == 0
        offers.first.click()
        until(page, "document.querySelectorAll('.effect-bars tbody tr').length === 2")
        assert asked == [("L1.H2: #8 -> #1",)] and "other=1" in page.url
        assert page.locator(".effect-said").inner_text() == "It was wide and is small."
        numbers = page.locator(".effect-bars .number").all_inner_texts()
        assert numbers == ["50.0 %", "25.0 %", "25.0 %", "75.0 %"]
        widths = page.locator(".bar-line").evaluate_all("bars => bars.map((bar) => bar.getBoundingClientRect().width)")
        assert widths[0] == pytest.approx(2 * widths[1], rel=0.1) and widths[3] == pytest.approx(3 * widths[2], rel=0.1)
        until(page, "document.querySelectorAll('.compare .side .words').length === 2")
        for side, text in enumerate((SENTENCE, SENTENCE + "!")):
            best = float(maps_of(text)["layer.1"][0, 2, 8].max())
            assert f" {best:.3f}" in page.locator(".compare .readout").nth(side).inner_text()
        bottoms = page.locator(".compare .words, .effect-bars").evaluate_all(
            "all => all.map((one) => one.getBoundingClientRect().bottom)"
        )
        assert len(bottoms) == 3 and max(bottoms) < 900, "the text, what changes and the answer, without scrolling"
        until(page, "document.querySelector('.offers button').disabled")
        page.keyboard.press("k")  # the next offer
        until(page, "document.querySelectorAll('.removed .chip-word').length === 2")
        assert asked[1:] == [("L1.H2: #8 -> #1", "L1.H2")]
        assert page.locator("section[aria-label='Knock out'] .notice").is_hidden()
        assert axe_violations(page) == []
        page.get_by_role("button", name="Put back without L1.H2", exact=True).click()
        until(page, "document.querySelectorAll('.removed .chip-word').length === 1")
        assert len(asked) == 2, "the text without the link alone is kept"
        page.get_by_role("button", name="Put back without L1.H2: #8 -> #1", exact=True).click()
        until(page, "!document.querySelector('.effect') && !document.querySelector('.removed .chip-word')")
        assert "other" not in page.url and page.locator(".offers button:disabled").count() == 0


def test_a_saved_page_shows_what_changed_and_offers_nothing(browser, tmp_path):
    effect = {"of": SENTENCE, "edits": [["L0", "L0"]], "kind": "next token", "sentence": "Nothing changes."}
    sheet = sheet_of(SENTENCE)
    edited = Sheet(sheet.about | {"effect": effect | {"probabilities": [], "moved": [["it", 0.5]]}}, sheet.maps)
    path = write_page(tmp_path / "page.html", [sheet, edited])
    with opened(browser, f"{path.as_uri()}#whatif?text=1&query=8") as page:
        until(page, "document.querySelector('.effect-said')?.textContent === 'Nothing changes.'")
        assert page.locator(".offers").is_hidden() and page.locator(".removed .chip-word").inner_text() == "L0"
        page.keyboard.press("k")
        assert page.locator(".asked-of .notice").first.inner_text() == MISSING
        assert page.url.split("#")[1].startswith("whatif?") and "other=1" in page.url and "text=" not in page.url, (
            "the whole text stands beside it"
        )
        until(page, "document.querySelectorAll('.compare .side .words').length === 2")


def test_a_generation_is_one_text_with_a_slider_over_its_steps(browser):
    words = SENTENCE.split()
    steps = {"prompt": 4, "labels": [*words, "today"]}

    def generated(request, check):
        assert request.generate == 10
        [sheet] = read(SENTENCE, check)
        return [Sheet(sheet.about | {"generation": steps}, sheet.maps, sheet.ready)]

    model = LiveModel("words", "text", read, questions={"generate": generated})
    with (
        served([sheet_of("the cat did not")], model=model) as address,
        opened(browser, f"{address}#whatif") as page,
    ):
        page.get_by_label("tokens", exact=True).select_option("10")
        page.get_by_role("button", name="Let it continue").click()
        page.wait_for_selector(".written-token")
        assert page.url.startswith(f"{address}#head?text=1") and "query=3" in page.url
        assert page.locator(".written-token").all_inner_texts() == [*words[4:], "today"]
        slider, said = page.locator(".step-row input"), page.locator(".step-said")
        assert "read up to not and wrote cross." in said.inner_text()
        slider.focus()
        page.keyboard.press("ArrowRight")
        until(page, "document.querySelector('.step-row output').textContent === '2 of 9'")
        assert "read up to cross and wrote the." in said.inner_text() and "query=4" in page.url
        start = sheet_of("the cat did not").about["start"]  # the head stays
        word = words[maps_of(SENTENCE)[f"layer.{start['layer']}"][0, start["head"], 4].argmax()]
        until(page, f"document.querySelector('.looks').textContent.startsWith('cross (token 4) attends to {word}')")
        page.locator(".written-token").last.click()  # the last token was not read, but the row before wrote it
        until(page, "document.querySelector('.step-row output').textContent === '9 of 9'")
        assert "read up to tired and wrote today." in said.inner_text() and slider.input_value() == "9"
        page.locator(".words span").first.click()
        until(page, "document.querySelector('.step-said').textContent.startsWith('The chosen word is in the prompt')")
        assert axe_violations(page) == []


def test_the_weights_that_made_a_prediction_have_two_colors_and_curves(browser):
    chart = {"title": "Tokens removed", "x": "tokens removed", "y": "probability", "band": [[0, 1, 1], [1, 0.2, 0.6]]}
    chart["series"] = [{"name": "by relevance", "points": [[0, 1], [1, 0.1]]}]
    found = {"of": SENTENCE, "method": "weight-gradient", "sentence": "It depends most on cat.", "test": ["Faithful."]}
    relevance = [0.0, 0.4, -0.8, 0.1, 0.0, -0.05, 0.2, 0.0, 0.3]
    found["relevance"] = relevance + [0.0] * (len(read(SENTENCE, None)[0].about["tokens"]) - len(relevance))

    def attributed(request, check):
        if request.attribute[1] == "none":
            raise RegardError("this is no single token")
        [sheet] = read(request.text, check)
        maps = [EditedMap(weights, minus) for weights in sheet.maps]
        about = {"title": f"{request.text} (why)", "attribution": found, "charts": [chart]}
        return [Sheet(sheet.about | about, maps, sheet.ready)]

    turned = rg.edits.ScaleWeights(rg.Where(keys=1), -1.0)
    minus = LayerEdits((LayerEdit(turned, Pairs(keys=turned.where.indices("keys"))),))
    model = LiveModel("words", "text", read, questions={"attribute": attributed})
    with (
        served(read(SENTENCE, None), model=model) as address,
        opened(browser, f"{address}#whatif?query=8&layer=1&head=2") as page,
    ):
        page.get_by_label("The token to explain").fill("none")
        page.keyboard.press("Enter")
        until(page, "document.querySelector('[aria-label=Why] .notice').textContent === 'this is no single token'")
        page.get_by_label("The token to explain").fill("")
        page.keyboard.press("Enter")
        until(page, "document.querySelector('.why .effect-said')?.textContent === 'It depends most on cat.'")
        assert "Faithful." in page.locator(".why").inner_text()
        tokens = page.locator(".relevance-token")
        assert tokens.evaluate_all("all => all.map((one) => Number(one.dataset.value))") == found["relevance"]
        bars = "all => all.map((one) => [...one.querySelectorAll('.relevance-bar')].map((bar) => bar.offsetHeight))"
        bars = dict(enumerate(tokens.evaluate_all(bars)))
        assert bars[1] == [17, 0] and bars[2] == [0, 34] and bars[0] == [0, 0], (
            "half of the largest, upwards; downwards"
        )
        assert "lowers −0.800" in page.locator(".relevance .legend").inner_html()
        until(page, "document.querySelectorAll('.compare .side .words').length === 2")
        said = page.locator(".compare .readout").all_inner_texts()
        assert said[0].startswith("it attends to ") and said[1].startswith("it depends on ")
        word = "document.querySelectorAll('.side:nth-child(2) .words span')[at]"
        colors = f"at => {word}.style.background.match(/[0-9]+/g).map(Number)"
        (red, _, blue), (cold, _, warm) = page.evaluate(colors, 1), page.evaluate(colors, 2)
        assert red > blue and cold < warm, "a word of a negative weight has the other color"
        page.locator(".curves > summary").click()
        assert (
            page.locator(".curves figure").count() == 1 and page.locator(".curves [aria-label=area] path").count() == 1
        )
        assert axe_violations(page) == []
