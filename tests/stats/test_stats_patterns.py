"""The four patterns: heads made for each, and their definitions in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import regard as rg
from exact_maps import exact
from regard.stats import Offsets, patterns
from regard.stats.patterns import FEW, NEAR

N = 40
MASKS = {"none": None, "causal": rg.causal()}
every_mask = pytest.mark.parametrize("mask", MASKS)


def weights_of(mask=None, batch=2, length=N):
    q, k, v = (2 * torch.randn(batch, 3, length, 4) for _ in range(3))
    return rg.Attention(mask=mask)(q, k, v).weights


def exact_of(rows):
    """A map with these rows (heads, n, n), each divided by its sum."""
    return exact(rows / rows.sum(-1, keepdims=True))


def above(score, expected):
    return np.clip((score - expected) / (1 - expected), 0, 1)


def dense_patterns(w, allowed, lengths):
    """The definitions, on (heads, n, n) weights."""
    n, i, j = w.shape[-1], *np.indices(w.shape[-2:])
    counts = allowed.sum(-1)
    even, near, choice = allowed / counts[:, None], np.abs(i - j) <= NEAR, counts > 1
    received, keys = w.sum(1), max(1, round(FEW * n))
    most = np.argsort(-received, -1)[:, :keys]
    ratio = 1 / (w**2).sum(-1)
    segment = np.repeat(np.arange(len(lengths)), lengths)
    same = segment[:, None] == segment
    expected = np.zeros(len(w))
    for d in range(1 - n, n):
        expected += np.trace(w, d, 1, 2) * np.diagonal(same, d).mean() / n
    return {
        "local": above((w * near).sum((1, 2)) / n, (even * near).sum() / n),
        "global_keys": above(np.take_along_axis(received, most, -1).sum(-1) / n, even.sum(0)[most].sum(-1) / n),
        "distributed": ((ratio - 1)[:, choice] / (counts - 1)[choice]).mean(-1),
        "block": above((w * same).sum((1, 2)) / n, expected),
        "participation": (ratio / counts).mean(-1),
    }


@every_mask
def test_patterns_are_their_definitions(mask, small_blocks):
    weights, lengths = weights_of(MASKS[mask]), [7, 20, 13]
    allowed = np.tril(np.ones((N, N))) if MASKS[mask] is not None else np.ones((N, N))
    found = patterns(weights, lengths, batch=1)
    for name, expected in dense_patterns(weights.dense()[1].double().numpy(), allowed, lengths).items():
        np.testing.assert_allclose(getattr(found, name), expected, atol=1e-5, err_msg=name)


@every_mask
def test_sums_by_offset_are_sums_of_diagonals(mask, small_blocks, monkeypatch):
    monkeypatch.setattr("regard.stats.statistics.MANY", 1)
    weights = weights_of(MASKS[mask], length=13)
    w = weights.dense().double().numpy()
    expected = np.stack([np.trace(w, d, 2, 3) for d in range(-12, 13)], -1)
    np.testing.assert_allclose(weights.summarize(Offsets(-12, 12))[0], expected, atol=1e-5)


def test_a_head_made_for_a_pattern_scores_highest_there():
    i, j = np.indices((N, N))
    blocks = np.repeat(np.arange(4), 10)
    made = {
        "local": np.abs(i - j) <= 1,
        "global_keys": j == 17,
        "distributed": i >= 0,
        "block": blocks[:, None] == blocks,
    }
    found = patterns(exact_of(np.stack(list(made.values())).astype(float)))
    scores = np.stack([getattr(found, name).numpy() for name in made])
    assert (scores.argmax(0) == np.arange(4)).all(), scores
    np.testing.assert_allclose(scores.diagonal(), [1, 1, 1, 1], atol=1e-4)
    assert scores[3, 0] < 0.05 and scores[3, 2] < 0.05, "nearness and evenness are no blocks"
    assert found.participation.tolist() == pytest.approx([(2 * 2 + 38 * 3) / 40 / 40, 1 / 40, 1, 0.25], abs=1e-4)
    assert "global_keys" in found.table() and len(found.table().splitlines()) == 5


@pytest.mark.parametrize("length", [1, 2, 3])
def test_tiny_texts_have_patterns_between_0_and_1(length):
    found = patterns(weights_of(rg.causal(), length=length))
    for name in ("local", "global_keys", "distributed", "block", "participation"):
        score = getattr(found, name)
        assert bool(((score >= 0) & (score <= 1)).all()), name


def test_bad_input_is_refused():
    with pytest.raises(rg.RegardError, match="add up to 40"):
        patterns(weights_of(), [10, 20])
    with pytest.raises(rg.RegardError, match="batch 2 is out of range"):
        patterns(weights_of(), batch=2)
    q, k = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 5, 4)
    with pytest.raises(rg.RegardError, match="the same text"):
        patterns(rg.Attention()(q, k, k).weights)
