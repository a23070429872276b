"""Queries without a key are in no mean of a head: a text with them has the statistics of the text without them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import regard as rg
from regard.drawing.figures import offset_bars
from regard.stats import cache_split, locality, patterns, profile, text_statistics
from regard.stats.profile import HeadTable
from regard.stats.statistics import HeadStatistic
from regard.stats.text_reading import TextReading, nearby_shares
from regard.viewer.findings import _received, nearby

WORDS = ["[CLS]", "it", "is", ",", "it", "was", ".", "so", "is", "it", "now"]


def padded(empty, heads=3):
    """A causal map of n tokens, and that of the same tokens before so many queries and keys of padding.

    The padding has no keys, and no query may attend to it.
    """
    n = len(WORDS)
    q, k, v = torch.randn(3, 1, heads, n + empty, 4)
    real = torch.arange(n + empty) < n
    mask = torch.ones(n + empty, n + empty, dtype=torch.bool).tril() & real & real[:, None]
    alone = rg.Attention(mask=rg.causal())(*(x[:, :, :n] for x in (q, k, v))).weights
    return alone, rg.attend(q, k, v, mask=mask).weights


@pytest.mark.parametrize("empty", [1, 5, 40])
def test_every_statistic_is_that_of_the_queries_with_keys(empty, small_blocks):
    alone, with_padding = padded(empty)
    of_text = profile({"layer": alone}, WORDS, statistics=text_statistics(WORDS, chosen=[2])).layers[0]
    tokens = [*WORDS, *["[PAD]"] * empty]
    statistics = text_statistics(tokens, chosen=[2])
    found = profile({"layer": with_padding}, tokens, special=[0], statistics=statistics).layers[0]
    for name, values in of_text.values.items():
        np.testing.assert_allclose(found.values[name], values, atol=2e-6, err_msg=name)
        np.testing.assert_array_equal(found.counts[name], of_text.counts[name], err_msg=name)


def test_documents_are_weighted_by_their_queries_with_keys():
    alone, with_padding = padded(7)
    other = rg.Attention()(*torch.randn(3, 1, 3, 5, 4)).weights
    text, mixed, more = (
        HeadTable.of(profile({"layer": weights}, ["a"] * weights.shape[2])) for weights in (alone, with_padding, other)
    )
    for name in ("entropy", "reach", "first"):
        np.testing.assert_allclose(mixed.merge(more).values(name), text.merge(more).values(name), atol=2e-6)


def test_a_statistic_of_ones_own_leaves_empty_rows_out():
    class Last(HeadStatistic):
        name, meaning = "last", "share of the weight on the token itself"

        def reductions(self, weights, special):
            return (rg.maps.MassOn([2]),)

    alone, with_padding = padded(9)
    values = [
        profile({"layer": weights}, ["a"] * weights.shape[2], statistics=[Last()]).values("last")[0]
        for weights in (alone, with_padding)
    ]
    np.testing.assert_allclose(*values, atol=1e-6)


def test_a_map_of_empty_rows_has_statistics_of_0():
    x = torch.randn(1, 2, 4, 8)
    weights = rg.attend(x, x, x, mask=torch.zeros(4, 4, dtype=torch.bool)).weights
    layer = profile({"layer": weights}, list("abcd"), statistics=text_statistics(list("abcd"))).layers[0]
    assert all(not values.any() and not layer.counts[name].any() for name, values in layer.values.items())


def test_patterns_and_locality_are_those_of_the_queries_with_keys():
    alone, with_padding = padded(6)
    for name in ("local", "distributed", "participation"):
        np.testing.assert_allclose(getattr(patterns(with_padding), name), getattr(patterns(alone), name), atol=2e-6)
    for name in ("distance", "near"):
        layers = [locality({"layer": weights}, within=2).layers[0] for weights in (alone, with_padding)]
        np.testing.assert_allclose(getattr(layers[1], name), getattr(layers[0], name), atol=2e-6)


def test_the_split_of_a_cache_leaves_padding_on_the_left_out():
    """Of 12 tokens the first 8 are padding, so of the queries from 5 on three have no key."""
    q, k, v = torch.randn(3, 1, 2, 12, 4)
    weights = rg.Attention(mask=rg.causal() & rg.masks.padding(torch.arange(12)[None] >= 8))(q, k, v).weights
    dense = weights.dense()[0].double().numpy()
    i, j = np.indices((12, 12))
    far = (dense * ((j >= 1) & (i - j >= 2))).sum(-1)[:, 8:].mean(-1)
    layer = cache_split({"layer": weights}, sinks=1, window=2).layers["layer"]
    np.testing.assert_allclose(layer.beyond, far, atol=1e-6)


def test_the_share_of_negative_weight_is_that_of_rows_with_weight():
    x = torch.randn(1, 2, 8, 4)
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[5:] = False
    signed = rg.attend(x, x, x, attention=rg.Attention(normalizer=rg.normalizers.Unnormalized()), mask=mask).weights
    dense = signed.dense()[0, :, :5].double().numpy()
    share = (-dense.clip(max=0).sum(-1) / np.abs(dense).sum(-1)).mean()
    assert profile({"layer": signed}, list("abcdefgh")).layers[0].negative == pytest.approx(share, abs=1e-6)


def test_findings_of_the_page_share_the_weight_of_the_queries_with_keys():
    alone, with_padding = padded(30)
    of_text, found = (_received(profile({"layer": w}, ["a"] * w.shape[2])) for w in (alone, with_padding))
    np.testing.assert_allclose(found[0][: len(WORDS)], of_text[0], atol=1e-6)
    assert found[1] == pytest.approx(of_text[1])


def test_the_page_names_the_head_of_the_previous_token_beside_padding():
    """Head 0 puts half of its weight on the previous token, in a text of 10 words and in one with 30 empty rows."""
    cards = []
    for empty in (0, 30):
        n = 10 + empty
        q, k = torch.zeros(1, 1, n, n), torch.eye(n).expand(1, 1, n, n)
        q[0, 0, range(1, n), range(n - 1)] = math.log(9)  # against 9 others: 9 / 18 on the previous token
        real = torch.arange(n) < 10
        attention = rg.Attention(score=rg.Dot(scale=1.0))
        weights = rg.attend(q, k, k, attention=attention, mask=real & real[:, None]).weights
        reading = TextReading.of("padded", {"layer": weights}, [f"w{i}" for i in range(n)])
        (share,) = nearby_shares(reading, "previous")
        assert share.value == pytest.approx(0.5)
        cards += [card.kind for card in nearby(reading)]
    assert cards == ["previous", "previous"]


def test_the_chart_of_offsets_has_the_shares_of_queries_with_keys():
    figures = [offset_bars(weights) for weights in padded(8)]
    heights = [[bar.get_height() for axes in figure.axes for bar in axes.patches] for figure in figures]
    np.testing.assert_allclose(*heights, atol=1e-6)
