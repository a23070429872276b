"""A map behaves as its dense weights: reductions, products, operators, functions of torch and NumPy; in O(n) memory."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import regard as rg
from map_kinds import MADE, NAMES, map_of, plain, signed
from regard.maps import attention_map

pytestmark = pytest.mark.usefixtures("small_blocks")
every_map = pytest.mark.parametrize("name", NAMES)
AXES = [None, *(axes for count in range(1, 5) for axes in combinations(range(4), count))]
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def drawn(things, count):
    """Some of these, others for every map; all of them would take minutes."""
    return [things[place] for place in torch.randperm(len(things))[:count]]


def close(mine, theirs):
    torch.testing.assert_close(mine, theirs, equal_nan=True, **CLOSE)


def check_reductions(weights, dense):
    for axes in drawn(AXES, 3):
        keepdim = axes is not None and sum(axes) % 2 == 0
        dim = axes if axes is None or len(axes) > 1 else axes[0] - 4 * keepdim
        close(weights.sum(dim, keepdim), dense.sum(dim, keepdim))
        close(weights.mean(dim, keepdim), dense.mean(dim, keepdim))
        if all(dense.shape[axis] for axis in (axes or range(4))):
            close(weights.amax(dim or (), keepdim), dense.amax(dim or (), keepdim))
            close(weights.amin(dim or (), keepdim), dense.amin(dim or (), keepdim))
        else:
            with pytest.raises(rg.RegardError, match="has the size 0"):
                weights.amax(dim)


def check_places(weights, dense):
    for axis, kind in drawn([(axis, kind) for axis in range(4) for kind in ("max", "min")], 2):
        if not dense.shape[axis]:
            with pytest.raises(rg.RegardError, match="has the size 0"):
                getattr(weights, kind)(axis)
            continue
        found, expected = (getattr(w, kind)(axis, keepdim=True) for w in (weights, dense))
        close(found.values, expected.values)
        assert found.indices.dtype == torch.int64 and found.indices.shape == expected.indices.shape
        close(dense.gather(axis, found.indices), expected.values)
        assert torch.equal(getattr(weights, f"arg{kind}")(axis), found.indices.squeeze(axis))
    if dense.numel():
        close(weights.max(), dense.max())
        close(weights.min(), dense.min())
        close(dense.flatten()[weights.argmax()], dense.max())
        close(dense.flatten()[weights.argmin()], dense.min())
        assert weights.argmax(keepdim=True).shape == (1, 1, 1, 1)
    else:
        with pytest.raises(rg.RegardError, match="has the size 0"):
            weights.argmin()


def check_products(weights, dense):
    B, H, _, J = dense.shape
    shapes = [(B, H, J, 5), (B, 1, J, 2), (H, J, 1), (J, 3), (J,), (B, H, J, 0)]
    for values in (torch.randn(shape, dtype=dense.dtype) for shape in drawn(shapes, 2)):
        close(torch.matmul(weights, values), dense @ values)
    if H % 2 == 0:
        shared = torch.randn(B, H // 2, J, 3, dtype=dense.dtype)
        close(weights @ shared, dense @ shared.repeat_interleave(2, 1))


@every_map
def test_reductions_and_products_are_those_of_the_dense_weights(name):
    torch.manual_seed(NAMES.index(name))
    weights = map_of(name)
    dense = weights.dense()
    assert (weights.dtype, weights.ndim, weights.dim(), weights.numel()) == (dense.dtype, 4, 4, dense.numel())
    assert weights.size() == dense.size() and weights.size(-1) == dense.size(-1)
    check_reductions(weights, dense)
    check_places(weights, dense)
    check_products(weights, dense)


@pytest.mark.parametrize("name", MADE)
def test_operators_methods_and_functions_are_those_of_the_dense_weights(name):
    weights = map_of(name)
    w, x = weights.dense(), torch.rand_like(weights.dense())
    pairs = [
        (weights * 2, w * 2),
        (1 - weights, 1 - w),
        (x / (weights + 1), x / (w + 1)),
        (-weights, -w),
        (abs(weights), w.abs()),
        (weights**2, w**2),
        (weights > 0.1, w > 0.1),
        (x <= weights, x <= w),
        (weights == w, w == w),
        (weights != 0, w != 0),
        (weights - weights, w - w),
        (weights.mT, w.mT),
        (weights.transpose(-1, -2), w.mT),
        (x @ weights.mT, x @ w.mT),
        (x.mT @ weights, x.mT @ w),
        (weights.flatten(2), w.flatten(2)),
        (weights.to(torch.float64), w.double()),
        (weights.cpu().float(), w.float()),
        (weights.cumsum(-1), w.cumsum(-1)),
        (torch.mean(weights), w.mean()),
        (torch.sum(weights, dim=(0, 1)), w.sum((0, 1))),
        (torch.where(weights > 0.5, weights, 0), torch.where(w > 0.5, w, 0)),
        (torch.stack([weights, weights]), torch.stack([w, w])),
        (F.relu(weights), w.relu()),
        (torch.einsum("bhij,bhij->bh", weights, x), torch.einsum("bhij,bhij->bh", w, x)),
        (torch.maximum(weights, x), w.maximum(x)),
    ]
    for mine, theirs in pairs:
        close(mine, theirs)
    assert torch.allclose(weights, w, equal_nan=True) and weights.tolist() == w.tolist()
    np.testing.assert_array_equal(weights.numpy(), w.numpy())
    np.testing.assert_allclose(np.mean(weights, axis=1), w.numpy().mean(1), rtol=1e-5)
    np.testing.assert_array_equal(np.ones(w.shape) * weights, w.numpy())


def test_a_map_is_itself_in_comparisons_with_other_things():
    weights, other = plain(), plain()
    assert weights == weights and weights != other and weights is not None and weights != "map"
    assert weights in [other, weights] and {weights: 1}[weights] == 1
    assert not hasattr(weights, "fill_") and not hasattr(weights, "plot")


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda w: w.mean(4), r"^weights.mean: dim=4 is none of the axes 0 batch, 1 head, 2 query, 3 key, or -4 to -1"),
        (lambda w: w.sum((1, -3)), r"^weights.sum: dim=\(1, -3\) names an axis twice"),
        (lambda w: w.amax("head"), r"^weights.amax: dim='head' is none of the axes"),
        (lambda w: w.argmax((1, 2)), r"^weights.argmax: dim=\(1, 2\) must be one axis; amax and amin take several"),
        (lambda w: w @ torch.ones(2, 3, 5, 4), r"^weights @ values: .*\(2, 3, 9, 11\).*\(2, 3, 5, 4\).*11 keys"),
    ],
)
def test_a_wrong_reduction_is_explained(ask, message):
    with pytest.raises(rg.RegardError, match=message):
        ask(plain())


def test_reductions_of_a_large_map_form_no_more_than_a_tile(monkeypatch):
    """The dense weights have 2 GiB. What is formed at once stays within the workspace of tiles."""
    workspace, largest = 8 << 20, 0
    monkeypatch.setattr(attention_map, "WORKSPACE", workspace)
    monkeypatch.setattr(attention_map, "TILE", (512, 4096))
    q = torch.randn(1, 2, 16384, 4)
    weights = rg.Attention(mask=rg.causal() & rg.window(64))(q, q, q).weights
    read = type(weights)._weights

    def counted(self, rows, cols):
        nonlocal largest
        tile = read(self, rows, cols)
        largest = max(largest, tile.numel() * tile.itemsize)
        return tile

    monkeypatch.setattr(type(weights), "_weights", counted)
    tiles = type(weights)._tiles_with

    def counted_tiles(self, weights_of_strip):
        nonlocal largest
        for tile in tiles(self, weights_of_strip):
            largest = max(largest, tile.weights.numel() * tile.weights.itemsize)
            yield tile

    monkeypatch.setattr(type(weights), "_tiles_with", counted_tiles)
    monkeypatch.setattr(type(weights), "_compiled_terms", lambda self: None)
    ones = torch.ones(1, 2, 16384)
    close(weights.sum(-1), ones)
    close(weights.mean((0, 1, 3)), ones[0, 0] / 16384)
    close(weights.mean(), torch.tensor(1 / 16384))
    assert weights.amin(3).max() == 0 and weights.amax(2).min() > 0
    assert weights.max(-1).indices.shape == (1, 2, 16384)
    close(weights @ torch.ones(16384, 1), ones[..., None])
    assert 0 < largest <= workspace


def test_a_reduction_that_is_too_large_itself_says_so():
    q = torch.randn(1, 8, 32768, 2)
    weights = rg.Attention(mask=rg.causal() & rg.window(8))(q, q, q).weights
    for ask in (lambda: weights.mean(1), lambda: weights.max(1), lambda: weights * 2, lambda: torch.exp(weights)):
        with pytest.raises(rg.RegardError, match=r"takes [\d,]+ MiB, the budget is 1,024 MiB"):
            ask()


@pytest.mark.parametrize("make", [plain, signed])
def test_gradients_of_reductions_are_those_of_the_dense_weights(make):
    """The map is differentiable where its reads are."""
    q, k = (torch.randn(2, 3, n, 4, dtype=torch.float64, requires_grad=True) for n in (9, 11))
    values = torch.randn(2, 3, 11, 2, dtype=torch.float64, requires_grad=True)
    weights = rg.Attention(mask=rg.causal())(q, k, k).weights
    weights = rg.maps.SumMap([weights], [torch.tensor([-1.0, 2.0]).view(2, 1, 1, 1)]) if make is signed else weights
    dense = weights.dense()
    asked = [
        *(lambda w, dim=dim: w.sum(dim) for dim in AXES[1:]),
        *(lambda w, dim=dim: w.amax(dim) for dim in (0, 1, 2, 3, (2, 3))),
        lambda w: w.max(3).values,
        lambda w: w.min(2).values,
        lambda w: w @ values,
        lambda w: w @ values[:, :1],
        lambda w: (w * 2).exp(),
        lambda w: w[0, [0, 1], [4, 5]],
    ]
    for ask in asked:
        mine, theirs = ask(weights), ask(dense)
        along = torch.randn_like(theirs)
        inputs = (q, k, values)
        found, expected = (
            torch.autograd.grad((x * along).sum(), inputs, retain_graph=True, allow_unused=True) for x in (mine, theirs)
        )
        for a, b in zip(found, expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "shape", [(11, 2), (2, 11, 2), (1, 11, 2), (3, 11, 2), (6, 11, 2), (1, 1, 11, 2), (2, 6, 11, 2)]
)
def test_a_product_with_values_of_the_map_forms_no_dense_weights(shape, monkeypatch):
    """Values of a batch entry or of a head may be those of all of them."""
    weights, values = plain(heads=6), torch.randn(shape)
    exact = weights.dense() @ (values.repeat_interleave(6 // shape[-3], -3) if len(shape) > 2 else values)
    monkeypatch.setattr(type(weights), "dense", None)
    close(weights @ values, exact)


@pytest.mark.parametrize("heads", [1, 3])
def test_a_product_with_values_of_all_heads_forms_no_dense_weights(heads, monkeypatch):
    weights, values = plain(heads=heads), torch.randn(11, 2)
    exact = weights.dense() @ values
    monkeypatch.setattr(type(weights), "dense", None)
    close(weights @ values, exact)


class Visits(rg.maps.Reduction):
    """How often a tile has each pair."""

    def __init__(self, reads_weights):
        self.reads_weights = reads_weights

    def init(self, shape, device):
        return [torch.zeros(shape)]

    def add(self, state, tile):
        pairs = state[0][:, :, tile.rows, tile.cols]
        assert tile.weights.shape == pairs.shape
        pairs += 1


@every_map
def test_tiles_have_each_weight_above_zero_once_whether_it_is_read_or_not(name, small_blocks):
    weights = map_of(name)
    (visits,), (unread,) = (weights.reduction_states([visits])[visits] for visits in (Visits(True), Visits(False)))
    assert torch.equal(visits, unread) and not (visits > 1).any()
    assert not ((weights.dense() != 0) & (visits == 0)).any()
