"""Biases by themselves: what kernels and engines read of them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

import regard as rg


@given(reach=st.integers(0, 5), margin=st.integers(0, 5), I=st.integers(0, 4))
def test_terms_by_distance_repeat_the_outermost_beyond_the_reach(reach, margin, I):
    bias, query = rg.biases.ShawBias(4, reach=reach), torch.randn(2, 3, I, 4)
    rows, _ = bias.prepare(query, query, rg.types.Positions.aligned_to_end(I, I))
    found = bias.by_distance(rows, margin)
    vectors = bias.keys[[min(max(d, -reach), reach) + reach for d in range(-reach - margin, reach + margin + 1)]]
    torch.testing.assert_close(found, query @ vectors.T / 4**0.5)
