"""`MultiHeadAttention.from_projections`: W_q, W_k, W_v and W_o of a class that a student wrote."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import regard as rg

from_projections = rg.nn.MultiHeadAttention.from_projections


class OwnAttention(nn.Module):
    """Multi-head attention as lectures write it, with a choice of widths, biases and shared heads."""

    def __init__(self, width, num_heads, shared=1, memory=None, biases=(True, True, True, True), joins_only=False):
        super().__init__()
        self.num_heads, self.shared, inner = num_heads, shared, width // shared
        of_query, of_key, of_value, of_output = biases
        self.W_q = nn.Linear(width, width, bias=of_query)
        self.W_k = nn.Linear(memory or width, inner, bias=of_key)
        self.W_v = nn.Linear(memory or width, inner, bias=of_value)
        self.W_o = None if joins_only else nn.Linear(width, width, bias=of_output)

    def forward(self, x, memory):
        split = lambda y, heads: y.view(*y.shape[:2], heads, -1).transpose(1, 2)  # noqa: E731
        q, k, v = (split(W(y), h) for W, y, h in self.parts(x, memory))
        k, v = (t.repeat_interleave(self.shared, 1) for t in (k, v))
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        joined = (weights @ v).transpose(1, 2).flatten(2)
        return (joined if self.W_o is None else self.W_o(joined)), weights

    def parts(self, x, memory):
        few = self.num_heads // self.shared
        return (self.W_q, x, self.num_heads), (self.W_k, memory, few), (self.W_v, memory, few)


@given(data=st.data(), shared=st.sampled_from([1, 2, 4]), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_the_module_computes_what_the_class_computes(data, shared, dtype):
    biases = data.draw(st.tuples(*[st.booleans()] * 4))
    memory_width, joins_only = data.draw(st.sampled_from([None, 6])), data.draw(st.booleans())
    mine = OwnAttention(8, 4, shared, memory_width, biases, joins_only).to(dtype)
    ours = from_projections(mine.W_q, mine.W_k, mine.W_v, mine.W_o, num_heads=4)
    x, memory = torch.randn(2, 3, 8, dtype=dtype), torch.randn(2, 5, memory_width or 8, dtype=dtype)
    expected, weights = mine(x, memory)
    output, found = ours(x, memory)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(found.dense(), weights)
    count = sum(p.numel() for p in mine.parameters())
    if all(biases) or not any(biases):
        assert sum(p.numel() for p in ours.parameters()) == count


def test_the_weights_are_copies_and_the_mode_is_kept():
    mine = OwnAttention(8, 2).eval()
    ours = from_projections(mine.W_q, mine.W_k, mine.W_v, mine.W_o, num_heads=2, is_causal=True)
    nn.init.zeros_(mine.W_q.weight)
    assert not ours.training and ours.is_causal and ours.query.weight.abs().sum() > 0


LAYERS = {
    "heads that do not divide": ((nn.Linear(8, 8),) * 4, 3),
    "an output of another width": ((*(nn.Linear(8, 8),) * 3, nn.Linear(8, 6)), 2),
    "a wider query": ((nn.Linear(8, 16), *(nn.Linear(8, 8),) * 3), 2),
    "values unlike keys": ((nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 8), nn.Linear(8, 8)), 2),
    "half a head": ((nn.Linear(8, 8), nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(8, 8)), 2),
}


@pytest.mark.parametrize("case", LAYERS)
def test_other_layers_are_refused_with_their_widths(case):
    layers, num_heads = LAYERS[case]
    with pytest.raises(rg.RegardError, match=r"from_projections: .*got query 8 -> .*x @ W, is a linear layer"):
        from_projections(*layers, num_heads=num_heads)


def test_a_matrix_is_no_layer():
    with pytest.raises(rg.RegardError, match="query must be a Linear, got Parameter"):
        from_projections(*(nn.Parameter(torch.randn(8, 8)),) * 4, num_heads=2)


def test_an_array_is_told_to_be_a_tensor():
    with pytest.raises(rg.RegardError, match=r"inputs must be tensors, got ndarray.*torch\.tensor\(array"):
        rg.nn.MultiHeadAttention(8, 2)(torch.zeros(1, 3, 8).numpy())


def test_a_number_stands_for_the_first_positions():
    sinusoidal = rg.encodings.Sinusoidal()
    assert torch.equal(sinusoidal.table(7, 8), sinusoidal.table(torch.arange(7), 8))
    with pytest.raises(rg.RegardError, match=r"positions must be a Tensor or an integer, got list"):
        sinusoidal.table([1, 2], 8)
