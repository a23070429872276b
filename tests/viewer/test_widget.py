"""The page in a notebook: the widget carries short texts, answers for long ones, and runs in a real notebook."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import regard as rg
from pages import FLAGS, WORDS, chromium, maps_of, reading, until
from regard.base import upper_layers
from regard.viewer import notebook_widget, picture_sheets
from regard.viewer import widget as widget_module
from regard.viewer.page import bundle
from regard.viewer.pictures import places_of
from watching import watched

pytest.importorskip("anywidget")
NOTEBOOK = Path(__file__).parents[2] / "examples" / "looking.ipynb"


def sent(widget, monkeypatch, content):
    messages = []
    monkeypatch.setattr(type(widget), "send", lambda self, content, buffers=None: messages.append((content, buffers)))
    widget._asked(widget, content, [])
    return messages[0]


def test_a_map_shows_itself(monkeypatch):
    weights = maps_of(6)["layer.1"]
    widget = weights.show(list("abcdef"))
    data = json.loads(widget.data)
    assert data["texts"][0]["tokens"] == list("abcdef") and data["texts"][0]["maps"][0]["form"] == "dot"
    content, (buffer,) = sent(widget, monkeypatch, {"id": 7, "path": "rows/0/0/2"})
    assert content == {"id": 7}
    np.testing.assert_allclose(np.frombuffer(buffer, "<f4").reshape(3, 6), weights[0, :, 2].numpy(), rtol=1e-5)
    assert "there is no" in sent(widget, monkeypatch, {"id": 8, "path": "../x"})[0]["error"]


def test_cross_attention_and_positions_without_names():
    text = json.loads(maps_of(4, keys=7)["layer.0"].show(list("abcdefg"), list("wxyz")).data)["texts"][0]
    assert (text["tokens"], text["queries"]) == (list("abcdefg"), list("wxyz"))
    text = json.loads(maps_of(3, keys=5, mask=rg.causal())["layer.0"].show().data)["texts"][0]
    assert (text["tokens"], text["queries"]) == (list("01234"), list("234"))
    with pytest.raises(rg.RegardError, match="5 keys"):
        maps_of(3, keys=5)["layer.0"].show(["a"])


def test_a_picture_stays_where_no_widget_runs(monkeypatch):
    """As GitHub shows a stored notebook: the words of one head, its map and all heads, drawn once, with a sentence."""
    pytest.importorskip("matplotlib")
    drawn, draw = [], notebook_widget.figure

    def counted(*given, **named):
        drawn.append(draw(*given, **named))
        return drawn[-1]

    monkeypatch.setattr(notebook_widget, "figure", counted)
    weights = maps_of(4, keys=6)["layer.0"]
    one, several = weights.show(list("abcdef"), list("wxyz")), widget_module.show_texts([reading(title="A text")])
    for widget in (one, several):
        for _ in range(2):
            data, _ = widget._repr_mimebundle_()
            assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
            assert "application/vnd.jupyter.widget-view+json" in data
    first, second = ({tuple(row[:3]) for row in figure.rows if row[0] == "heads"} for figure in drawn)
    assert first == {("heads", 0, head) for head in range(3)}
    assert second == {("heads", layer, head) for layer in range(2) for head in range(3)}
    of_map = [row for row in drawn[0].rows if row[0] == "map"]
    head = of_map[0][2]
    assert [row[-1] for row in of_map] == pytest.approx(weights.dense()[0, head].flatten().tolist(), rel=1e-5)
    assert of_map[1][5] == "w" and of_map[1][7] == "b"
    lead = several.answers.sheets[0].about["lead"]
    assert drawn[1].caption.startswith("“A text”. In layer ") and f"head {lead['head']}" in drawn[1].caption


@pytest.mark.parametrize("kind", ["image", "video", "words", "sound"])
def test_the_stored_picture_of_patches_is_the_image_and_the_weights_on_it(kind):
    """Not a word for each patch. Dark is the largest weight; of a video it is one frame."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("transformers")
    from vision_models import pictured, towers, video, whisper, with_texts
    from vision_models import watched as seen_of

    if kind == "sound":
        sheets = picture_sheets(seen_of(whisper()), targets=["<s>", "the", "cat", "sat"])
    else:
        make = {"image": lambda: towers()[3], "video": video, "words": lambda: with_texts()[0]}[kind]
        sheets = picture_sheets(seen_of(make()))
    sheet = next((sheet for sheet in sheets if sheet.about["queries"]), None) or pictured(sheets)
    start, panels = sheet.about["start"], sheet.about["picture"]["panels"]
    row = sheet.maps[start["layer"]].dense()[0, start["head"], start["query"]]
    grids = [row[places_of(panel)].view(panel["rows"], panel["columns"]) for panel in panels]
    _, shown = (axes.images[0].get_array() for axes in notebook_widget.image_figure(sheet).axes)
    chosen = max(grids, key=lambda grid: float(grid.sum()))
    assert torch.as_tensor(shown.data).square().flatten().tolist() == pytest.approx(chosen.flatten().tolist(), abs=1e-5)
    png = notebook_widget.static_picture([sheet])
    assert png.startswith(b"\x89PNG") and len(png) < 150_000


