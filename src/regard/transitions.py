"""Transitions: recurrent layers, whose state a token changes, and convolutions."""

from typing import TYPE_CHECKING

from regard.base.other_libraries import answers_for
from regard.pieces.convolution import ConvolutionFilter, Taps, TokenShift
from regard.pieces.transition import (
    RWKV7,
    ChannelDecay,
    Decay,
    Delta,
    GatedDelta,
    KimiDelta,
    StateSpace,
    Steps,
    Transition,
)

__all__ = [
    "RWKV7",
    "ChannelDecay",
    "ConvolutionFilter",
    "Decay",
    "Delta",
    "GatedDelta",
    "KimiDelta",
    "StateSpace",
    "Steps",
    "Taps",
    "TokenShift",
    "Transition",
]

if not TYPE_CHECKING:
    __getattr__ = answers_for(__name__, __all__)
