"""Oracles of normalizers and kernels: closed forms, root finding, transformers, and the papers' recurrences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import softmax
from torch import nn
from torch.nn import functional as F
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

import regard as rg
from oracles import FLOAT32, Says, agree, by_torch, close, flat, heads, oracle
from regard.catalog import mechanism
from regard.pieces.feature_maps import orthogonal_gaussian

causal_pairs = torch.ones(24, 24, dtype=torch.bool).tril()


def products(q, k, scale=8**-0.5):
    return np.einsum("bhid,bhjd->bhij", q, k) * scale


def weighed(weights, v):
    return weights @ v.numpy(), weights


# Sparse: the threshold is the root of "the weights sum to 1", and small cases have closed forms


def by_root(scores, power, shrink):
    """max(shrink s - t, 0)^power over the last axis, with t found by Brent's method."""

    def row(s):
        s = s * shrink
        t = brentq(lambda t: (np.maximum(s - t, 0) ** power).sum() - 1, s.max() - 1, s.max(), xtol=1e-15)
        return np.maximum(s - t, 0) ** power

    return np.apply_along_axis(row, -1, scores)


@oracle("sparse")
def test_entmax_by_root_finding(attention, q, k, v):
    weights = by_root(products(q, k), 2, 0.5)
    assert (weights == 0).any()
    return weighed(weights, v)


@oracle("sparse", arguments={"alpha": 2})
def test_sparsemax_by_root_finding(attention, q, k, v):
    return weighed(by_root(products(q, k), 1, 1.0), v)


@oracle("sparse", arguments={"alpha": 1})
def test_entmax_of_alpha_1_is_softmax(attention, q, k, v):
    return by_torch(q, k, v)


@oracle("sparse", keys=2)
def test_entmax_of_two_keys_in_closed_form(attention, q, k, v):
    """With d half the difference of the halved scores: (d + sqrt(1/2 - d^2))^2, and 1 once d >= 1/2."""
    s = products(q, k)
    d = np.clip((s[..., 0] - s[..., 1]) / 4, -0.5, 0.5)
    first = (d + np.sqrt(0.5 - d**2)) ** 2
    return weighed(np.stack((first, 1 - first), -1), v)


@oracle("sparse", arguments={"alpha": 2}, keys=2)
def test_sparsemax_of_two_keys_in_closed_form(attention, q, k, v):
    s = products(q, k)
    first = np.clip((1 + s[..., 0] - s[..., 1]) / 2, 0, 1)
    return weighed(np.stack((first, 1 - first), -1), v)


class PositiveDot(rg.scores.Score):
    """A dot product of inputs that are known not to be negative, as `SumNormalizer` asks for."""

    nonnegative = True

    def scale(self, width):
        return 1.0

    def check(self, sizes, key_dim):
        pass


def weights_of(normalizer, scores):
    """Weights that attention gives to keys of these scores, for one query of width 1."""
    k = torch.tensor(scores, dtype=torch.float64).view(1, 1, -1, 1)
    attention = rg.Attention(PositiveDot(), normalizer=normalizer)
    return attention(torch.ones_like(k[:, :, :1]), k, k).weights[0, 0, 0].tolist()


@pytest.mark.parametrize(
    ("normalizer", "scores", "weights"),
    [
        (rg.normalizers.Sparsemax(), [1.0, 0.5, -1.0], [0.75, 0.25, 0.0]),
        (rg.normalizers.Sparsemax(), [0.5, 0.3, 0.1], [1 / 3 + 0.2, 1 / 3, 1 / 3 - 0.2]),
        (rg.normalizers.Sparsemax(), [3.0, 1.0, 1.0], [1.0, 0.0, 0.0]),
        (rg.normalizers.Entmax15(), [2.0, 2.0, 2.0], [1 / 3] * 3),
        # Halved scores 2/3, 2/3, 1/3 above a threshold of 0.
        (rg.normalizers.Entmax15(), [2 * 2 / 3, 2 * 2 / 3, 2 * 1 / 3], [4 / 9, 4 / 9, 1 / 9]),
        (rg.normalizers.Entmax15(), [2.0, 0.0, -1.0], [1.0, 0.0, 0.0]),
        (rg.normalizers.Softmax(), [math.log(1), math.log(2), math.log(5)], [1 / 8, 2 / 8, 5 / 8]),
        (rg.normalizers.Softmax(temperature=0.5), [math.log(1), math.log(2), math.log(5)], [1 / 30, 4 / 30, 25 / 30]),
        (rg.normalizers.Softmax(sink=math.log(2)), [math.log(1), math.log(2), math.log(5)], [0.1, 0.2, 0.5]),
        (rg.normalizers.TopK(2), [math.log(1), math.log(2), math.log(5)], [0.0, 2 / 7, 5 / 7]),
        (rg.normalizers.TopK(9), [math.log(1), math.log(2), math.log(5)], [1 / 8, 2 / 8, 5 / 8]),
        (rg.normalizers.Hardmax(), [1.0, 3.0, 3.0], [0.0, 1.0, 0.0]),
        (rg.normalizers.SumNormalizer(), [1.0, 0.0, 3.0], [0.25, 0.0, 0.75]),
    ],
)
def test_three_keys_by_hand(normalizer, scores, weights):
    assert weights_of(normalizer, scores) == pytest.approx(weights, abs=1e-12)


