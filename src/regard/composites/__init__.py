"""Attentions that are made of several: sums, products, and keys that stand for many tokens."""

from regard.composites.composite import Composite
from regard.composites.factors import ConstantFactors, DifferenceFactors, Factors, GateFactors, HeadGate
from regard.composites.grouped import Grouped
from regard.composites.latents import ThroughLatents
from regard.composites.memory import SegmentMemory
from regard.composites.nystrom import Nystrom
from regard.composites.plan import CompositePlan
from regard.composites.sum import Sum

__all__ = [
    "Composite",
    "CompositePlan",
    "ConstantFactors",
    "DifferenceFactors",
    "Factors",
    "GateFactors",
    "Grouped",
    "HeadGate",
    "Nystrom",
    "SegmentMemory",
    "Sum",
    "ThroughLatents",
]
