"""Rows sum to 1 in every way of reading them, also if scores are so large that float32 rounds them to whole numbers."""

import pytest
import torch

import regard as rg
from regard.maps import attention_map
from regard.maps.reductions import Pyramid

SCALES = [1.0, 1e4, 1e6, 1e12]
NORMALIZERS = [
    rg.normalizers.Softmax(),
    rg.normalizers.TopK(7),
    rg.normalizers.Sparsemax(),
    rg.normalizers.Entmax15(),
    rg.normalizers.Hardmax(),
]
MASKS = {"all": None, "window": rg.window(9)}
#: A log-sum-exp below 1,024 in float32 is off by up to 6e-5, and so are two sums of products with it.
ROUNDING = 3e-4


def drawn(scale, dtype=torch.float32, I=40):
    q, k, v = torch.randn(1, 4, I, 16) * scale, torch.randn(1, 2, 40, 16), torch.ones(1, 2, 40, 3)
    return (q.clamp(-6e4, 6e4) if dtype == torch.float16 else q).to(dtype), k.to(dtype), v.to(dtype)


@pytest.fixture(params=["one tile", "many tiles"])
def tiles(request, monkeypatch):
    if request.param == "many tiles":
        monkeypatch.setattr(attention_map, "TILE", (16, 24))
        monkeypatch.setattr(attention_map, "WORKSPACE", 1 << 15)


def check_sums(weights, has_weight):
    """Every way of reading whole rows gives rows that sum to 1."""
    B, H, I, J = weights.shape
    picked = [0, 1, I // 2, I - 1]
    sums = {
        "dense": weights.dense().sum(-1),
        "rows alone": torch.stack([weights[0, :, i].sum(-1) for i in range(I)], -1)[None],
        "heads alone": torch.stack([weights[0, h].sum(-1) for h in range(H)])[None],
        "parts": torch.cat([weights[..., j : j + 10] for j in range(0, J, 10)], -1).sum(-1),
        "mass": weights.mass(list(range(J))),
        "signs": weights.summarize(rg.maps.SignedMass())[0].positive,
        "shares": weights.shares().dense().sum(-1),
        "top": weights.top(J).weights.sum(-1),
    }
    wanted = has_weight.expand(B, H, I).float()
    for name, found in sums.items():
        torch.testing.assert_close(found.float(), wanted, rtol=0, atol=ROUNDING, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(weights[0, 1, picked].sum(-1).float(), wanted[0, 1, picked], rtol=0, atol=ROUNDING)
    totals = {"received": weights.received().sum(-1), "pool": weights.pool(I, 5).sum((-1, -2))}
    totals["pyramid"] = (weights.summarize(Pyramid(0))[0][0]).sum((-1, -2))
    for name, found in totals.items():
        torch.testing.assert_close(found.float() / I, wanted.mean(-1), rtol=0, atol=ROUNDING, msg=name)
    assert (weights.entropy() >= 0).all() and weights.entropy().isfinite().all()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("normalizer", NORMALIZERS, ids=repr)
@pytest.mark.parametrize("mask", MASKS)
def test_rows_sum_to_one(scale, normalizer, mask, tiles):
    attention = rg.Attention(mask=MASKS[mask], normalizer=normalizer)
    weights = attention(*drawn(scale)).weights
    check_sums(weights, torch.ones(()))
    dense, bound = weights.dense(), float(torch.finfo(torch.float32).eps * scale * 16 * 16)
    if bound < 0.1:
        torch.testing.assert_close(weights[:, :, 3:20, 5:31], dense[:, :, 3:20, 5:31], rtol=bound, atol=bound)


@pytest.mark.parametrize("scale", [1e3, 1e6, 1e12])
@pytest.mark.parametrize("engine", ["dense", "blocked", "reference"])
def test_rows_sum_to_one_in_every_engine(scale, engine):
    mask = rg.causal() & rg.padding(torch.arange(40)[None] >= 5)  # the first rows are empty
    seen = rg.Attention(mask=mask)(*drawn(scale), engine=engine)
    check_sums(seen.weights, torch.arange(40) >= 5)
    torch.testing.assert_close(seen.output[..., 5:, :], torch.ones(1, 4, 35, 3), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e12])
def test_rows_of_other_dtypes_sum_to_one(dtype, scale):
    check_sums(rg.Attention(mask=rg.causal())(*drawn(scale, dtype)).weights, torch.ones(()))


def test_a_row_beside_a_sink_is_read_alone_as_in_the_whole():
    """The sink takes the rest of a row; where it is as large as the scores, one rounding must decide for both."""
    q, k, v = drawn(1e5)
    for normalizer in (rg.normalizers.Softmax(sink=2e5), rg.normalizers.LearnedSink(4)):
        weights = rg.Attention(normalizer=normalizer)(q, k, v).weights
        alone = torch.stack([weights[0, 0, i].sum() for i in range(40)])
        assert (alone <= 1 + ROUNDING).all()
        torch.testing.assert_close(alone, weights.dense()[0, 0].sum(-1), rtol=0, atol=0.05)


def test_rows_of_small_scores_are_not_computed_whole(monkeypatch):
    """A tile of rows without large scores costs the scores of that tile."""
    from regard.maps.scored_map import ScoredMap

    monkeypatch.setattr(ScoredMap, "_weights_of_whole_rows", None)
    weights = rg.Attention()(*drawn(1.0)).weights
    assert weights[0, 0, 3].sum() > 0.99