# Softmax and its relatives


@oracle("sinks", FLOAT32)
def test_sinks_are_those_of_gpt_oss(attention, q, k, v):
    config = GptOssConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=4, head_dim=8, attn_implementation="eager"
    )
    layer = GptOssAttention(config, layer_idx=0).eval()
    layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj = Says(q), Says(k), Says(v), nn.Identity()
    layer.sinks.data = attention.normalizer.sink
    no_turn = torch.ones(1, 24, 4).double(), torch.zeros(1, 24, 4).double()
    future = torch.full((1, 1, 24, 24), -torch.inf, dtype=q.dtype).triu(1)
    output, weights = layer(flat(q), no_turn, future)
    return heads(output, 4), weights


@oracle("sinks")
def test_sinks_are_one_more_key_whose_weight_is_dropped(attention, q, k, v):
    sink = attention.normalizer.sink.view(1, 4, 1, 1).expand(2, 4, 24, 1)
    scores = np.where(causal_pairs, products(q, k), -np.inf)
    return weighed(softmax(np.concatenate((scores, sink), -1), -1)[..., :-1], v)


@oracle("soft_lookup")
def test_soft_lookup_is_a_softmax_at_a_temperature(attention, q, k, v):
    return weighed(softmax(products(q, k, 1 / 0.5), -1), v)


@oracle("soft_lookup", arguments={"temperature": math.sqrt(8)})
def test_soft_lookup_at_the_root_of_the_width_is_scaled_attention(attention, q, k, v):
    return by_torch(q, k, v)


@oracle("soft_lookup", arguments={"temperature": 0})
def test_soft_lookup_at_temperature_0_is_a_dictionary(attention, q, k, v):
    best = products(q, k).argmax(-1)
    answers = [[[v[b, h, best[b, h, i]].tolist() for i in range(7)] for h in range(1)] for b in range(2)]
    return np.array(answers), np.eye(11)[best]


def test_soft_lookup_tends_to_the_dictionary_as_it_cools():
    _, q, k, v = mechanism("soft_lookup").example()
    cold = mechanism("soft_lookup").build(temperature=1e-3)(q, k, v)
    close(cold.output, mechanism("soft_lookup").build(temperature=0)(q, k, v).output)


@oracle("top_k")
def test_top_k_row_by_row(attention, q, k, v):
    scores = products(q, k)
    weights = np.zeros_like(scores)
    for at in np.ndindex(scores.shape[:-1]):
        best = sorted(range(24), key=lambda j, row=scores[at]: -row[j])[:3]
        weights[at][best] = softmax(scores[at][best])
    return weighed(weights, v)


# Kernels


def recurrence(phi_q, phi_k, v):
    """Equations 18 to 20 of arXiv:2006.16236: S += phi(k) v, z += phi(k), y = phi(q) S / phi(q) z."""
    S, z, y = torch.zeros(*v.shape[:2], phi_k.shape[-1], v.shape[-1]).to(v), 0.0, []
    for i in range(v.shape[2]):
        S = S + phi_k[:, :, i, :, None] * v[:, :, i, None]
        z = z + phi_k[:, :, i]
        y.append(torch.einsum("bhd,bhde->bhe", phi_q[:, :, i], S) / (phi_q[:, :, i] * z).sum(-1, keepdim=True))
    return torch.stack(y, 2)


def elu_plus_one(x):
    return torch.where(x > 0, x + 1, x.exp())


@oracle("linear", value_dim=5)
def test_linear_is_the_recurrence_of_the_paper(attention, q, k, v):
    return recurrence(elu_plus_one(q), elu_plus_one(k), v)


@oracle("linear", arguments={"is_causal": False}, queries=7, keys=11)
def test_linear_without_a_mask_is_normalized_feature_products(attention, q, k, v):
    similar = np.einsum("bhid,bhjd->bhij", elu_plus_one(q), elu_plus_one(k))
    return weighed(similar / similar.sum(-1, keepdims=True), v)


def positive_features(attention, x):
    """Lemma 1 of arXiv:2009.14794, row by row of W, for x / D^(1/4)."""
    x, W = x / 8**0.25, attention.score.features.frequencies.to(x)
    waves = [((x * w).sum(-1) - (x * x).sum(-1) / 2).exp() for w in W]
    return torch.stack(waves, -1) / math.sqrt(len(W))


@oracle("performer")
def test_performer_is_normalized_feature_products(attention, q, k, v):
    similar = np.einsum("bhim,bhjm->bhij", positive_features(attention, q), positive_features(attention, k))
    return weighed(similar / similar.sum(-1, keepdims=True), v)


@oracle("performer", arguments={"head_dim": 8, "num_features": 16, "is_causal": True})
def test_performer_causal_is_the_recurrence_with_its_features(attention, q, k, v):
    return recurrence(positive_features(attention, q), positive_features(attention, k), v)


