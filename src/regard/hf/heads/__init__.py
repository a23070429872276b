"""The heads of a model: gate them, measure how important each one is, and remove some."""

from regard.hf.heads.gates import gated
from regard.hf.heads.head_importance import ImportanceScores, importance
from regard.hf.heads.pruning import PruningResult, prune
from regard.hf.heads.pruning_curve import CurvePoint, QualityCurve, pruning_curve

__all__ = [
    "CurvePoint",
    "ImportanceScores",
    "PruningResult",
    "QualityCurve",
    "gated",
    "importance",
    "prune",
    "pruning_curve",
]
