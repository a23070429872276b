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
    assert hasattr(bias, "table") == bias.relative == (is_diagonal and shape == (1, 2, 5, 7))


@pytest.mark.parametrize("first", [0, 3])
def test_a_given_tensor_has_the_positions_of_its_call(first):
    positions = rg.types.Positions(first + 2, rg.types.Spans.of((first, first + 7)))
    tensor = torch.randn(1, 2, 5, 7)
    bias = bias_of(tensor, positions, 5, 7)
    assert bias.term(rg.types.Grid.whole(positions, 1, 2, 5), None, None).equal(tensor)


@pytest.mark.parametrize("name", sorted(set(BIASES) - {"t5"}))  # its bucket of the distance 0 after a query is unread
def test_every_learned_number_of_a_bias_has_a_gradient(name):
    """A text that is longer than any reach meets all distances; a number that no pair reads would be one too many."""
    bias = BIASES[name](2, 8)
    parameters = list(getattr(bias, "parameters", list)())
    for parameter in parameters:
        torch.nn.init.normal_(parameter)
    q, k = torch.randn(1, 2, 300, 8), torch.randn(1, 2, 300, 8)
    positions = rg.types.Positions.aligned_to_end(300, 300)
    term = bias.transform(
        torch.zeros(1, 2, 300, 300),
        rg.types.Grid.whole(positions, 1, 2, 300),
        *bias.prepare(q, k, positions),
    )
    for gradient in torch.autograd.grad((term * torch.rand(300, 300)).sum(), parameters) if parameters else ():
        assert gradient.all()


@pytest.mark.parametrize("keys", [0, 1, 30])
def test_the_network_of_fire_reads_as_many_pairs_at_a_time_as_it_may(keys, monkeypatch):
    bias, network, sizes = rg.biases.FIREBias(2, hidden=4), rg.biases.FIREBias._network, []
    monkeypatch.setattr("regard.pieces.distance_bias.HIDDEN_NUMBERS", 4 * 90)
    monkeypatch.setattr(type(bias), "_network", lambda *given: sizes.append(given[1].numel()) or network(*given))
    term = bias.term(rg.types.Grid.whole(rg.types.Positions.of(0, 20, keys), 1, 2, 20), None, None)
    assert term.shape == (1, 2, 20, keys) and sum(sizes) == 20 * keys
    assert max(sizes) == min(90, 20 * keys)


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
