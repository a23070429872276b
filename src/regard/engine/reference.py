"""The reference engine: the definition of every piece in NumPy, float64, dense, one head at a time.

This file is the specification. It reads the fields of the pieces and shares no code with them: masks are evaluated
pair by pair from positions, bisection finds thresholds, RoPE is a product of complex numbers, slopes and buckets
follow the formulas of the papers. Only dropout is shared, since which weights it drops is a hash of their indices.
Output and weights of every engine are tested against this one.
"""

from __future__ import annotations

import math
from functools import singledispatch
from typing import Any

import numpy as np
import torch

from regard.engine.problem import Cost, Engine, Problem, Result
from regard.engine.reference_masks import Array, Place, attends, undefined
from regard.engine.reference_positions import encode as encode  # named in the error of `undefined`
from regard.engine.reference_positions import encode_heads
from regard.engine.reference_transitions import array, transit
from regard.pieces import bias, convolution, distance_bias, feature_maps, forgetting, normalizer, score
from regard.pieces.dropout import kept
from regard.pieces.grid import Grid


class Reference(Engine):
    """Runs the definition."""

    name = "reference"
    description = "follows the definition in NumPy, in float64, one head at a time"

    def refusal(self, problem: Problem) -> str | None:
        if problem.learns:
            return "NumPy has no gradients; wrap the call in torch.no_grad()"
        return None

    def run(self, problem: Problem) -> Result:
        output, _ = reference(problem)
        return Result(torch.from_numpy(output).to(problem.value), None)

    def cost(self, problem: Problem) -> Cost:
        s = problem.sizes
        pairs = s.B * s.H * s.I * s.J
        return Cost(pairs, pairs * (2 * s.D + 2 * s.E + 4), pairs * 8 * 4)


@np.errstate(invalid="ignore")  # of NaN and infinite inputs, which torch does not warn of either
def reference(problem: Problem) -> tuple[Array, Array]:
    """Output (B, H, I, E) and weights (B, H, I, J) of a problem, by definition."""
    s = problem.sizes
    outputs, weights = np.zeros((s.B, s.H, s.I, s.E)), np.zeros((s.B, s.H, s.I, s.J))
    for b in range(s.B):
        for h in range(s.H):
            outputs[b, h], weights[b, h] = one_head(problem, b, h)
    return outputs, weights


def one_head(problem: Problem, b: int, h: int) -> tuple[Array, Array]:
    """Output (I, E) and weights (I, J) of one head."""
    attention, g = problem.attention, h // problem.sizes.R
    place = Place(b, h, *_positions(problem))
    q, k, v = (array(t) for t in (problem.query[b, h], problem.key[b, g], problem.value[b, g]))
    if attention.position is not None:
        all_q, all_k = array(problem.query[b]), array(problem.key[b])
        given = {name: array(tensor[b]) for name, tensor in problem.call_tensors.items()}
        q = encode_heads(attention.position, all_q, place, True, given)[h]
        k = encode_heads(attention.position, all_k, place, False, given)[g]
    if attention.transition is not None:
        w = carried(problem, q, k, b, h)
        return w @ v, w
    s = compare(attention.score, q, k, h)
    for piece in attention.bias:
        s = shift(piece, s, q, k, place, **_tensors_of(piece, problem, b, h))
    allowed = np.ones(s.shape, bool) if attention.mask is None else attends(attention.mask, place)
    w = normalize(attention.normalizer, s, np.broadcast_to(allowed, s.shape), h)
    dropped = w * _dropout_factors(problem, place) if problem.dropout else w
    return dropped @ v, w


def _tensors_of(piece: object, problem: Problem, b: int, h: int) -> dict[str, Array]:
    """The tensors of the call that a piece needs, for one head."""
    return {name: array(problem.call_tensors[name][b, h]) for name in getattr(piece, "needs", {})}


def _positions(problem: Problem) -> tuple[Array, Array]:
    i = problem.positions.start + np.arange(problem.sizes.I)
    j = np.concatenate([np.arange(*span) for span in problem.positions.keys])
    return i[:, None], j[None, :]


def _dropout_factors(problem: Problem, place: Place) -> Array:
    i, j = torch.from_numpy(place.i.ravel()), torch.from_numpy(place.j.ravel())
    grid = Grid(torch.tensor([place.b], device="cpu"), torch.tensor([place.h], device="cpu"), i, j)
    return array(kept(grid, problem.dropout, problem.seed or 0)[0, 0]) / (1 - problem.dropout)


