"""Encodings: positions, norms and temperatures, by which queries and keys are changed before the score."""

from typing import TYPE_CHECKING

from regard.base.other_libraries import answers_for
from regard.pieces.axial import AxialRoPE
from regard.pieces.encodings import Chain, PoPE, PositionTemperature, QKNorm, ScalableSoftmax, TwoSidedPosition
from regard.pieces.position import (
    Encoding,
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    RoPE,
    Scaling,
    Sinusoidal,
)
from regard.pieces.scaling import LongRoPEScaling, ProportionalScaling, YaRNScaling

__all__ = [
    "AxialRoPE",
    "Chain",
    "Encoding",
    "LearnedPositions",
    "LinearScaling",
    "Llama3Scaling",
    "LongRoPEScaling",
    "NTKScaling",
    "PoPE",
    "PositionTemperature",
    "ProportionalScaling",
    "QKNorm",
    "RoPE",
    "ScalableSoftmax",
    "Scaling",
    "Sinusoidal",
    "TwoSidedPosition",
    "YaRNScaling",
]

if not TYPE_CHECKING:
    __getattr__ = answers_for(__name__, __all__)
