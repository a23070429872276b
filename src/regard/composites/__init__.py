"""Attentions that are made of several: sums, products, and keys that stand for many tokens."""

from typing import TYPE_CHECKING

from regard.base.other_libraries import answers_for
from regard.composites.composite import Composite, Part, PreparedParts
from regard.composites.grouped import Grouped
from regard.composites.memory import SegmentMemory
from regard.composites.sum import ConstantFactors, DifferenceFactors, Factors, GateFactors, HeadGate, Sum
from regard.composites.through import Nystrom, ThroughLatents
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
    "Part",
    "PreparedParts",
    "ProjectedGroups",
    "SegmentMemory",
    "Sum",
    "ThroughLatents",
]

if not TYPE_CHECKING:
    __getattr__ = answers_for(__name__, __all__)
