"""Attention maps, heads and backends of Hugging Face models. transformers is imported when it is first used."""

from typing import TYPE_CHECKING

from regard.base.other_libraries import answers_for
from regard.hf.adapters import AdaptedCall, adapter
from regard.hf.backend import register
from regard.hf.capture import Generation, WatchedAttention, WatchedStep, watch
from regard.hf.edit_effects import EditResult, edit_effect
from regard.hf.editing import EditedRun, edit, streaming
from regard.hf.heads import (
    CurvePoint,
    ImportanceScores,
    PruningResult,
    QualityCurve,
    gated,
    importance,
    prune,
    pruning_curve,
)
from regard.hf.heads.projections import composition, copying_scores, head_weights
from regard.hf.models import load_model
from regard.hf.text_probes import CacheCost
from regard.hf.text_reader import TextReader, TextResult

__all__ = [
    "AdaptedCall",
    "CacheCost",
    "CurvePoint",
    "EditResult",
    "EditedRun",
    "Generation",
    "ImportanceScores",
    "PruningResult",
    "QualityCurve",
    "TextReader",
    "TextResult",
    "WatchedAttention",
    "WatchedStep",
    "adapter",
    "composition",
    "copying_scores",
    "edit",
    "edit_effect",
    "gated",
    "head_weights",
    "importance",
    "load_model",
    "prune",
    "pruning_curve",
    "register",
    "streaming",
    "watch",
]

if not TYPE_CHECKING:
    __getattr__ = answers_for(__name__, __all__)
