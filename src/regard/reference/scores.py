"""Scores: queries (I, D) and keys (J, D') -> (I, J)."""

from __future__ import annotations

import math

import numpy as np

from regard.pieces import feature_maps, score
from regard.pieces.piece import by_class
from regard.reference.basics import Array, array, of_head, undefined


@by_class("prepare", "tile", "scale")
def compare(piece: object, q: Array, k: Array, h: int) -> Array:
    """Scores (I, J) of queries (I, D) and keys (J, D') of query head `h`."""
    raise undefined("compare", piece)


@compare.register
def _(
    piece: score.Dot | score.Cosine | score.Bilinear | feature_maps.FeatureScore, q: Array, k: Array, h: int
) -> Array:
    q, k, factor = vectors(piece, q, k, h)
    return factor * (q @ k.T)


@by_class("prepare", "vectors", "tile", "scale")
def vectors(piece: object, q: Array, k: Array, h: int) -> tuple[Array, Array, float | Array]:
    """Of a score that is a dot product: the vectors that it multiplies, and the factor of the product."""
    raise undefined("vectors", piece)


@vectors.register
def _(piece: score.Dot, q: Array, k: Array, h: int) -> tuple[Array, Array, float | Array]:
    return q, k, 1 / math.sqrt(q.shape[1]) if piece.factor is None else of_head(piece.factor, h)


@vectors.register
def _(piece: score.Cosine, q: Array, k: Array, h: int) -> tuple[Array, Array, float | Array]:
    q, k = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-300) for x in (q, k))
    return q, k, of_head(piece.factor, h)


@vectors.register
def _(piece: score.Bilinear, q: Array, k: Array, h: int) -> tuple[Array, Array, float | Array]:
    return q @ array(piece.weight[h % len(piece.weight)]), k, 1.0


@vectors.register
def _(piece: feature_maps.FeatureScore, q: Array, k: Array, h: int) -> tuple[Array, Array, float | Array]:
    return features(piece.features, q), features(piece.features, k), 1.0


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


@by_class("__call__")
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
