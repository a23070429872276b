"""Normalizers: from the scores of a row to its weights."""

from typing import TYPE_CHECKING

from regard.base.other_libraries import answers_for
from regard.pieces.normalizer import (
    Entmax15,
    Hardmax,
    LearnedSink,
    Normalizer,
    Sigmoid,
    Softmax,
    Sparsemax,
    SumNormalizer,
    TopK,
    Unnormalized,
)

__all__ = [
    "Entmax15",
    "Hardmax",
    "LearnedSink",
    "Normalizer",
    "Sigmoid",
    "Softmax",
    "Sparsemax",
    "SumNormalizer",
    "TopK",
    "Unnormalized",
]

if not TYPE_CHECKING:
    __getattr__ = answers_for(__name__, __all__)
