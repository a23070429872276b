"""Biases: what is added to the scores, or done to them, before they are normalized."""

from typing import TYPE_CHECKING

from regard.base.other_libraries import answers_for
from regard.pieces.bias import AdditiveBias, ALiBi, Bias, LearnedTable, ShawBias, Softcap, T5Bias, TransformerXLBias
from regard.pieces.distance_bias import FIREBias, KERPLEBias
from regard.pieces.forgetting import ForgettingBias

__all__ = [
    "ALiBi",
    "AdditiveBias",
    "Bias",
    "FIREBias",
    "ForgettingBias",
    "KERPLEBias",
    "LearnedTable",
    "ShawBias",
    "Softcap",
    "T5Bias",
    "TransformerXLBias",
]

if not TYPE_CHECKING:
    __getattr__ = answers_for(__name__, __all__)
