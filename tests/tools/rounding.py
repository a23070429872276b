"""How far rounding may move an output: a bound for every element, from norms and the unit roundoff.

Let u be the unit roundoff of the inputs' dtype and v that of float32, in which scores, statistics and sums are kept.
A vector that a piece computes in the inputs' dtype is off by u times its norm for every rounding of it, so

    score:  |ds_ij| <= (R u + (W + 3) v) |q_i| |k_j| c,   with R roundings of q and k together, W channels
    biases: they add what they round themselves; a softcap has a slope of at most 1
    row:    softmax      |do_i| <= (e^(2 max_j |ds_ij|) - 1) sum_j w_ij |v_j|
            sparse ones  |do_i| <= |ds_i| |v|    (projections: their slope is at most 1 in the Euclidean norm)
            sum          |do_i| <= sum_j |ds_ij| / (Z_i - sum_j |ds_ij|) (|v_j| + |o_i|)
            none         |do_i| <= sum_j |ds_ij| |v_j|

and weights are rounded once where they meet the values, the output once, both by a sink's factor once more.
"""

from __future__ import annotations

import math

import torch

import regard as rg
from regard.attention import scores
from regard.reference import reference

FLOAT32 = 2.0**-24
#: Roundings of one vector: the table, the product and the sum of a position; the product of a projection.
POSITION, PROJECTION = 3, 1


def unit_roundoff(dtype):
    return torch.finfo(dtype).eps / 2


def budget(problem, dtype):
    """The exact output of a float64 problem, and how far each element may be off where its inputs are of `dtype`."""
    output, weights = (torch.from_numpy(a) for a in reference(problem))
    attention, u = problem.attention, unit_roundoff(dtype)
    values = problem.value.repeat_interleave(problem.sizes.R, 1).abs()
    errors = score_errors(problem, u)
    by_scores = by_rows(problem, output, weights, values, errors)
    roundings = 2 if attention.normalizer.row_sum is not None else 4
    by_sums = (roundings * u + (2 * problem.sizes.J + 4) * FLOAT32) * (weights.abs() @ values)
    underflow = torch.finfo(dtype).tiny * (values.sum(-2, keepdim=True) + u)  # of weights, and of the output
    return output, by_scores + by_sums + underflow


def by_rows(problem, output, weights, values, errors):
    """What the errors of the scores do to the output."""
    attention = problem.attention
    normalizer = attention.normalizer
    s = scores(attention, problem.prepared, problem.grid)
    marked = not isinstance(normalizer, rg.normalizers.SumNormalizer | rg.normalizers.Unnormalized)
    allowed = (s > -torch.inf) if marked else attention_allows(problem)
    errors = errors.expand_as(s).masked_fill(~allowed, 0.0)
    if isinstance(normalizer, rg.normalizers.Unnormalized):
        return errors @ values
    if isinstance(normalizer, rg.normalizers.SumNormalizer):
        off, total = errors.sum(-1, keepdim=True), s.sum(-1, keepdim=True)
        bound = (errors @ values + off * output.abs()) / (total - off)
        return bound.masked_fill(off >= total, torch.inf).masked_fill(total == 0, 0.0)
    if isinstance(normalizer, rg.normalizers.Sparsemax | rg.normalizers.Entmax15):
        return errors.norm(dim=-1, keepdim=True) * (allowed.double() @ values.square()).sqrt()
    worst = errors.amax(-1, keepdim=True)
    bound = torch.expm1(2 * worst / getattr(normalizer, "temperature", 1.0)) * (weights @ values)
    kept = getattr(normalizer, "k", 1 if isinstance(normalizer, rg.normalizers.Hardmax) else s.shape[-1])
    if kept < s.shape[-1]:  # a choice between keys closer than the error is open
        ranked = s.sort(-1, descending=True).values
        gap = (ranked[..., kept - 1] - ranked[..., kept]).nan_to_num(torch.inf)[..., None]
        bound = bound.masked_fill(gap <= 2 * worst, torch.inf)
    return bound


def attention_allows(problem):
    mask, s = problem.attention.mask, problem.sizes
    shape = (s.B, s.H, s.I, s.J)
    return torch.ones(shape, dtype=torch.bool) if mask is None else mask.allowed(problem.grid).expand(shape)


def score_errors(problem, u):
    """A bound of |ds_ij|, (B, H, I, J)."""
    attention = problem.attention
    moved = 0 if attention.position is None else POSITION * len(getattr(attention.position, "parts", "1"))
    score = attention.score
    if isinstance(score, rg.scores.FeatureScore):
        total = kernel_errors(problem, u)
    elif score.scale(problem.sizes.D) is None:
        own = u * (moved + PROJECTION) + (problem.sizes.D + 3) * FLOAT32
        total = own * additive_norms(score, problem)
    else:
        learned = PROJECTION if isinstance(score, torch.nn.Module) else 0
        width = problem.prepared.query.shape[-1]
        own = u * (2 * moved + learned) + (width + problem.sizes.D + 3) * FLOAT32
        total = own * dot_norms(score, problem)
    for bias in attention.bias:
        if isinstance(bias, rg.transitions.ConvolutionFilter):
            factor = bias.transform(torch.ones_like(total), problem.grid, None, None).abs()
            total = factor * (total + 4 * FLOAT32 * dot_norms(score, problem))
            continue
        total = total + bias_errors(bias, problem, u * moved)
    return total


