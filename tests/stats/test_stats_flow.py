"""Divergence, groups and maps of heads, rollout and value-weighted norms: NumPy, SciPy and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import regard as rg
from regard.stats import head_groups, head_map, rollout, value_weighted
from regard.stats.head_distances import head_divergence

MASKS = {"none": None, "causal": rg.causal(), "window": rg.causal() & rg.window(3)}
every_mask = pytest.mark.parametrize("mask", MASKS)


def weights_of(mask=None, batch=2, heads=3, length=11):
    q, k, v = (2 * torch.randn(batch, heads, length, 4) for _ in range(3))
    return rg.Attention(mask=mask)(q, k, v).weights


def close(mine, theirs):
    np.testing.assert_allclose(mine.numpy(), theirs, atol=2e-6)


@every_mask
def test_divergence_is_its_definition(mask, small_blocks):
    maps = {name: weights_of(MASKS[mask], heads=heads, length=20) for name, heads in (("one", 2), ("two", 3))}
    rows = [0, 3, 4, 19, *range(5, 19)]
    w = np.concatenate([m.dense()[1].double().numpy() for m in maps.values()])[:, rows]
    p, q = w[:, None], w[None]
    m = (p + q) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        part = [np.where(x > 0, x * np.log(x / m), 0).sum(-1).mean(-1) for x in np.broadcast_arrays(p, q)]
    found = head_divergence(maps, rows, batch=1)
    close(found, (part[0] + part[1]) / 2)
    assert torch.equal(found, found.T) and not found.diagonal().any()


def test_rows_that_share_no_key_are_log_2_apart():
    q = torch.stack([torch.eye(4), torch.eye(4).roll(1, 0)])[None]
    weights = rg.Attention(normalizer=rg.normalizers.Hardmax())(q, torch.eye(4).expand(1, 2, 4, 4), q).weights
    assert head_divergence([weights])[0, 1].item() == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.8, 1.2])
def test_groups_are_those_of_average_linkage(threshold):
    hierarchy = pytest.importorskip("scipy.cluster.hierarchy")
    from scipy.spatial.distance import squareform

    places = torch.rand(15, 3, dtype=torch.float64)
    distance = torch.cdist(places, places).fill_diagonal_(0)
    labels = hierarchy.fcluster(
        hierarchy.linkage(squareform(distance.numpy(), checks=False), "average"), threshold, "distance"
    )
    expected = {tuple(np.flatnonzero(labels == label)) for label in set(labels)}
    assert set(head_groups(distance, threshold)) == expected


def test_a_map_of_heads_keeps_distances_of_a_plane():
    places = torch.randn(7, 2, dtype=torch.float64)
    distance = torch.cdist(places, places)
    found = head_map(distance)
    torch.testing.assert_close(torch.cdist(found, found), distance)
    torch.testing.assert_close(found.mean(0), torch.zeros(2, dtype=torch.float64))
    assert head_map(torch.zeros(1, 1)).tolist() == [[0.0, 0.0]]


@every_mask
def test_rollout_is_the_product_of_layers(mask, small_blocks):
    maps = {str(number): weights_of(MASKS[mask]) for number in range(3)}
    expected = np.eye(11)
    for weights in maps.values():
        expected = (0.5 * weights.dense()[1].double().numpy().mean(0) + 0.5 * np.eye(11)) @ expected
    found = rollout(maps, [2, 10, 2], batch=1)
    close(found, expected[[2, 10, 2]])
    close(found.sum(-1), np.ones(3))


def test_rollout_holds_no_square():
    x = torch.randn(1, 1, 6000, 4)
    window = [rg.Attention(mask=rg.causal() & rg.window(2))(x, x, x).weights] * 2
    (row,) = rollout(window, [5000])
    assert row.nonzero().flatten().tolist() == [4998, 4999, 5000]


@every_mask
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_value_weighted_norms_are_norms_of_vectors(mask, groups, small_blocks):
    weights, value, linear = weights_of(MASKS[mask], heads=4), torch.randn(2, groups, 11, 5), torch.randn(7, 20)
    found = value_weighted(weights, value, linear)
    w, v = weights.dense().double().numpy(), value.double().numpy().repeat(4 // groups, 1)
    parts = linear.double().numpy().T.reshape(4, 5, 7)
    vectors = np.einsum("bhij,bhje,hec->bhijc", w, v, parts)
    norms = np.linalg.norm(vectors, axis=-1)
    np.testing.assert_allclose(found.tile(), norms, atol=1e-5)
    np.testing.assert_allclose(
        found.tile(batch=1, head=(0, 2), cols=slice(2, 6)), norms[1:, [0, 2]][..., 2:6], atol=1e-5
    )
    np.testing.assert_allclose(found.carried(), norms.sum(-1), atol=2e-5)
    np.testing.assert_allclose(found.received(), norms.sum(-2), atol=2e-5)
    np.testing.assert_allclose(found.per_head(), norms.sum(-1).mean(-1), atol=2e-5)
    again = value_weighted(weights, value, linear.T.reshape(4, 5, 7))
    torch.testing.assert_close(again.norms, found.norms)


def test_bad_input_is_refused():
    short, long = weights_of(), weights_of(length=12)
    with pytest.raises(rg.RegardError, match="same numbers of queries and keys"):
        head_divergence([short, long])
    with pytest.raises(rg.RegardError, match="no rows"):
        head_divergence([short], [])
    with pytest.raises(rg.RegardError, match="the maps are multiplied"):
        rollout([short, long], [0])
    with pytest.raises(rg.RegardError, match="row 11 is out of range; the size of this axis is 11"):
        rollout([short], [11])
    with pytest.raises(rg.RegardError, match="rollout: batch 2 is out of range; the map has 2 texts"):
        rollout([short], [0], batch=2)
    with pytest.raises(rg.RegardError, match="distances are a square"):
        head_map(torch.zeros(2, 3))
    with pytest.raises(rg.RegardError, match="values are"):
        value_weighted(short, torch.randn(2, 2, 11, 4), torch.randn(8, 12))
    with pytest.raises(rg.RegardError, match="the projection is"):
        value_weighted(short, torch.randn(2, 3, 11, 4), torch.randn(8, 11))
