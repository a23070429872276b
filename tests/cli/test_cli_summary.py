"""The summary of `regard analyze` on maps that were made: which heads it names as most focused, and at what they
look.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("rich")

import regard as rg
from exact_maps import exact
from regard.cli.report import extremes, facts, role_lines
from regard.types import TextReading

N = 9


def on(*keys, weight=1.0):
    """Rows with `weight` shared by some keys, the rest of it by all others."""
    rows = np.full((N, N), (1 - weight) / (N - len(keys)))
    rows[:, list(keys)] = weight / len(keys)
    return rows


@pytest.mark.parametrize("tokens", [list("abcdefghi"), ["[CLS]", *"bcdefgh", "[SEP]"]], ids=["bare", "special"])
def test_the_most_focused_head_is_no_sink(tokens):
    special = tokens[0] == "[CLS]"
    resting = on(0, 8, weight=0.99) if special else on(0, weight=0.99)
    sharp, half = on(3, weight=0.9), (on(0) + on(2, 5)) / 2
    reading = TextReading.of("", {"layers.4": exact([resting, sharp, half, np.full((N, N), 1 / N)])}, tokens)
    left = np.delete(np.stack([sharp, np.full((N, N), 1 / N)]), [0, 8] if special else [0], axis=-1)[:, 0]
    left /= left.sum(-1, keepdims=True)
    sharpest, broadest = -(left * np.log(left)).sum(-1)
    printed = extremes(reading.profile).plain
    assert f"Most focused: L4.H1 (effectively {math.exp(sharpest):.1f} tokens)" in printed
    assert f"broadest: L4.H3 (effectively {math.exp(broadest):.1f} tokens)" in printed


def test_where_every_head_rests_nothing_is_called_focused():
    reading = TextReading.of("", {"layer": exact([on(0, weight=0.9), on(0, weight=0.8)])}, list("abcdefghi"))
    said = extremes(reading.profile).plain
    assert said == "Every head puts most of its weight on the first token and on special tokens."


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_sink_on_a_short_text_looks_neither_at_itself_nor_at_the_token_before(length):
    rows = np.zeros((1, length, length))
    rows[..., 0] = 1
    reading = TextReading.of("", {"layer": exact(rows, rg.causal())}, list("abc")[:length])
    assert not any("of its weight on" in line.plain for line in role_lines(reading))


def test_a_short_text_tells_where_a_head_looks_beside_the_first_token():
    rows = np.eye(N, k=-1)
    rows[0, 0] = 1
    (places, _) = (line.plain for line in role_lines(TextReading.of("", {"layer": exact([rows])}, list("abcdefghi"))))
    assert places == "L0.H0 puts 100 % of its weight on the previous token."


@pytest.mark.parametrize(
    ("heads", "said"),
    [([1], "1 layer x 1 head"), ([2], "1 layer x 2 heads"), ([1, 1], "2 layers x 1 head"), ([1, 2], "2 layers")],
)
def test_counts_of_one_have_no_plural(heads, said):
    """A layer of one head was "1 layer x 1 heads"."""
    maps = {f"layers.{at}": exact([np.full((N, N), 1 / N)] * count) for at, count in enumerate(heads)}
    reading = TextReading.of("", maps, list("abcdefghi"))
    assert facts(SimpleNamespace(reading=reading, error=None)) == f"{N} tokens, {said}."
