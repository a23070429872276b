"""Single queries of modules and of registered models run without a plan, on the kernel that one rule chooses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import regard as rg
from kernels import needs_kernel
from regard.engine import decoding
from regard.hf import backend
from regard.hf.masks.graph_masks import GraphMask


@needs_kernel
@pytest.mark.parametrize("pays", [True, False])
@torch.no_grad()
def test_one_rule_chooses_the_kernel_of_a_single_query(pays, monkeypatch):
    chosen, by_kernel = [], decoding.decode_by_kernel
    monkeypatch.setattr(decoding, "_kernel_pays", lambda *tensors: pays)
    monkeypatch.setattr(decoding, "decode_by_kernel", lambda *given: chosen.append(given) or by_kernel(*given))
    query, (key, value) = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 2, 9, 8)
    expected = rg.Attention()(query, key, value, engine="reference").output
    output = backend.run(nn.Module(), query, key, value, None)[0]
    torch.testing.assert_close(output, expected.transpose(1, 2))
    module, x = rg.nn.MultiHeadAttention(8, 2).eval(), torch.randn(1, 9, 8)
    torch.testing.assert_close(module(x[:, -1:], module.keys(x)).output, module(x, x).output[:, -1:])
    assert len(chosen) == (2 if pays else 0)


REAL = torch.ones(1, 9, dtype=torch.bool)
#: The position of the query, whether the mask is causal, its window, the real keys, the groups; for 9 keys.
MASKS = {
    "no mask": (None, True),
    "the last query": (GraphMask(8, 0, True, 0, None, None), True),
    "an earlier query": (GraphMask(7, 0, True, 0, None, None), False),
    "a query that is not causal": (GraphMask(3, 0, False, 0, None, None), True),
    "a wide window": (GraphMask(8, 0, True, 9, None, None), True),
    "a narrow window": (GraphMask(8, 0, True, 8, None, None), False),
    "real keys": (GraphMask(8, 0, True, 0, REAL, None), True),
    "padding": (GraphMask(8, 0, True, 0, REAL & (torch.arange(9) > 0), None), False),
    "keys that are not written yet": (GraphMask(8, 0, True, 0, REAL[:, :5], None), False),
    "groups": (GraphMask(8, 0, True, 0, None, torch.zeros(1, 9)), False),
}


@pytest.mark.parametrize("name", MASKS)
def test_which_masks_let_a_single_query_attend_to_all_keys(name):
    mask, expected = MASKS[name]
    assert backend._is_plain(mask, 1, 9, {}) is expected
    assert not backend._is_plain(mask, 2, 9, {})
    assert not backend._is_plain(mask, 1, 9, {"softcap": 3.0})
    assert not backend._is_plain(mask, 1, 9, {"s_aux": torch.zeros(4)})
