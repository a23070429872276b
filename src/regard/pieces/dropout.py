"""Dropout as a function of a seed and (b, h, i, j), so every engine and every tile drops the same weights."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from regard.pieces.grid import Grid

#: The greatest word of 32 bits; `& _WORD` keeps the lowest 32 bits of a number.
_WORD = 0xFFFFFFFF
#: Added before mixing, since mixing maps 0 to 0.
_STEP = 0x9E3779B9
Word = TypeVar("Word", int, Tensor)


def kept(grid: Grid, rate: float, seed: int) -> Tensor:
    """True with probability 1 - rate for each (b, h, i, j), decided by hashing them with the seed.

    With a random number generator the pattern would depend on the order of the blocks. With a hash the backward pass
    can recompute any block, and a map can compute any tile after dropout. The coordinates are mixed in one after the
    other, the seed first, because many pairs have the same sum of coordinates.
    """
    sequence = _mix(_mix(grid.b + _mix(seed)) + grid.h)
    pair = _mix(_mix(sequence + grid.i) + grid.j)
    return pair >= dropped_words(rate)


def dropped_words(rate: float) -> int:
    """How many of the 2^32 words mean that a weight is dropped: those below this number."""
    return round(rate * (_WORD + 1))


def _mix(x: Word) -> Word:
    """The finalizer of MurmurHash3 on 32-bit words held in int64 (Appleby, public domain)."""
    x = (x + _STEP) & _WORD
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _WORD
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _WORD
    return x ^ (x >> 16)
