"""One attention: the pieces in their order, for each head of each batch entry."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from regard.attention import Scored, Transported
from regard.pieces.dropout import kept
from regard.pieces.grid import Grid
from regard.reference.basics import Array, Place, array
from regard.reference.biases import shift
from regard.reference.masks import attends
from regard.reference.normalizers import normalize
from regard.reference.positions import encode_heads
from regard.reference.scores import compare, vectors
from regard.reference.transitions import transit

if TYPE_CHECKING:
    from regard.engine.problem import Problem


@np.errstate(invalid="ignore")  # of NaN and infinite inputs, which torch does not warn of either
def reference(problem: Problem) -> tuple[Array, Array]:
    """Output (B, H, I, E) and weights (B, H, I, J) of a problem, by definition, in float64.

    A query that may attend to no key has the output 0 and the weights 0.
    """
    s = problem.sizes
    outputs, weights = np.zeros((s.B, s.H, s.I, s.E)), np.zeros((s.B, s.H, s.I, s.J))
    for b in range(s.B):
        for h in range(s.H):
            outputs[b, h], weights[b, h] = one_head(problem, b, h)
    return outputs, weights


def one_head(problem: Problem, b: int, h: int) -> tuple[Array, Array]:
    """Output (I, E) and weights (I, J) of batch entry `b` and query head `h`. Weights are those before dropout."""
    attention, g = problem.attention, h // problem.sizes.R
    place = Place(b, h, *_positions(problem))
    q, k, v = (array(t) for t in (problem.query[b, h], problem.key[b, g], problem.value[b, g]))
    if attention.position is not None:  # a norm may read the channels of all heads
        all_q, all_k = array(problem.query[b]), array(problem.key[b])
        given = {name: array(tensor[b]) for name, tensor in problem.call_tensors.items()}
        q = encode_heads(attention.position, all_q, place, True, given)[h]
        k = encode_heads(attention.position, all_k, place, False, given)[g]
    w = WEIGHTS[attention.family](problem, q, k, place)
    dropped = w * _dropout_factors(problem, place) if problem.dropout else w
    return dropped @ v, w


def scored(problem: Problem, q: Array, k: Array, place: Place) -> Array:
    """Weights (I, J) of one head: normalize(bias(score(q_i, k_j))) where the mask allows."""
    attention = problem.attention
    s = compare(attention.score, q, k, place.h)
    for piece in attention.bias:
        s = shift(piece, s, q, k, place, **_tensors_of(piece, problem, place))
    allowed = np.ones(s.shape, bool) if attention.mask is None else attends(attention.mask, place)
    return normalize(attention.normalizer, s, np.broadcast_to(allowed, s.shape), place.h)


def _tensors_of(piece: object, problem: Problem, place: Place) -> dict[str, Array]:
    """The tensors of the call that a piece needs, for one head."""
    return {name: array(problem.call_tensors[name][place.b, place.h]) for name in getattr(piece, "needs", {})}


def _positions(problem: Problem) -> tuple[Array, Array]:
    """The positions of the queries (I, 1) and of the keys (1, J)."""
    i = problem.positions.start + np.arange(problem.sizes.I)
    j = np.concatenate([np.arange(*span) for span in problem.positions.keys])
    return i[:, None], j[None, :]


def _dropout_factors(problem: Problem, place: Place) -> Array:
    """0 for each weight that dropout drops, else 1 / (1 - share): (I, J)."""
    i, j = torch.from_numpy(place.i.ravel()), torch.from_numpy(place.j.ravel())
    grid = Grid(torch.tensor([place.b], device="cpu"), torch.tensor([place.h], device="cpu"), i, j)
    return array(kept(grid, problem.dropout, problem.seed or 0)[0, 0]) / (1 - problem.dropout)


def transported(problem: Problem, q: Array, k: Array, place: Place) -> Array:
    """Weights (I, J) of one head: q_i . A_i ... A_{j+1} k_j, with A and k of `transit`; 0 for later tokens.

    If a query reads the memory before its own token, A_i is left out, and the first weight is that of token i - 1.
    `own` is added to the weight of the own token.
    """
    piece, score, h = problem.attention.transition, problem.attention.score, place.h
    tensors = _tensors_of(piece, problem, place)
    q, k, factor = vectors(score, q, k, h)
    if getattr(piece, "unit", False):  # of the delta rules: vectors of length 1
        q, k = (x / np.sqrt((x**2).sum(1, keepdims=True) + 1e-6) for x in (q, k))
    q = q * factor
    written = transit(piece, q, k, h, **tensors)
    w = np.zeros((len(q), len(k)))
    for i, x in enumerate(q):  # x is q_i, then q_i A_i, then q_i A_i A_{i-1} ...
        token = i + len(k) - len(q)  # the queries are the last tokens
        for j in range(token, -1, -1):
            if not (written.reads_before and j == token):
                w[i, j] = x @ written.keys[j]
                x = x @ written.matrices[j]
        w[i, token] += 0 if written.own is None else written.own[i]
    return w


#: The weights of one head, by the family of the attention.
WEIGHTS = {Scored: scored, Transported: transported}
