"""Biases: scores (I, J) -> scores (I, J)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from regard.pieces import bias, convolution, distance_bias, forgetting
from regard.pieces.piece import by_class
from regard.reference.basics import Array, Place, array, of_head, undefined


@by_class("prepare", "transform", "term")
def shift(piece: object, s: Array, q: Array, k: Array, place: Place) -> Array:
    """Scores (I, J) of one head -> scores (I, J); `q` (I, D) and `k` (J, D) are its queries and keys."""
    raise undefined("shift", piece)


@shift.register
def _(piece: bias.Softcap, s: Array, q: Array, k: Array, place: Place) -> Array:
    cap = of_head(piece.cap, place.h)
    return cap * np.tanh(s / cap)


@shift.register
def _(piece: bias.ALiBi, s: Array, q: Array, k: Array, place: Place) -> Array:
    return s - alibi_slope(place.h, piece.num_heads) * np.abs(place.i - place.j)


def alibi_slope(head: int, num_heads: int) -> float:
    """2^(-8 (h + 1) / P) for the first P heads, P the largest power of 2; for others 2^(-8 (2 (h - P) + 1) / 2P)."""
    power = 2 ** math.floor(math.log2(num_heads))
    return 2.0 ** (-8 * (head + 1) / power if head < power else -8 * (2 * (head - power) + 1) / (2 * power))


@shift.register
def _(piece: bias.T5Bias, s: Array, q: Array, k: Array, place: Place) -> Array:
    distances, pairs = np.unique(place.j - place.i, return_inverse=True)
    buckets = np.array([t5_bucket(int(distance), piece) for distance in distances], int)
    return s + array(piece.table)[:, place.h][buckets[pairs].reshape(s.shape)]


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
    return s + np.einsum("id,ijd->ij", q, array(piece.keys)[distance]) * array(piece.scale)


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
    """The sum of log f_l over the keys l with j < l <= i; 0 for later keys, which a causal mask forbids."""
    between = (place.i[..., None] >= place.j.ravel()) & (place.j.ravel() > place.j[..., None])
    return s + np.where(between, log_forget, 0.0).sum(-1)


@shift.register
def _(piece: convolution.ConvolutionFilter, s: Array, q: Array, k: Array, place: Place) -> Array:
    """s_ij h_(i-j), and 0 where there is no h; a filter of a user computes its h itself."""
    if isinstance(piece, convolution.TokenShift):
        share = array(piece.share)[place.h]
        taps = np.array([share, 1 - share])
    else:
        taps = array(piece.numbers if isinstance(piece, convolution.Taps) else piece.taps())[place.h]
    behind = place.i - place.j
    return s * np.where((behind >= 0) & (behind < len(taps)), taps[np.clip(behind, 0, len(taps) - 1)], 0.0)