# Scores: (I, D), (J, D') -> (I, J)


@singledispatch
def compare(piece: object, q: Array, k: Array, h: int) -> Array:
    """Scores (I, J) of queries (I, D) and keys (J, D')."""
    raise undefined("compare", piece)


@compare.register
def _(piece: score.Dot, q: Array, k: Array, h: int) -> Array:
    return q @ k.T * (1 / math.sqrt(q.shape[1]) if piece.factor is None else piece.factor)


@compare.register
def _(piece: score.Cosine, q: Array, k: Array, h: int) -> Array:
    norms = np.linalg.norm(q, axis=1)[:, None] * np.linalg.norm(k, axis=1)[None, :]
    return piece.factor * (q @ k.T) / np.maximum(norms, 1e-300)


@compare.register
def _(piece: score.Bilinear, q: Array, k: Array, h: int) -> Array:
    return q @ array(piece.weight[h % len(piece.weight)]) @ k.T


@compare.register
def _(piece: score.LatentDot, q: Array, k: Array, h: int) -> Array:
    rotated, weight = piece.rotary_dim, array(piece.weight[h])
    own_keys = np.concatenate([k[:, :rotated], k[:, rotated:] @ weight.T], axis=1)  # the expanded form
    return q @ own_keys.T / np.sqrt(rotated + weight.shape[0])


@compare.register
def _(piece: score.Additive, q: Array, k: Array, h: int) -> Array:
    hidden = (q @ array(piece.query.weight).T)[:, None] + (k @ array(piece.key.weight).T)[None]
    if piece.query.bias is not None:
        hidden = hidden + array(piece.query.bias)
    return np.tanh(hidden) @ array(piece.direction)


@compare.register
def _(piece: score.Concat, q: Array, k: Array, h: int) -> Array:
    pairs = np.concatenate([np.repeat(q[:, None], len(k), 1), np.repeat(k[None], len(q), 0)], axis=2)
    hidden = pairs @ array(piece.projection.weight).T
    if piece.projection.bias is not None:
        hidden = hidden + array(piece.projection.bias)
    return np.tanh(hidden) @ array(piece.direction)


@compare.register
def _(piece: feature_maps.FeatureScore, q: Array, k: Array, h: int) -> Array:
    return features(piece.features, q) @ features(piece.features, k).T


@singledispatch
def features(piece: object, x: Array) -> Array:
    """phi: (n, D) -> (n, W)."""
    raise undefined("features", piece)


@features.register
def _(piece: feature_maps.EluPlusOne, x: Array) -> Array:
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


@features.register
def _(piece: feature_maps.RandomFeatures, x: Array) -> Array:
    x = x / piece.head_dim**0.25
    exponent = x @ array(piece.frequencies).T - (x**2).sum(1, keepdims=True) / 2
    return np.exp(exponent) / math.sqrt(piece.num_features)


# Biases: (I, J) -> (I, J)


@singledispatch
def shift(piece: object, s: Array, q: Array, k: Array, place: Place) -> Array:
    """Scores (I, J) -> scores (I, J)."""
    raise undefined("shift", piece)


@shift.register
def _(piece: bias.Softcap, s: Array, q: Array, k: Array, place: Place) -> Array:
    return piece.cap * np.tanh(s / piece.cap)


@shift.register
def _(piece: bias.ALiBi, s: Array, q: Array, k: Array, place: Place) -> Array:
    return s - alibi_slope(place.h, piece.num_heads) * np.abs(place.i - place.j)


def alibi_slope(head: int, num_heads: int) -> float:
    """2^(-8 (h + 1) / P) for the first P heads, P the largest power of 2; for others 2^(-8 (2 (h - P) + 1) / 2P)."""
    power = 2 ** math.floor(math.log2(num_heads))
    return 2.0 ** (-8 * (head + 1) / power if head < power else -8 * (2 * (head - power) + 1) / (2 * power))


@shift.register
def _(piece: bias.T5Bias, s: Array, q: Array, k: Array, place: Place) -> Array:
    return (
        s
        + array(piece.table)[:, place.h][np.vectorize(t5_bucket, otypes=[int], excluded=(1,))(place.j - place.i, piece)]
    )


