"""Biases by themselves: what kernels and engines read of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard as rg
from drawn import BIASES
from regard.pieces.bias import clipped
from regard.pieces.tensor_bias import bias_of


@given(reach=st.integers(0, 5), margin=st.integers(0, 5), I=st.integers(0, 4))
def test_terms_by_distance_repeat_the_outermost_beyond_the_reach(reach, margin, I):
    bias, query = rg.biases.ShawBias(4, reach=reach), torch.randn(2, 3, I, 4)
    rows, _ = bias.prepare(query, query, rg.types.Positions.aligned_to_end(I, I))
    distances = range(-reach - margin, reach + margin + 1)
    found = clipped(rows, distances, reach)
    vectors = bias.keys[[min(max(d, -reach), reach) + reach for d in distances]]
    torch.testing.assert_close(found, query @ vectors.T / 4**0.5)


@pytest.mark.parametrize("width", [16, 256])
def test_vectors_begin_with_a_length_near_one(width):
    """So the terms are as large as scores of unit vectors, whatever the width."""
    lengths = rg.biases.ShawBias(width, reach=200).keys.norm(dim=1)
    assert lengths.mean().item() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_adds_the_same_number_to_a_pair_in_whatever_order_pairs_are_asked_for(name):
    q, k = torch.randn(2, 2, 9, 8), torch.randn(2, 2, 11, 8)
    weights = rg.Attention(bias=BIASES[name](2, 8))(q, k, k).weights
    dense = weights.dense()
    for rows, cols in ((torch.randperm(9), torch.randperm(11)), (torch.tensor([7, 7, 0]), torch.tensor([3, 10, 3, 4]))):
        torch.testing.assert_close(weights.tile(rows=rows, cols=cols), dense[:, :, rows][..., cols])


@pytest.mark.parametrize("shape", [(1, 2, 5, 7), (2, 1, 5, 7), (1, 1, 1, 7), (2, 2, 5, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("is_diagonal", [False, True])
def test_a_given_tensor_is_added_pair_by_pair_and_kept_as_diagonals_where_it_has_only_those(shape, is_diagonal):
    tensor, positions = torch.randn(shape), rg.types.Positions.aligned_to_end(5, 7)
    if is_diagonal:
        distances = torch.arange(shape[3]) - torch.arange(shape[2])[:, None]
        tensor = torch.randn(*shape[:2], 12)[..., distances + 5]
    bias = bias_of(tensor, positions, 5, 7)
    term = bias.term(rg.types.Grid.whole(positions, 2, 2, 5), None, None)
    assert term.expand(2, 2, 5, 7).equal(tensor.expand(2, 2, 5, 7))
    assert hasattr(bias, "table") == (is_diagonal and shape == (1, 2, 5, 7))


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_says_whether_its_term_depends_on_the_distance_alone(name):
    bias = BIASES[name](2, 8)
    if not isinstance(bias, rg.biases.AdditiveBias):
        assert not bias.relative
        return
    for parameter in getattr(bias, "parameters", list)():
        torch.nn.init.normal_(parameter)
    positions = rg.types.Positions.aligned_to_end(9, 9)
    grid, (query, key) = rg.types.Grid.whole(positions, 1, 2, 9), torch.randn(2, 1, 2, 9, 8)
    term = bias.term(grid, *bias.prepare(query, key, positions)).expand(1, 2, 9, 9)
    assert bias.relative is term[..., 1:, 1:].allclose(term[..., :-1, :-1])
