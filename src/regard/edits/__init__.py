"""Edits of attention, as values: which pairs of queries and keys, and what happens to their scores and weights."""

from regard.edits.reading import edit_from_json
from regard.edits.selection import Where, where
from regard.edits.values import (
    ActivationPatch,
    AddToScores,
    AttentionEdit,
    EditSequence,
    KnockOut,
    ReplaceWeights,
    ScaleWeights,
)

__all__ = [
    "ActivationPatch",
    "AddToScores",
    "AttentionEdit",
    "EditSequence",
    "KnockOut",
    "ReplaceWeights",
    "ScaleWeights",
    "Where",
    "edit_from_json",
    "where",
]