def t5_bucket(distance: int, piece: bias.T5Bias) -> int:
    """The bucket of j - i: one for each near distance, then exact + (B - exact) log(|j - i| / exact) / log(M / exact).

    The logarithm is that of float32, as in T5's code, since its rounding decides where a bucket ends.
    """
    num_buckets = piece.num_buckets // 2 if piece.bidirectional else piece.num_buckets
    ahead = num_buckets if piece.bidirectional and distance > 0 else 0
    behind = abs(distance) if piece.bidirectional else max(-distance, 0)
    exact = num_buckets // 2
    if behind < exact:
        return ahead + behind
    ratio = np.log(np.float32(behind) / np.float32(exact)) / np.float32(math.log(piece.max_distance / exact))
    return ahead + min(exact + int(ratio * np.float32(num_buckets - exact)), num_buckets - 1)


@shift.register
def _(piece: bias.ShawBias, s: Array, q: Array, k: Array, place: Place) -> Array:
    distance = np.clip(place.j - place.i, -piece.reach, piece.reach) + piece.reach
    return s + np.einsum("id,ijd->ij", q, array(piece.keys)[distance]) * piece.scale


@shift.register
def _(piece: bias.TransformerXLBias, s: Array, q: Array, k: Array, place: Place) -> Array:
    u, v, W = (array(p[place.h]) for p in (piece.content, piece.distance, piece.projection))
    angles = (place.i - place.j)[..., None] / piece.base ** (np.arange(0, piece.head_dim, 2) / piece.head_dim)
    r = np.concatenate([np.sin(angles), np.cos(angles)], -1)
    return s + (k @ u[0] + np.einsum("id,ijd->ij", q + v, r @ W.T)) / math.sqrt(piece.head_dim)


@shift.register
def _(piece: bias.LearnedTable, s: Array, q: Array, k: Array, place: Place) -> Array:
    return s + array(piece.table)[place.h][np.clip(place.j - place.i, -piece.reach, piece.reach) + piece.reach]


@shift.register
def _(piece: distance_bias.KERPLEBias, s: Array, q: Array, k: Array, place: Place) -> Array:
    a, b = (max(float(x[place.h].detach()), distance_bias.LEAST) for x in (piece.amplitude, piece.rate))
    apart = np.abs(place.i - place.j)
    return s - a * (apart ** min(b, 2.0) if piece.power else np.log(1 + b * apart))


@shift.register
def _(piece: distance_bias.FIREBias, s: Array, q: Array, k: Array, place: Place) -> Array:
    c = float(piece.rate.detach())
    length: Any = piece.fixed_length
    if length is None:
        length = np.maximum(place.i, abs(float(piece.share.detach()) * piece.threshold))  # type: ignore[union-attr]
    ratio = np.log(np.abs(c * (place.i - place.j)) + 1) / (np.log(np.abs(c * length) + 1) + 1e-6)
    w, b = array(piece.inner.weight)[:, 0], array(piece.inner.bias)
    hidden = np.maximum(ratio[..., None] * w + b, 0)
    return s + hidden @ array(piece.outer.weight)[place.h] + float(piece.outer.bias[place.h].detach())


@shift.register
def _(piece: forgetting.ForgettingBias, s: Array, q: Array, k: Array, place: Place, log_forget: Array) -> Array:
    """Summed token by token; 0 for later keys, which a causal mask forbids."""
    between = (place.i[..., None] >= place.j.ravel()) & (place.j.ravel() > place.j[..., None])
    return s + np.where(between, log_forget, 0.0).sum(-1)


@shift.register
def _(piece: convolution.ConvolutionFilter, s: Array, q: Array, k: Array, place: Place) -> Array:
    if isinstance(piece, convolution.TokenShift):
        share = array(piece.share)[place.h]
        taps = np.array([share, 1 - share])
    else:
        taps = array(piece.numbers if isinstance(piece, convolution.Taps) else piece.taps())[place.h]
    behind = place.i - place.j
    return s * np.where((behind >= 0) & (behind < len(taps)), np.append(taps, 0.0)[np.clip(behind, 0, len(taps))], 0.0)


# Normalizers: (I, J) scores and allowed pairs -> (I, J) weights


@singledispatch
def normalize(piece: object, s: Array, allowed: Array, h: int) -> Array:
    """Scores (I, J) and allowed pairs (I, J) -> weights (I, J)."""
    raise undefined("normalize", piece)