def test_performer_features_estimate_the_exponential_without_bias():
    """Over 3000 draws the mean of phi(q) . phi(k) is exp(q . k / sqrt(D)) within 5 standard errors of that mean."""
    q, k = torch.randn(2, 1, 1, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 0.7
    features = rg.scores.RandomFeatures(8, num_features=16).double()
    draws = []
    for seed in range(3000):
        features.redraw(seed)
        W, x, y = features.frequencies, q[0, 0] / 8**0.25, k[0, 0] / 8**0.25
        phi_x, phi_y = ((z @ W.T - (z * z).sum(-1, keepdim=True) / 2).exp() / 4 for z in (x, y))
        draws.append(phi_x @ phi_y.T)
    mean, error = torch.stack(draws).mean(0), torch.stack(draws).std(0) / 3000**0.5
    assert ((mean - (q[0, 0] @ k[0, 0].T / 8**0.5).exp()).abs() < 5 * error).all()


@torch.no_grad()
def test_performer_with_many_features_is_softmax_attention():
    """The error falls as 1 / sqrt(m): 16 times the features, about a quarter of the error."""
    _, q, k, v = mechanism("performer").example()
    q, k = 0.3 * q, 0.3 * k  # long vectors give the estimate a heavy tail, and the law of large numbers waits
    exact = F.scaled_dot_product_attention(q, k, v)

    def error(num_features):
        drawn = [mechanism("performer").build(8, num_features, seed).double() for seed in range(8)]
        return torch.stack([a(q, k, v).output - exact for a in drawn]).square().mean().sqrt()

    assert 1 / 6 < error(4096) / error(256) < 1 / 3


def test_performer_rows_are_orthogonal_in_blocks_with_gaussian_norms():
    W = orthogonal_gaussian(20_000, 8, seed=0).double()
    blocks = F.normalize(W, dim=1).view(-1, 8, 8)
    assert (blocks @ blocks.transpose(1, 2) - torch.eye(8).double()).abs().max() < 1e-5
    # |w|^2 is chi-squared with 8 degrees: mean 8, variance 16; 5 standard errors of each.
    squares = W.square().sum(1)
    assert abs(squares.mean() - 8) < 5 * (16 / 20_000) ** 0.5
    # The fourth central moment of chi-squared(8) is 12 * 8 * (8 + 4): var of the variance is (1152 - 256) / n.
    assert abs(squares.var() - 16) < 5 * (896 / 20_000) ** 0.5


def test_sum_of_scores_that_are_all_0_gives_no_weight():
    q = k = v = torch.zeros(1, 1, 2, 4).double()
    agree(
        rg.Attention(PositiveDot(), normalizer=rg.normalizers.SumNormalizer()),
        q,
        k,
        v,
        (np.zeros((1, 1, 2, 4)), np.zeros((1, 1, 2, 2))),
    )


@pytest.mark.parametrize("normalizer", [rg.normalizers.Softmax(), rg.normalizers.Softmax(sink=0.5)], ids=repr)
def test_no_logarithm_of_a_weight_is_above_zero(normalizer):
    """A log-sum-exp may have been rounded below the greatest score."""
    scores = torch.tensor([[[[0.0, 3.0]]]])
    logs = normalizer.log_weights(scores.clone(), (torch.tensor([[[2.5]]]),))
    assert logs.flatten().tolist() == [-2.5, 0.0]


EVERY = [
    *(rg.normalizers.Softmax(), rg.normalizers.Softmax(sink=0.5), rg.normalizers.LearnedSink(2)),
    *(rg.normalizers.Sparsemax(), rg.normalizers.Entmax15(), rg.normalizers.TopK(3), rg.normalizers.Hardmax()),
    *(rg.normalizers.SumNormalizer(), rg.normalizers.Sigmoid(), rg.normalizers.Unnormalized()),
]


@pytest.mark.parametrize("normalizer", EVERY, ids=repr)
def test_what_a_normalizer_says_of_itself_is_what_its_weights_show(normalizer):
    def weights(scores):
        return normalizer.normalize_rows(scores.clone(), torch.arange(scores.shape[-1]))[0]

    scores = torch.rand(1, 2, 3, 6, dtype=torch.float64) * 3 - (0 if normalizer.needs_nonnegative else 1.5)
    found, first = weights(scores), torch.arange(6) == 0
    sums = found.sum(-1, keepdim=True)
    assert (normalizer.row_sum == 1.0) is sums.allclose(torch.ones_like(sums))
    assert normalizer.is_signed is bool((found < 0).any())
    assert normalizer.is_linear is (found.allclose(scores) or found.allclose(scores / scores.sum(-1, keepdim=True)))
    assert normalizer.independent is weights(scores + 2 * first)[..., 1:].allclose(found[..., 1:])
    masked = weights(scores.masked_fill(first, normalizer.masked_score))
    assert not masked[..., 0].any() and masked[..., 1:].allclose(weights(scores[..., 1:]))
    if normalizer not in (EVERY[1], EVERY[2], EVERY[6]):  # a sink is a score too; the weights of Hardmax are 0 and 1
        assert normalizer.is_relative is weights(scores + 1.25).allclose(found)
