"""Single queries of modules and of registered models run without a plan, on the kernel that one rule chooses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import regard as rg
from kernels import needs_kernel
from regard.engine import decoding
from regard.engine.kernel.attention import FEW_ROWS
from regard.engine.kernel.engine import FEWEST_NUMBERS
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


@needs_kernel
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize(("heads", "queries"), [(1, FEW_ROWS), (FEW_ROWS, 1), (2, FEW_ROWS // 2), (3, FEW_ROWS // 2)])
def test_the_kernel_takes_few_rows_of_a_key_head_without_gradients(heads, queries, learns, monkeypatch):
    monkeypatch.setattr(decoding, "can_run", lambda *tensors: True)
    monkeypatch.setattr(decoding, "few_rows_pay", lambda num_numbers, dtype: True)
    query, key = torch.zeros(1, 2 * heads, queries, 8, requires_grad=learns), torch.zeros(1, 2, 100, 8)
    assert decoding._kernel_pays(query, key, key) is (heads * queries <= FEW_ROWS and not learns)
    with torch.no_grad():
        assert decoding._kernel_pays(query, key, key) is (heads * queries <= FEW_ROWS)


@needs_kernel
@pytest.mark.parametrize("dtype", FEWEST_NUMBERS)
def test_the_kernel_takes_many_numbers_of_keys_and_values(dtype, monkeypatch):
    monkeypatch.setattr(decoding, "can_run", lambda *tensors: True)
    for length in (2 * FEWEST_NUMBERS[dtype] // 12 - 8, 2 * FEWEST_NUMBERS[dtype] // 12 + 8):
        query, key, value = (
            torch.zeros(1, 1, 1, 1, dtype=dtype).expand(1, 1, n, D) for n, D in ((1, 8), (length, 8), (length, 4))
        )
        assert decoding._kernel_pays(query, key, value) is (12 * length >= 2 * FEWEST_NUMBERS[dtype])
