"""A map that says its rows are shares has rows that sum to 1; statistics of others equal a formula or refuse."""

import math

import pytest
import torch

import regard as rg
from regard.catalog import mechanisms
from regard.edits.layer_edits import EditedMap, LayerEdit, LayerEdits, Pairs
from regard.maps.changed_map import HeadMean
from regard.maps.joined import joined
from regard.maps.reductions import Pyramid
from regard.maps.stored import load_map, save_map

NEGATIVE = rg.edits.ScaleWeights(rg.Where(keys=slice(0, 3)), -1.0)


def seen(**pieces):
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    return rg.Attention(**{"mask": rg.causal(), **pieces})(q, k, v).weights


def check(weights, has_all=True):
    """Rows of a map with shares sum to 1 (or 0); its statistics are formulas of the dense weights. Others refuse."""
    dense = weights.dense().double()  # if not `has_all`, a sink or an empty part has the rest
    totals, distance = dense.sum(-1), weights.grid.distance.abs().double()
    if not weights.has_shares:
        for ask in (
            weights.entropy,
            weights.distance,
            lambda: weights.summarize(rg.maps.Divergence(to=weights.shares())),
        ):
            with pytest.raises(rg.RegardError, match=r"needs shares.*weights\.shares\(\)"):
                ask()
        weights, dense = weights.shares(), dense.abs() / dense.abs().sum(-1, keepdim=True).clamp_min(1e-30)
    else:
        assert not weights.is_signed and (dense >= -1e-6).all()
        wrong = ((totals - 1).abs() > 1e-4) & (totals != 0) if has_all else totals > 1 + 1e-4
        assert not wrong.any(), f"rows that should be shares sum to {totals[wrong]}"
    tolerance = {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(weights.entropy().double(), -torch.xlogy(dense, dense).sum(-1), **tolerance)
    torch.testing.assert_close(weights.distance().double(), (dense * distance).sum(-1), **tolerance)


@pytest.mark.parametrize("name", sorted(mechanisms()))
def test_every_mechanism_knows_whether_its_rows_are_shares(name):
    with torch.no_grad():
        example = mechanisms()[name].example()
        check(example[0](*example[1:], **mechanisms()[name].tensors(*example)).weights, name not in ("sinks", "infini"))


def edited(edit, **pieces):
    source = seen(**pieces)
    return EditedMap(source, LayerEdits((LayerEdit(edit, Pairs(keys=edit.where.indices("keys"))),)))


FAMILIES = {
    "softmax": (seen, True),
    "sigmoid": (lambda: seen(normalizer=rg.normalizers.Sigmoid()), False),
    "unnormalized": (lambda: seen(normalizer=rg.normalizers.Unnormalized()), False),
    "sum of shares": (lambda: rg.maps.SumMap([seen(), seen()], [0.25, 0.75]), True),
    "sum of twice": (lambda: rg.maps.SumMap([seen(), seen()], [1.0, 1.0]), False),
    "gates by row": (lambda: rg.maps.SumMap([seen(), seen()], [torch.rand(1, 2, 6, 1), 0.5]), False),
    "sum with sigmoid": (
        lambda: rg.maps.SumMap([seen(), seen(normalizer=rg.normalizers.Sigmoid())], [0.5, 0.5]),
        False,
    ),
    "product": (lambda: rg.maps.ProductMap([seen(), seen()]), True),
    "product with matrix": (
        lambda: rg.maps.ProductMap([seen(), rg.maps.DenseMap(2 * torch.eye(6).expand(1, 2, 6, 6))]),
        False,
    ),
    "matrix": (lambda: rg.maps.DenseMap(torch.rand(1, 2, 6, 6)), False),
    "matrix of shares": (lambda: rg.maps.DenseMap(torch.rand(1, 2, 6, 6).softmax(-1)), True),
    "signed matrix": (lambda: rg.maps.DenseMap(torch.rand(1, 2, 6, 6).softmax(-1), is_signed=True), False),
    "shares": (lambda: seen(normalizer=rg.normalizers.Sigmoid()).shares(), True),
    "mean of heads": (lambda: HeadMean(seen()), True),
    "mean of sigmoids": (lambda: HeadMean(seen(normalizer=rg.normalizers.Sigmoid())), False),
    "scaled": (lambda: edited(rg.edits.ScaleWeights(rg.Where(keys=0), 3.0)), False),
    "turned": (lambda: edited(rg.edits.ScaleWeights(rg.Where(keys=0), -1.0)), False),
    "knocked out": (lambda: edited(rg.KnockOut(rg.Where(keys=0), renormalize=False)), False),
    "selected": (lambda: rg.maps.SumMap([seen(), seen()], [1.0, 1.0]).select([0], [1]), False),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_knows_whether_its_rows_are_shares(name):
    make, expected = FAMILIES[name]
    weights = make()
    assert weights.has_shares is expected
    check(weights)


def test_a_negative_factor_makes_weights_signed():
    assert edited(rg.edits.ScaleWeights(rg.Where(keys=0), -1.0)).is_signed


def test_a_sink_has_the_rest_of_a_row():
    weights = seen(normalizer=rg.normalizers.Softmax(sink=0.0))
    totals = weights.dense().sum(-1)
    assert weights.has_shares and (totals < 1).all() and (weights.entropy() >= 0).all()


def test_groups_that_are_sums_have_no_shares():
    class Pairs(rg.composites.KeyGroups):
        def keys(self, x):
            return x[:, :, 0::2] + x[:, :, 1::2]

        def unfolded(self, weights, columns, num_keys):
            return weights[..., columns // 2]

    q, k, v = torch.randn(3, 1, 2, 6, 8)
    check(rg.composites.Grouped(rg.Attention(), Pairs())(q, k, v).weights)
    means = rg.composites.Grouped(rg.Attention(), rg.composites.MeanGroups(2))(q, k, v).weights
    assert means.has_shares
    check(means)


def test_joined_rows_are_shares_if_all_are():
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    attention = rg.Attention(mask=rg.causal())
    first, last = (
        attention(q[:, :, i], k[:, :, :n], v[:, :, :n]).weights for i, n in ((slice(0, 4), 4), (slice(4, 6), 6))
    )
    doubled = rg.maps.SumMap([last], [2.0])
    check(joined([first, last]))
    weights = joined([first, doubled])
    assert not weights.has_shares
    check(weights)


@pytest.mark.parametrize(
    "pieces",
    [{"mask": rg.mask_tensor(torch.tensor([[True, False]]))}, {"normalizer": rg.normalizers.Sparsemax()}],
    ids=["masked", "sparsemax"],
)
def test_a_target_without_weight_costs_as_much_as_the_least_normal_weight(pieces):
    """KL of p = (1/4, 3/4) from w = (1, 0): 1/4 log 1/4 + 3/4 (log 3/4 + 126 log 2)."""
    x = torch.tensor([2.0, 0.0]).reshape(1, 1, 2, 1)
    weights = rg.Attention(rg.Dot(scale=1.0), **pieces)(torch.ones(1, 1, 1, 1), x, x).weights
    expected = 0.25 * math.log(0.25) + 0.75 * (math.log(0.75) + 126 * math.log(2))
    found = weights.summarize(rg.maps.Divergence(to=torch.tensor([[0.25, 0.75]])))[0]
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_a_picture_of_a_map_has_64_cells_a_side_unless_one_says_so():
    weights = rg.Attention()(*torch.randn(3, 1, 1, 130, 4)).weights
    assert weights.pool().shape == (1, 1, 64, 64) and weights.pool(5).shape == (1, 1, 5, 64)


def test_targets_of_a_divergence_are_shares():
    weights = seen()
    with pytest.raises(rg.RegardError, match=r"targets are shares.*may have any sum.*shares\(\)"):
        rg.maps.Divergence(to=rg.maps.SumMap([weights], [2.0]))


@pytest.mark.parametrize("name", ["sum of twice", "sum of shares", "turned"])
def test_saved_maps_know_it_too(name, tmp_path):
    weights = FAMILIES[name][0]()
    save_map(tmp_path / "map.safetensors", weights)
    loaded = load_map(tmp_path / "map.safetensors")
    assert (loaded.has_shares, loaded.is_signed) == (weights.has_shares, weights.is_signed)


def test_a_profile_is_of_shares():
    """The profile of rows that sum to 2 is that of the rows, divided by 2."""
    weights = seen()
    one, two = (rg.profile({"layers.0": w}, list("abcdef")) for w in (weights, rg.maps.SumMap([weights], [2.0])))
    for name, values in one.layers[0].values.items():
        torch.testing.assert_close(two.layers[0].values[name], values, msg=name)


def test_a_detached_joined_map_has_no_graph():
    q, k, v = torch.randn(3, 1, 2, 6, 8).requires_grad_()
    first, last = (
        rg.Attention(mask=rg.causal())(q[:, :, i], k[:, :, :n], v[:, :, :n]).weights
        for i, n in ((slice(0, 4), 4), (slice(4, 6), 6))
    )
    weights = joined([first, last])
    assert weights.requires_grad and weights.dense().requires_grad
    detached = weights.detach()
    assert not detached.requires_grad and not detached[0, 0, 1].requires_grad
    torch.testing.assert_close(detached.dense(), weights.dense().detach())


def test_a_map_is_signed_if_any_of_its_parts_is():
    x = torch.randn(1, 2, 5, 4)
    unsigned, signed = rg.Attention()(x, x, x).weights, rg.maps.DenseMap(torch.randn(1, 2, 5, 5))
    assert not rg.maps.ProductMap([unsigned, unsigned]).is_signed
    for factors in ([unsigned, signed], [signed, unsigned], [signed, signed]):
        assert rg.maps.ProductMap(factors).is_signed and not rg.maps.ProductMap(factors).has_shares
    for sign in (1, -1):
        groups = rg.composites.ProjectedGroups(5, 2)
        with torch.no_grad():
            groups.of_keys.abs_()
            groups.of_values.abs_().mul_(sign)
        assert rg.composites.Grouped(rg.Attention(), groups)(x, x, x).weights.is_signed is (sign < 0)


@pytest.mark.parametrize("make", [lambda: rg.maps.SumMap([seen(), seen()], [1.0, -1.0]), lambda: edited(NEGATIVE)])
def test_cells_of_a_signed_map_are_refused_and_those_of_its_shares_are_exact(make):
    """The maxima of `Pyramid` begin at 0, so a cell of negative weights would have a wrong one without a word."""
    weights = make()
    assert weights.is_signed and bool((weights.dense() < 0).any())
    with pytest.raises(rg.RegardError, match=r"Pyramid needs weights that are not negative.*weights\.shares\(\)"):
        weights.summarize(Pyramid(1))
    shares = weights.shares()
    (mean, greatest) = shares.summarize(Pyramid(1))[0]
    cells = shares.dense().unflatten(-1, (3, 2)).unflatten(-3, (3, 2))
    torch.testing.assert_close(greatest, cells.amax((-3, -1)))
    torch.testing.assert_close(mean, cells.sum(-1).mean(-2))


def test_cells_of_weights_of_any_sum_are_computed():
    (_, greatest) = (weights := seen(normalizer=rg.normalizers.Sigmoid())).summarize(Pyramid(3))[0]
    torch.testing.assert_close(greatest.flatten(2)[..., 0], weights.dense().amax((-2, -1)))
