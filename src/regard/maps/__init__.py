"""The weights of an attention on demand, and statistics that stream over them."""

from regard.maps.attention_map import AttentionMap
from regard.maps.folds import (
    Distance,
    Entropy,
    Fold,
    KeyTotals,
    Links,
    MassOn,
    Pool,
    SignedMass,
    Similarity,
    Tile,
    TopLinks,
)
from regard.maps.ring_map import RingMap

__all__ = [
    "AttentionMap",
    "Distance",
    "Entropy",
    "Fold",
    "KeyTotals",
    "Links",
    "MassOn",
    "Pool",
    "RingMap",
    "SignedMass",
    "Similarity",
    "Tile",
    "TopLinks",
]
