"""Reductions over tokens and offsets, and tables that merge over documents: against NumPy on dense weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import regard as rg
from regard.stats import STATISTICS, Agreement, Offsets, SameToken, profile, text_statistics
from regard.stats.statistics import is_punctuation
from regard.types import HeadTable

MASKS = {"none": None, "causal": rg.causal(), "window": rg.causal() & rg.window(3)}
every_mask = pytest.mark.parametrize("mask", MASKS)


def weights_of(length=11, mask=None, batch=1, heads=3, queries=None):
    q, k, v = (torch.randn(batch, heads, n, 4) for n in (queries or length, length, length))
    return rg.Attention(mask=mask)(q, k, v).weights


def text(length, seed=0):
    return [["the", "cat", ".", ",", "sat"][n] for n in np.random.default_rng(seed).integers(0, 5, length)]


def close(mine, theirs):
    np.testing.assert_allclose(mine.numpy(), theirs, atol=2e-6)


def test_offsets_are_of_positions_not_of_indices():
    weights = weights_of(queries=4)
    w = weights.dense().double().numpy()
    close(weights.summarize(Offsets(-1, 0))[0], np.stack([np.trace(w, 7 + d, 2, 3) for d in (-1, 0)], -1))


@every_mask
def test_tokens_of_one_text_are_those_of_all_texts(mask, small_blocks):
    """The tokens of queries are by default those of the last keys."""
    weights, ids = weights_of(mask=MASKS[mask], batch=2), torch.randint(0, 3, (2, 11))
    one, each, mixed = weights.summarize(SameToken(ids[0]), SameToken(ids), SameToken(ids[0], ids[1]))
    w, t = weights.dense().double().numpy(), ids.numpy()
    for found, keys, queries in ((one, t[[0, 0]], t[[0, 0]]), (each, t, t), (mixed, t[[0, 0]], t[[1, 1]])):
        same = (queries[:, :, None] == keys[:, None]) & ~np.eye(11, dtype=bool)
        close(found, (w * same[:, None]).sum(-1))


def test_heads_with_equal_rows_agree_with_none():
    x = torch.zeros(1, 2, 7, 4)
    assert rg.Attention()(x, x, x).weights.summarize(Agreement())[0].tolist() == [[[0.0] * 2] * 2]


@every_mask
def test_statistics_of_a_text_are_their_definitions(mask, small_blocks):
    tokens, weights = text(11), weights_of(mask=MASKS[mask])
    w, t = weights.dense()[0].double().numpy(), np.array(tokens)
    values = profile({"layer": weights}, tokens, statistics=text_statistics(tokens, chosen=[3, 4])).layers[0].values
    assert list(values)[: len(STATISTICS)] == [statistic.name for statistic in STATISTICS]
    close(values["first"], w[..., 0].sum(-1) / 11)
    marks = np.isin(t, [".", ","]) & (np.arange(11) > 0)
    close(values["punctuation"], w[..., marks].sum(-1).mean(-1))
    close(values["chosen"], w[..., 3:5].sum(-1).mean(-1))
    close(values["same"], (w * ((t[:, None] == t) & ~np.eye(11, dtype=bool)))[..., 1:].sum(-1).mean(-1))
    close(values["offsets"][:, 7], values["previous"])
    assert values["offsets"].shape == (3, 17)


def test_statistics_of_several_numbers_stay_out_of_the_table():
    tokens = text(5)
    result = profile({"layer": weights_of(5)}, tokens, statistics=text_statistics(tokens))
    assert "punctuation" in result.table() and "offsets" not in result.table()
    assert "punctuation" in HeadTable.of(result).table() and "offsets" not in HeadTable.of(result).table()


def measured(length, mask, seed):
    tokens, maps = text(length, seed), {name: weights_of(length, mask) for name in ("one", "two")}
    return maps, profile(maps, tokens, statistics=text_statistics(tokens))


@every_mask
def test_tables_merge_to_one_mean_over_all_queries(mask):
    results = [measured(length, MASKS[mask], length)[1] for length in (4, 9, 14)]
    tables = [HeadTable.of(result) for result in results]
    merged = HeadTable.over(results)
    assert merged.documents == 3
    backwards = tables[2].merge(tables[1]).merge(tables[0])
    for name in results[0].layers[0].values:
        counts = [n - (name == "evenness" and mask != "none") for n in (4, 9, 14)]
        expected = sum(n * table.values(name).double() for n, table in zip(counts, tables, strict=True)) / sum(counts)
        close(merged.values(name), expected.numpy())
        torch.testing.assert_close(backwards.values(name), merged.values(name))


def test_tables_of_different_models_do_not_merge():
    one = HeadTable.of(profile({"a": weights_of(5)}, text(5)))
    two = HeadTable.of(profile({"a": weights_of(5, heads=2)}, text(5)))
    with pytest.raises(rg.RegardError, match="differ in layers, heads or statistics"):
        one.merge(two)
    with pytest.raises(rg.RegardError, match="no profiles"):
        HeadTable.over([])
    with pytest.raises(rg.RegardError, match="no statistic 'same'"):
        one.values("same")


@pytest.mark.parametrize("ids", [torch.zeros(11), torch.zeros(10, dtype=torch.long)])
def test_tokens_that_do_not_fit_are_refused(ids):
    with pytest.raises(rg.RegardError, match="integer token numbers of shape"):
        weights_of().summarize(SameToken(ids))
    with pytest.raises(rg.RegardError, match="first offset"):
        Offsets(3, 2)


@pytest.mark.parametrize(("token", "is_one"), [("…", True), ('Ġ"', True), ("##!", True), ("a.", False), ("5", False)])
def test_punctuation_is_told_by_its_signs(token, is_one):
    assert is_punctuation(token) is is_one


#: Other masks than that of the attention, each for 2 batch entries and 11 tokens.
WHERE = {
    "later": ~rg.causal(),
    "near": rg.window(3),
    "far": ~rg.window(4) & rg.causal(),
    "documents": rg.masks.documents([4, 6, 1]),
    "prefix": rg.masks.prefix(5),
    "padding": rg.padding([9, 4]),
    "function": rg.mask_mod(lambda b, h, i, j: (i + j + h) % 3 == 0),
}


@pytest.mark.parametrize("where", WHERE)
@every_mask
def test_mass_where_is_the_sum_over_the_pairs_of_a_mask(mask, where, small_blocks):
    weights = weights_of(mask=MASKS[mask], batch=2)
    allowed = WHERE[where].dense(11, batch_size=2, num_heads=3)
    close(weights.summarize(rg.maps.MassWhere(WHERE[where]))[0], (weights.dense() * allowed).sum(-1))


@pytest.mark.parametrize("many", [1, 64])
@pytest.mark.parametrize("queries", [4, 11])
def test_many_offsets_are_sums_of_diagonals_of_positions(queries, many, small_blocks, monkeypatch):
    monkeypatch.setattr("regard.stats.statistics.MANY", many)
    weights, shift = weights_of(queries=queries), 11 - queries
    w = weights.dense().double().numpy()
    close(weights.summarize(Offsets(-6, 5))[0], np.stack([np.trace(w, d + shift, 2, 3) for d in range(-6, 6)], -1))
