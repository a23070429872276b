"""Attribution: which weights and which tokens made a prediction, and whether the answer is faithful."""

from regard.attribution.attribute import attribute
from regard.attribution.edge_patching import HeadEdges
from regard.attribution.faithfulness import FaithfulnessCurves, faithfulness
from regard.attribution.result import Attribution
from regard.attribution.sweeps import SweepTable, sweep
from regard.attribution.target import Target

__all__ = [
    "Attribution",
    "FaithfulnessCurves",
    "HeadEdges",
    "SweepTable",
    "Target",
    "attribute",
    "faithfulness",
    "sweep",
]
