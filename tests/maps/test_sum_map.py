"""Sums and products of maps: against dense arithmetic, in tiles, with statistics, gradients and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.autograd import gradcheck

import regard as rg

B, H, I, J = 2, 3, 11, 13
MASKS = (rg.causal() & rg.window(4), rg.causal())


def parts(queries=I, keys=J, batch=B, masks=MASKS):
    """Two attentions with other scores and masks but the same values."""
    torch.manual_seed(1)
    q, k = torch.randn(2, batch, H, queries, 4).double(), torch.randn(2, batch, H, keys, 4).double()
    v = torch.randn(batch, H, keys, 5).double()
    seen = [rg.Attention(mask=mask)(q[n], k[n], v) for n, mask in enumerate(masks)]
    return seen, v


def factors_of(queries=I, batch=B):
    torch.manual_seed(2)
    return [1.0, torch.randn(batch, H, queries, 1).double()]


def dense_sum(seen, factors):
    return sum(c * each.weights.dense() for each, c in zip(seen, factors, strict=True))


@pytest.mark.usefixtures("small_blocks")
def test_a_sum_of_maps_is_that_of_dense_weights_and_gives_the_output():
    seen, v = parts()
    factors = factors_of()
    both, expected = rg.combine(seen, factors), dense_sum(seen, factors)
    weights = both.weights
    torch.testing.assert_close(weights.dense(), expected)
    torch.testing.assert_close(weights.dense() @ v, both.output)
    torch.testing.assert_close(weights[1, 2, [7, 0, 7], 1:9:3], expected[1, 2, [7, 0, 7], 1:9:3])
    torch.testing.assert_close(weights.select([1], [2, 0])[0, :, 3:5], expected[1, [2, 0], 3:5])
    torch.testing.assert_close(weights.select([1], [2, 0]).select([0], [1]).dense(), expected[1:, :1])
    assert weights.is_signed and (expected < 0).any()
    assert repr(weights) == f"AttentionMap({B} x {H} heads x {I} queries x {J} keys, signed)"


def test_a_mean_of_softmaxes_has_shares():
    seen, _ = parts()
    with pytest.raises(rg.RegardError, match="needs shares"):
        rg.combine(seen, factors_of()).weights.entropy()
    mean = rg.combine(seen, [0.5, torch.full((H, 1, 1), 0.5)]).weights
    assert not mean.is_signed
    entropy = torch.special.entr(dense_sum(seen, [0.5, 0.5])).sum(-1)
    torch.testing.assert_close(mean.entropy(), entropy, rtol=1e-5, atol=1e-5, check_dtype=False)


def test_a_sum_is_signed_if_any_part_or_any_factor_is():
    seen, _ = parts()
    plain, signed = (each.weights for each in seen)
    signed = rg.maps.SumMap([signed, plain], [1.0, -0.5])
    one_negative = torch.ones(H, I, 1).index_fill(1, torch.tensor([4]), -0.1)
    for these, factors, expected in (
        ([plain, plain], [0.5, 2.0], False),
        ([plain, signed], [0.5, 0.5], True),
        ([signed, plain], [0.5, 0.5], True),
        ([signed, signed], [0.5, 0.5], True),
        ([plain, plain], [1.0, one_negative], True),
    ):
        assert rg.maps.SumMap(these, factors).is_signed is expected


@pytest.mark.usefixtures("small_blocks")
def test_tiles_cover_the_union_of_the_masks_only():
    seen, _ = parts(queries=40, keys=40, masks=(rg.window(3), rg.masks.prefix(2)))
    weights = rg.combine(seen, [1.0, 1.0]).weights
    dense, covered = weights.dense(), torch.zeros(40, 40, dtype=torch.bool)
    for tile in weights.tiles():
        torch.testing.assert_close(tile.weights, dense[:, :, tile.rows, tile.cols])
        covered[tile.rows, tile.cols] = True
    assert covered[dense.ne(0).any(0).any(0)].all() and not covered.all()
    assert isinstance(weights.attention.mask, rg.masks.Mask)
    assert rg.combine([seen[0], parts(40, 40, masks=(None,))[0][0]], [1, 1]).weights.attention.mask is None


def test_gradients_flow_through_outputs_and_factors():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 4, 3).double().requires_grad_() for _ in range(3))
    factor = torch.randn(1, 2, 4, 1).double().requires_grad_()

    def output(q, k, v, factor):
        first, second = (rg.Attention(mask=mask)(q, k, v) for mask in (rg.causal(), None))
        return rg.combine([first, second], [factor, -0.3]).output

    assert gradcheck(output, (q, k, v, factor))


@pytest.mark.parametrize(("queries", "keys", "batch"), [(0, 3, 1), (3, 0, 1), (0, 0, 1), (1, 1, 1), (2, 2, 0)])
def test_a_sum_of_nothing_and_of_one_token(queries, keys, batch):
    seen, _ = parts(queries, keys, batch)
    both = rg.combine(seen, factors_of(queries, batch))
    assert both.output.shape == (batch, H, queries, 5) and both.weights.dense().shape == (batch, H, queries, keys)
    assert both.weights.shares().entropy().shape == (batch, H, queries)


def test_a_sum_of_a_sum_and_a_factor_that_changes_later():
    seen, _ = parts()
    factor = torch.tensor(0.5).double()
    inner = rg.combine(seen, [1.0, factor])
    outer = rg.combine([inner, seen[0]], [2.0, -1.0])
    factor += 1  # a map keeps the factors of its call
    expected = dense_sum(seen, [1.0, 1.0])
    torch.testing.assert_close(outer.weights.dense(), expected)


def test_wrong_parts_and_factors_are_refused():
    seen, _ = parts()
    other, (one_entry, _) = parts(queries=5)[0], parts(batch=1)[0]  # the positions of an entry are those of both
    narrow = replace(seen[1], output=seen[1].output[..., :1])  # of other values, which would be broadcast
    for outputs, factors, said in (
        (seen, [1.0], "one factor for each map"),
        ([], [], "at least one map"),
        ([seen[0], other[0]], [1.0, 1.0], "the same queries and keys"),
        ([seen[0], seen[0], one_entry], [1.0, 1.0, 1.0], "the same queries and keys"),
        ([seen[0], narrow], [1.0, 1.0], "the outputs must have one shape"),
        (seen, [1.0, torch.zeros(B, H, I)], r"factor\[..., None\]"),
        (seen, [1.0, torch.zeros(B, H, I, J)], "broadcasts against"),
    ):
        with pytest.raises(rg.RegardError, match=said):
            rg.combine(outputs, factors)


@pytest.mark.parametrize(("least", "is_signed"), [(0.0, False), (-0.5, True)])
def test_groups_are_signed_if_a_number_is_below_zero(least, is_signed):
    groups = rg.composites.ProjectedGroups(length=6, num_groups=2)
    for matrix in groups.parameters():
        matrix.data.uniform_(0.1, 1.0)[0, 2] = least
    x = torch.randn(1, 1, 6, 4)
    assert rg.composites.Grouped(rg.Attention(), groups)(x, x, x).weights.is_signed is is_signed


@pytest.mark.usefixtures("small_blocks")
def test_a_product_of_maps_is_that_of_dense_weights():
    torch.manual_seed(0)
    q, k, latent = torch.randn(B, H, I, 4), torch.randn(B, H, J, 4), torch.randn(B, H, 3, 4)
    read = rg.Attention()(latent, k, k)
    between = rg.maps.DenseMap(torch.randn(B, H, 3, 3))
    write = rg.Attention()(q, latent, between.dense() @ read.output)
    product = rg.maps.ProductMap([write.weights, between, read.weights])
    expected = write.weights.dense() @ between.dense() @ read.weights.dense()
    torch.testing.assert_close(product.dense(), expected)
    torch.testing.assert_close(product.dense() @ k, write.output)
    torch.testing.assert_close(product[1, 0, [4, 2], 5:7], expected[1, 0, [4, 2], 5:7])
    torch.testing.assert_close(product.select([1], [2]).dense(), expected[1:, 2:])
    torch.testing.assert_close(product.received(), expected.sum(2), rtol=1e-5, atol=1e-5)
    assert product.is_signed and not rg.maps.ProductMap([write.weights, read.weights]).is_signed
    assert rg.maps.ProductMap([write.weights, read.weights]).entropy().shape == (B, H, I)


def test_products_that_do_not_fit_are_refused():
    seen, _ = parts()
    with pytest.raises(rg.RegardError, match="as many keys in the first as there are queries in the second"):
        rg.maps.ProductMap([seen[0].weights, seen[1].weights])
    with pytest.raises(rg.RegardError, match="at least one map"):
        rg.maps.ProductMap([])
    with pytest.raises(rg.RegardError, match=r"\(B, H, I, J\), got \(2, 2\)"):
        rg.maps.DenseMap(torch.eye(2))
