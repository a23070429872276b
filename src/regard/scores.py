"""Scores: how alike a query and a key are, and the feature maps of linear attention."""

from typing import TYPE_CHECKING

from regard.base.other_libraries import answers_for
from regard.pieces.feature_maps import EluPlusOne, FeatureMap, FeatureScore, RandomFeatures
from regard.pieces.score import Additive, Bilinear, Concat, Cosine, Dot, LatentDot, Score

__all__ = [
    "Additive",
    "Bilinear",
    "Concat",
    "Cosine",
    "Dot",
    "EluPlusOne",
    "FeatureMap",
    "FeatureScore",
    "LatentDot",
    "RandomFeatures",
    "Score",
]

if not TYPE_CHECKING:
    __getattr__ = answers_for(__name__, __all__)