@pytest.mark.parametrize("reason", ["matplotlib is missing", "the text is long"])
def test_without_a_picture_the_page_is_all(reason, monkeypatch):
    if reason == "the text is long":
        monkeypatch.setattr(notebook_widget, "PICTURED", 1)
    else:
        monkeypatch.setattr(notebook_widget, "find_spec", lambda name: None)
    data, _ = maps_of(3)["layer.0"].show()._repr_mimebundle_()
    assert set(data) == {"text/plain", "application/vnd.jupyter.widget-view+json"}


def test_long_texts_stay_with_the_kernel(monkeypatch):
    monkeypatch.setattr(notebook_widget, "EMBEDDED_BYTES", 100)
    assert json.loads(maps_of(6)["layer.0"].show().data) == {"live": True}


def test_a_model_shows_its_parts():
    transformers = pytest.importorskip("transformers")
    from miniatures import BART, BERT

    torch.manual_seed(0)
    bert = transformers.BertModel(transformers.BertConfig(**BERT)).eval()
    _, seen = watched(bert, {"input_ids": torch.arange(3, 9)[None].repeat(2, 1)})
    texts = json.loads(seen.show(list("abcdef"), batch=1).data)["texts"]
    assert [len(text["layers"]) for text in texts] == [2] and texts[0]["tokens"] == list("abcdef")
    bart = transformers.BartModel(transformers.BartConfig(**BART)).eval()
    _, seen = watched(bart, {"input_ids": torch.arange(3, 9)[None], "decoder_input_ids": torch.arange(3, 7)[None]})
    texts = json.loads(seen.show(list("abcdef"), list("wxyz")).data)["texts"]
    assert [text["title"] for text in texts] == ["Encoder", "Decoder", "Decoder to encoder"]
    assert texts[1]["tokens"] == list("wxyz")
    assert (texts[2]["tokens"], texts[2]["queries"]) == (list("abcdef"), list("wxyz"))


def test_generation_shows_the_call_that_read_the_tokens():
    """The whole output may be given, whose last token nothing has read, or the beginning that was read at once."""
    transformers = pytest.importorskip("transformers")
    from miniatures import BART, LLAMA

    greedy = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).eval()
    with rg.watch(llama) as seen:
        llama.generate(torch.arange(3, 7)[None], **greedy)
    for tokens, queries in (("abcdefg", "f"), ("abcdef", "f"), ("abcd", "abcd"), ("abcde", "e")):
        text = json.loads(seen.show(list(tokens)).data)["texts"][0]
        assert "".join(text["queries"] or text["tokens"])[-len(queries) :] == queries
        assert len(text["tokens"]) == min(len(tokens), 6)
    assert len(json.loads(seen.show().data)["texts"][0]["tokens"]) == 6
    with pytest.raises(rg.RegardError, match="1 queries and 6 keys"):
        seen.show(list("ab"))
    bart = transformers.BartForConditionalGeneration(transformers.BartConfig(**BART)).eval()
    with rg.watch(bart) as seen:
        output = bart.generate(torch.arange(3, 7)[None], num_beams=1, **greedy)
    targets = [str(place) for place in range(output.shape[1])]
    texts = json.loads(seen.show(list("abcd"), targets).data)["texts"]
    assert [text["tokens"] for text in texts] == [list("abcd"), targets[:-1], list("abcd")]
    assert texts[2]["queries"] == targets[-2:-1]


