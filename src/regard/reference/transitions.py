"""Transitions: what each token does to the memory of a recurrent layer, one D x D matrix for each token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from regard.pieces import transition
from regard.pieces.piece import by_class
from regard.reference.basics import Array, array, of_head, undefined


@dataclass(frozen=True)
class Written:
    """The matrices A (J, D, D), the written keys (J, D), and the weight (I,) of each query on its own token beside it.

    `reads_before`: a query reads the memory before its own token changes it.
    """

    matrices: Array
    keys: Array
    own: Array | None = None
    reads_before: bool = False


@by_class("prepare", "normalized")
def transit(piece: object, q: Array, k: Array, h: int, **tensors: Array) -> Written:
    """Queries (I, D), keys (J, D) and the tensors of the call, for head `h` -> what each token does to the memory."""
    raise undefined("transit", piece)


def _decays(log_decay: Array, k: Array) -> Array:
    """diag(exp g_t) for each token: (J, 1 or D) and keys (J, D) -> (J, D, D)."""
    return np.exp(log_decay)[:, :, None] * np.eye(k.shape[1])


@transit.register
def _(piece: transition.Decay, q: Array, k: Array, h: int, log_decay: Array | None = None) -> Written:
    constant = of_head(piece.log_decay, h) if log_decay is None else log_decay[:, None]
    return Written(_decays(np.broadcast_to(constant, (len(k), 1)), k), k)


@transit.register
def _(piece: transition.ChannelDecay, q: Array, k: Array, h: int, log_decay: Array) -> Written:
    if piece.complement:
        k = k * (1 - np.exp(log_decay))
    if piece.bonus is None:
        return Written(_decays(log_decay, k), k)
    own = (q * array(piece.bonus[h]) * k[len(k) - len(q) :]).sum(1)
    return Written(_decays(log_decay, k), k, own, reads_before=True)


@transit.register
def _(piece: transition.StateSpace, q: Array, k: Array, h: int, step: Array) -> Written:
    own = None if piece.skip is None else np.full(len(q), float(of_head(piece.skip, h)[0]))
    return Written(_decays(step[:, None] * of_head(piece.rate, h), k), k * step[:, None], own)


def _erasing(u: Array, w: Array) -> Array:
    """I - u_t w_t^T for each token: (J, D), (J, D) -> (J, D, D)."""
    return np.eye(u.shape[1]) - u[:, :, None] * w[:, None, :]


@transit.register
def _(piece: transition.Delta, q: Array, k: Array, h: int, beta: Array) -> Written:
    return Written(_erasing(beta[:, None] * k, k), beta[:, None] * k)


@transit.register
def _(piece: transition.GatedDelta, q: Array, k: Array, h: int, log_decay: Array, beta: Array) -> Written:
    return Written(_erasing(beta[:, None] * k, k) @ _decays(log_decay[:, None], k), beta[:, None] * k)


@transit.register
def _(piece: transition.KimiDelta, q: Array, k: Array, h: int, log_decay: Array, beta: Array) -> Written:
    return Written(_erasing(beta[:, None] * k, k) @ _decays(log_decay, k), beta[:, None] * k)


@transit.register
def _(piece: transition.RWKV7, q: Array, k: Array, h: int, log_decay: Array, address: Array, rate: Array) -> Written:
    """A = diag(exp g) - (a * c) c^T: what is erased is read before the decay."""
    erased = (rate * address)[:, :, None] * address[:, None, :]
    own = None if piece.bonus is None else (q * array(piece.bonus[h]) * k[len(k) - len(q) :]).sum(1)
    return Written(_decays(log_decay, k) - erased, k, own)
