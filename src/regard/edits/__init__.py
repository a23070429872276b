"""Edits of attention, as values: which pairs of queries and keys, and what happens to their scores and weights."""

from typing import TYPE_CHECKING

from regard.base.other_libraries import answers_for
from regard.edits.values import (
    ActivationPatch,
    AddToScores,
    AttentionEdit,
    EditSequence,
    KnockOut,
    ReplaceWeights,
    ScaleWeights,
    edit_from_json,
)
from regard.edits.where import Where

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
]

if not TYPE_CHECKING:
    __getattr__ = answers_for(__name__, __all__)