class Translator(torch.nn.Module):
    """A translator as courses write it: no path says that its self-attention is the decoder's."""

    def __init__(self):
        super().__init__()
        self.self_attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        self.cross_attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, source, target):
        target = target + self.self_attention(target, target, target)[0]
        return self.cross_attention(target, source, source)[0]


@pytest.mark.parametrize(("num_keys", "part"), [(7, "decoder"), (5, "encoder")])
def test_the_sizes_of_the_cross_attention_tell_the_tokens_of_the_decoder(num_keys, part):
    translator = Translator()
    with rg.watch(translator) as seen:
        translator(torch.randn(1, num_keys, 16), torch.randn(1, 5, 16))
    assert getattr(seen, part).names == ["self_attention"]
    source, target = list("abcdefg")[:num_keys], list("vwxyz")
    first, second = json.loads(seen.show(source, target).data)["texts"]
    assert first["tokens"] == (target if part == "decoder" else source)
    assert (second["tokens"], second["queries"]) == (source, target)


@pytest.mark.example
def test_the_notebook_runs_and_has_the_widget_in_it(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("transformers")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    kinds = [kind for cell in notebook.cells for out in cell.get("outputs", []) for kind in out.get("data", {})]
    assert kinds.count("application/vnd.jupyter.widget-view+json") == 2


def test_the_stored_notebook_has_its_pictures():
    """What GitHub shows: no widget, which needs a kernel, but its picture; `make notebooks` makes them."""
    notebook = json.loads(NOTEBOOK.read_text())
    outputs = [out for cell in notebook["cells"] for out in cell.get("outputs", [])]
    pictures = [base64.b64decode(out["data"]["image/png"]) for out in outputs if "image/png" in out.get("data", {})]
    assert len(pictures) == 3 and all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert {kind for out in outputs for kind in out.get("data", {})} == {"image/png", "text/plain"}
    assert "widgets" not in notebook["metadata"] and NOTEBOOK.stat().st_size < 500_000


# Starts the widget and returns nothing to wait for. V8's inspector holds a promise that `page.evaluate` waits for only
# weakly: if it resolves just before the page draws, it can be collected before its answer is sent.
START = """([script, data]) => {
    let heard;
    const model = {
        get: () => data,
        on: (_, listener) => { heard = listener; },
        send: async ({ id, path }) => {
            const raw = Uint8Array.from(atob(await ask(path)), (one) => one.charCodeAt(0));
            heard({ id }, [new DataView(raw.buffer)]);
        },
    };
    const module = import(URL.createObjectURL(new Blob([script], { type: 'text/javascript' })));
    module.then(({ default: widget }) => {
        window.close_ = widget.render({ model, el: document.getElementById('here') });
    });
}"""


@pytest.mark.slow
@pytest.mark.skipif(chromium() is None, reason="needs chromium: apt-get install chromium-headless-shell")
@pytest.mark.parametrize("live", [False, True])
def test_the_widget_in_a_browser(live, monkeypatch):
    playwright = pytest.importorskip("playwright.sync_api")
    monkeypatch.setattr(notebook_widget, "EMBEDDED_BYTES", 0 if live else 1 << 30)
    widget = widget_module.show_texts([reading()])
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium(), args=FLAGS)
        page = browser.new_page()
        mistakes = []
        page.on("pageerror", lambda error: mistakes.append(error))
        page.expose_function("ask", lambda path: base64.b64encode(widget.answers.answer(path)).decode())
        page.set_content(f"<style>{bundle('page.css')}</style><p>A notebook</p><div id='here'></div>")
        page.evaluate(START, [bundle("page.js"), widget.data])
        page.wait_for_selector("[role=gridcell]")
        page.locator("#here").press("2")
        page.wait_for_selector(".words [role=option]")
        assert page.locator(".words [role=option]").all_inner_texts() == WORDS
        until(page, "document.querySelector('.looks').textContent.includes('attends to')")
        assert "#" not in page.url, "a notebook's address is its own"
        page.evaluate("window.close_()")
        until(page, "document.getElementById('here').childElementCount === 0")
        assert mistakes == []
        browser.close()


def test_show_calls_the_registered_viewer(monkeypatch):
    calls = []
    viewer = SimpleNamespace(show_maps=lambda *given: calls.append(given))
    monkeypatch.setitem(upper_layers.importers, "widget", lambda: viewer)
    maps_of(3)["layer.0"].show(["a", "b", "c"])
    assert calls[0][1:] == (["a", "b", "c"], None, 0)