def heads_of(x, problem):
    return x.repeat_interleave(problem.sizes.H // x.shape[1], 1)


def encoded(problem):
    """Query and key as their position leaves them, and sizes of what was rounded on the way there, (..., n) each."""
    attention, positions = problem.attention, problem.positions
    inputs = problem.query, heads_of(problem.key, problem)
    if attention.position is None:
        return inputs, [x.norm(dim=-1) for x in inputs]
    places = positions.query(slice(0, problem.sizes.I), "cpu"), positions.key("cpu")
    encodings = attention.position.encode_query, attention.position.encode_key
    moved = [encode(x, place) for encode, x, place in zip(encodings, inputs, places, strict=True)]
    if not isinstance(attention.position, rg.encodings.Sinusoidal | rg.encodings.LearnedPositions):
        return moved, [y.norm(dim=-1) for y in moved]
    return moved, [x.norm(dim=-1) + (y - x).norm(dim=-1) for x, y in zip(inputs, moved, strict=True)]  # a sum


def dot_norms(score, problem):
    """c |q_i| |k_j|, with the norm of a projection in it."""
    moved, sizes = encoded(problem)
    prepared = problem.prepared.query, heads_of(problem.prepared.key, problem)
    of_query, of_key = (
        (p.norm(dim=-1) * size / m.norm(dim=-1)).nan_to_num(0.0)  # a query may be scaled to 0
        for p, m, size in zip(prepared, moved, sizes, strict=True)
    )
    if isinstance(score, rg.scores.Bilinear):
        of_query = sizes[0] * torch.linalg.matrix_norm(score.weight, 2)[:, None]
    if isinstance(score, rg.scores.LatentDot):
        of_query = sizes[0] * torch.linalg.matrix_norm(score.weight, 2).clamp_min(1)[:, None]
    return abs(score.scale(prepared[0].shape[-1])) * of_query[..., None] * of_key[:, :, None]


def additive_norms(score, problem):
    """sum_w |a_w| (1 + |W_w| (|q_i| + |k_j|) + |b_w|): the hyperbolic tangent has a slope of at most 1."""
    direction, (of_query, of_key) = score.direction.abs(), encoded(problem)[1]
    layers = [score.query, score.key] if isinstance(score, rg.scores.Additive) else [score.projection]
    slope = sum(layer.weight.norm(dim=-1) for layer in layers) @ direction
    shift = sum(layer.bias.abs() @ direction for layer in layers if layer.bias is not None)
    return direction.sum() + shift + slope * (of_query[..., None] + of_key[:, :, None])


def kernel_errors(problem, u):
    """From those of the features: their products are sums of non-negative numbers."""
    features, prepared = problem.attention.score.features, problem.prepared
    mine, theirs = prepared.query, heads_of(prepared.key, problem)
    if isinstance(features, rg.scores.EluPlusOne):
        off = [u * (2 * x + 1) for x in (mine, theirs)]  # |elu| <= 1 + phi, and the sum is rounded once more
    else:
        off = [
            x * torch.expm1(u * feature_roundings(features, y))
            for x, y in zip((mine, theirs), (problem.query, heads_of(problem.key, problem)), strict=True)
        ]
    first, second = off
    exact = (mine.shape[-1] + 3) * FLOAT32 * (mine @ theirs.mT)
    return first @ theirs.mT + (mine + first) @ second.mT + exact


def feature_roundings(features, x):
    """The error of w.x - |x|^2 / 2 - log m and of its exponential, in units of u; (..., n, 1)."""
    size = x.norm(dim=-1, keepdim=True)
    product = features.frequencies.norm(dim=-1).max() * size * features.head_dim**-0.25
    return 4 * product + 4 * (size.square() / (2 * features.head_dim**0.5) + math.log(features.num_features)) + 2


def bias_errors(bias, problem, u):
    query, key = (size.unsqueeze(axis) for size, axis in zip(encoded(problem)[1], (-1, -2), strict=True))
    if isinstance(bias, rg.biases.ShawBias):
        return (u + (problem.sizes.D + 3) * FLOAT32) * query * bias.keys.norm(dim=-1).max() * abs(bias.scale)
    if isinstance(bias, rg.biases.TransformerXLBias):
        own, scale = u + (2 * bias.head_dim + 6) * FLOAT32, bias.head_dim**-0.5
        waves = (bias.head_dim / 2) ** 0.5 * torch.linalg.matrix_norm(bias.projection, 2)[:, None, None]
        distance = (query + bias.distance.norm(dim=-1)[..., None]) * waves
        return own * scale * (distance + key * bias.content.norm(dim=-1)[..., None])
    if isinstance(bias, rg.biases.Softcap):
        return torch.full((1, 1, 1, 1), 4 * FLOAT32 * bias.cap, dtype=torch.float64)
    nothing = torch.zeros(1, problem.sizes.H, problem.sizes.I, problem.sizes.J, dtype=torch.float64)
    return 4 * FLOAT32 * bias.transform(nothing, problem.grid, None, None).abs()
