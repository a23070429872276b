"""Normalizers: scores (I, J) and allowed pairs (I, J) -> weights (I, J)."""

from __future__ import annotations

import numpy as np

from regard.pieces import normalizer
from regard.pieces.piece import by_class
from regard.reference.basics import Array, array, of_head, undefined


@by_class(*normalizer.RULES, *normalizer.SHORTCUTS)
def normalize(piece: object, s: Array, allowed: Array, h: int) -> Array:
    """Scores (I, J) and allowed pairs (I, J) of query head `h` -> weights (I, J)."""
    raise undefined("normalize", piece)


def _softmax(s: Array, allowed: Array, sink: float | Array | None) -> Array:
    """exp(s) of allowed pairs, divided by their sum and exp(sink); an empty row is 0."""
    s = np.where(allowed, s, -np.inf)
    greatest = np.maximum(s.max(1, keepdims=True), -np.inf if sink is None else sink)
    greatest = np.where(np.isfinite(greatest), greatest, 0.0)
    e = np.exp(s - greatest)
    total = e.sum(1, keepdims=True) + (0 if sink is None else np.exp(sink - greatest))
    return np.divide(e, total, out=np.zeros_like(e), where=total != 0)


@normalize.register
def _(piece: normalizer.Softmax, s: Array, allowed: Array, h: int) -> Array:
    return _softmax(s / of_head(piece.temperature, h), allowed, piece.sink)


@normalize.register
def _(piece: normalizer.LearnedSink, s: Array, allowed: Array, h: int) -> Array:
    return _softmax(s, allowed, of_head(piece.sink, h))


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
    offset = np.log(count) if piece.offset is None else array(piece.offset)
    return np.where(allowed, 1 / (1 + np.exp(-(np.where(allowed, s, 0.0) - offset))), 0.0)


@normalize.register
def _(piece: normalizer.Unnormalized, s: Array, allowed: Array, h: int) -> Array:
    return np.where(allowed, s, 0.0)
