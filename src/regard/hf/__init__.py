"""Hugging Face models: their weights seen while their own backend runs. transformers is imported at use."""

from regard.hf.backend import register
from regard.hf.curve import CurvePoint, PruningCurve, pruning_curve
from regard.hf.gates import gated
from regard.hf.importance import Importance, importance
from regard.hf.prune import Pruned, prune
from regard.hf.watch import watch
from regard.hf.watched import Watched

__all__ = [
    "CurvePoint",
    "Importance",
    "Pruned",
    "PruningCurve",
    "Watched",
    "gated",
    "importance",
    "prune",
    "pruning_curve",
    "register",
    "watch",
]