def _softmax(s: Array, allowed: Array, sink: float | None) -> Array:
    s = np.where(allowed, s, -np.inf)
    greatest = np.maximum(s.max(1, keepdims=True), -np.inf if sink is None else sink)
    greatest = np.where(np.isfinite(greatest), greatest, 0.0)
    e = np.exp(s - greatest)
    total = e.sum(1, keepdims=True) + (0 if sink is None else np.exp(sink - greatest))
    return np.divide(e, total, out=np.zeros_like(e), where=total != 0)


@normalize.register
def _(piece: normalizer.Softmax, s: Array, allowed: Array, h: int) -> Array:
    return _softmax(s / piece.temperature, allowed, piece.sink)


@normalize.register
def _(piece: normalizer.LearnedSink, s: Array, allowed: Array, h: int) -> Array:
    return _softmax(s, allowed, float(piece.sink[h].detach()))


def _by_bisection(s: Array, allowed: Array, power: float) -> Array:
    """max(s - t, 0)^power with t such that each row sums to 1. The greatest score of a row is at most 1 above t."""
    s = np.where(allowed, s, -np.inf)
    high = np.where(allowed.any(1), s.max(1), 0.0)[:, None]
    low = high - 1.0
    for _ in range(100):
        middle = (low + high) / 2
        above = (np.maximum(s - middle, 0) ** power).sum(1, keepdims=True) > 1
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.where(allowed, np.maximum(s - low, 0) ** power, 0.0)


@normalize.register
def _(piece: normalizer.Sparsemax, s: Array, allowed: Array, h: int) -> Array:
    return _by_bisection(s, allowed, 1)


@normalize.register
def _(piece: normalizer.Entmax15, s: Array, allowed: Array, h: int) -> Array:
    return _by_bisection(s / 2, allowed, 2)


@normalize.register
def _(piece: normalizer.TopK, s: Array, allowed: Array, h: int) -> Array:
    order = np.argsort(-np.where(allowed, s, -np.inf), axis=1, kind="stable")[:, : piece.k]
    chosen = np.zeros_like(allowed)
    np.put_along_axis(chosen, order, True, axis=1)
    return _softmax(s, allowed & chosen, None)


@normalize.register
def _(piece: normalizer.Hardmax, s: Array, allowed: Array, h: int) -> Array:
    best = np.argmax(np.where(allowed, s, -np.inf), axis=1)
    return np.where(allowed, np.arange(s.shape[1])[None] == best[:, None], False).astype(np.float64)


@normalize.register
def _(piece: normalizer.SumNormalizer, s: Array, allowed: Array, h: int) -> Array:
    s = np.where(allowed, s, 0.0)
    total = s.sum(1, keepdims=True)
    return np.divide(s, total, out=np.zeros_like(s), where=total != 0)


@normalize.register
def _(piece: normalizer.Sigmoid, s: Array, allowed: Array, h: int) -> Array:
    count = np.maximum(allowed.sum(1, keepdims=True), 1)
    offset = np.log(count) if piece.offset is None else piece.offset
    return np.where(allowed, 1 / (1 + np.exp(-(np.where(allowed, s, 0.0) - offset))), 0.0)


@normalize.register
def _(piece: normalizer.Unnormalized, s: Array, allowed: Array, h: int) -> Array:
    return np.where(allowed, s, 0.0)


# Transitions: q_i, multiplied by one matrix for each token


def carried(problem: Problem, q: Array, k: Array, b: int, h: int) -> Array:
    """Weights (I, J) of one head: q_i . A_i ... A_{j+1} k_j."""
    piece, scale = problem.attention.transition, problem.attention.score
    tensors = _tensors_of(piece, problem, b, h)
    if getattr(piece, "unit", False):
        q, k = (x / np.sqrt((x**2).sum(1, keepdims=True) + 1e-6) for x in (q, k))
    q = compare(scale, q, np.eye(q.shape[1]), h)  # q_i . e_d, with the factor of the score
    written = transit(piece, q, k, h, **tensors)
    w = np.zeros((len(q), len(k)))
    for i, x in enumerate(q):
        token = i + len(k) - len(q)
        for j in range(token, -1, -1):
            if not (written.reads_before and j == token):
                w[i, j] = x @ written.keys[j]
                x = x @ written.matrices[j]
        w[i, token] += 0 if written.own is None else written.own[i]
    return w
