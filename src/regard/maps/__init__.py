"""The weights of an attention on demand, and statistics that stream over them."""

from regard.maps.attention_map import AttentionMap
from regard.maps.folds import Distance, Entropy, Fold, Links, Mass, Pool, Received, Similarity, Tile, Top
from regard.maps.ring_map import RingMap

__all__ = [
    "AttentionMap",
    "Distance",
    "Entropy",
    "Fold",
    "Links",
    "Mass",
    "Pool",
    "Received",
    "RingMap",
    "Similarity",
    "Tile",
    "Top",
]
