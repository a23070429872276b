"""Attentions that are made of several: sums, products, and keys that stand for many tokens."""

from typing import TYPE_CHECKING

from regard.base.other_libraries import answers_for
from regard.composites.composite import Composite
from regard.composites.factors import ConstantFactors, DifferenceFactors, Factors, GateFactors, HeadGate
from regard.composites.grouped import Grouped
from regard.composites.latents import ThroughLatents
from regard.composites.memory import SegmentMemory
from regard.composites.nystrom import Nystrom
from regard.composites.sum import Sum
from regard.pieces.key_groups import KeyGroups, MeanGroups, ProjectedGroups

__all__ = [
    "Composite",
    "ConstantFactors",
    "DifferenceFactors",
    "Factors",
    "GateFactors",
    "Grouped",
    "HeadGate",
    "KeyGroups",
    "MeanGroups",
    "Nystrom",
    "ProjectedGroups",
    "SegmentMemory",
    "Sum",
    "ThroughLatents",
]

if not TYPE_CHECKING:
    __getattr__ = answers_for(__name__, __all__)
