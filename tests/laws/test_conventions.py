"""Conventions on which libraries disagree: each is fixed here (design, section 7)."""

from __future__ import annotations

import ast
import inspect

import torch
from torch.nn import functional as F

import regard as rg
from regard.pieces.dropout import kept
from regard.reference import attention, basics, biases, masks, normalizers, positions, scores, transitions


def inputs(I, J, H=1, G=1, D=4):
    return torch.randn(1, H, I, D), torch.randn(1, G, J, D), torch.randn(1, G, J, D)


def test_true_means_may_attend_as_in_sdpa_and_not_as_in_multihead_attention():
    q, k, v = inputs(3, 3)
    mask = torch.tensor([[True, False, False], [True, True, False], [True, True, True]])
    output = rg.Attention(mask=rg.mask_tensor(mask))(q, k, v).output
    torch.testing.assert_close(output, F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def test_a_window_of_w_sees_w_keys():
    weights = rg.Attention(mask=rg.causal() & rg.window(3))(*inputs(9, 9)).weights.dense()
    assert (weights[0, 0] > 0).sum(-1).tolist() == [1, 2, 3, 3, 3, 3, 3, 3, 3]


def test_causal_aligns_to_the_end_where_torch_aligns_to_the_start():
    q, k, v = inputs(2, 5)
    seen = rg.Attention(mask=rg.causal())(q, k, v)
    assert (seen.weights.dense()[0, 0] > 0).sum(-1).tolist() == [4, 5]
    bottom_right = torch.ones(2, 5, dtype=torch.bool).tril(3)
    torch.testing.assert_close(seen.output, F.scaled_dot_product_attention(q, k, v, attn_mask=bottom_right))


def test_an_empty_row_gives_zeros():
    q, k, v = inputs(4, 2)
    seen = rg.Attention(mask=rg.causal())(q, k, v + 10)
    assert not seen.output[:, :, :2].any() and not seen.weights[:, :, :2].any()
    assert seen.weights.row_statistic[0][0, 0, :2].isneginf().all()


def test_the_statistic_is_the_natural_log_in_float32():
    q, k, v = (t.bfloat16() for t in inputs(3, 5))
    row_statistic = sum(rg.Attention()(q, k, v).weights.row_statistic)  # a number, and what its rounding took
    assert row_statistic.dtype == torch.float32
    exact = (q.double() @ k.double().transpose(-1, -2) / 2).logsumexp(-1)
    torch.testing.assert_close(row_statistic.double(), exact, rtol=1e-2, atol=1e-2)


def test_weights_are_those_before_dropout():
    q, k, v = inputs(6, 6)
    dropping = rg.Attention(dropout=0.5)(q, k, v)
    torch.testing.assert_close(dropping.weights.dense(), rg.Attention()(q, k, v).weights.dense())
    assert not torch.allclose(dropping.output, dropping.weights.dense() @ v)


def test_dropout_keeps_the_mean_and_drops_its_share():
    q, k, v = torch.zeros(1, 1, 400, 4), torch.zeros(1, 1, 500, 4), torch.ones(1, 1, 500, 1)
    output = rg.Attention(dropout=0.25)(q, k, v).output
    deviation = (0.25 / 0.75 / 500) ** 0.5
    assert abs(output.mean() - 1) < 5 * deviation / 400**0.5
    assert 0.8 < output.std() / deviation < 1.2


def test_dropout_of_other_seeds_and_places_is_other_dropout():
    """No two of them agree more than chance allows, and the first weight of the first seed is dropped by chance too."""
    grid = rg.types.Grid.whole(rg.types.Positions.aligned_to_end(40, 50), 3, 2, 40)
    flips = {seed: kept(grid, 0.5, seed) for seed in range(60)}
    patterns = [flips[seed][b, h].flatten() for seed in range(4) for b in range(3) for h in range(2)]
    for n, one in enumerate(patterns):
        for other in patterns[:n]:
            assert abs((one == other).double().mean() - 0.5) < 6 * 0.5 / 2000**0.5
    assert 10 < sum(bool(flip[0, 0, 0, 0]) for flip in flips.values()) < 50
    for rate in (0.001, 0.1, 0.999):
        share = float(
            (~kept(rg.types.Grid.whole(rg.types.Positions.aligned_to_end(200, 500), 2, 2, 200), rate, 7))
            .double()
            .mean()
        )
        assert abs(share - rate) < 5 * (rate * (1 - rate) / 400_000) ** 0.5


def test_each_call_drops_other_weights():
    """200 calls draw 200 seeds of 2^31: that two are the same has a chance of 1 in 100,000."""
    q, k, v = torch.zeros(1, 1, 8, 4), torch.zeros(1, 1, 64, 4), torch.eye(64)[None, None]
    attention = rg.Attention(dropout=0.5)
    patterns = {tuple(attention(q, k, v).output.flatten().tolist()) for _ in range(200)}
    assert len(patterns) == 200
    torch.manual_seed(0)
    first = attention(q, k, v).output
    torch.manual_seed(0)
    torch.testing.assert_close(attention(q, k, v).output, first, rtol=0, atol=0)


def test_query_heads_share_key_heads_in_consecutive_groups():
    q, k, v = inputs(5, 5, H=6, G=2)
    repeated = [t.repeat_interleave(3, dim=1) for t in (k, v)]
    torch.testing.assert_close(rg.Attention()(q, k, v).output, rg.Attention()(q, *repeated).output)


def test_the_layout_is_batch_heads_length_width():
    seen = rg.Attention()(torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 6))
    assert seen.output.shape == (2, 3, 5, 6) and seen.weights.shape == (2, 3, 5, 7)


def test_the_result_always_has_the_same_type():
    q, k, v = inputs(5, 5)
    for options in ({}, {"engine": "blocked"}, {"cache": rg.GrowingCache()}):
        assert type(rg.Attention()(q, k, v, **options)) is rg.types.AttentionOutput


def test_adding_to_the_scores_is_declared_and_softcap_does_not():
    q, k, v = inputs(5, 5)
    capped = rg.Attention(bias=rg.biases.Softcap(1.0))
    assert "fused" in rg.plan(q, k, v, attention=capped).refused
    assert "fused" not in rg.plan(q, k, v, attention=rg.Attention(bias=rg.ALiBi(1))).refused


REFERENCE = (attention, basics, biases, masks, normalizers, positions, scores, transitions)


def test_the_reference_borrows_no_computation_from_the_pieces():
    """It reads fields and names of rules. It calls only what the caller wrote: predicates, filters and scalings."""
    known, methods = set(), set()
    for source in REFERENCE:
        nodes = [*ast.walk(ast.parse(inspect.getsource(source)))]
        of_names = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
        modules = {name for name, value in vars(source).items() if inspect.ismodule(value)}
        modules = {name for name in modules if getattr(source, name).__name__.startswith("regard.")}
        for node in of_names:
            if node.value.id in modules and hasattr(getattr(source, node.value.id), node.attr):
                borrowed = getattr(getattr(source, node.value.id), node.attr)
                is_named = isinstance(borrowed, tuple) and all(isinstance(name, str) for name in borrowed)
                assert inspect.isclass(borrowed) or isinstance(borrowed, float) or is_named, ast.unparse(node)
        called = {id(node.func): node.func for node in nodes if isinstance(node, ast.Call)}
        methods |= {node.attr for node in of_names if id(node) in called and node.value.id == "piece"}
        known |= modules
    assert {"bias", "mask", "position", "score", "transition"} <= known
    assert methods == {"predicate", "taps"}
