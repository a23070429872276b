"""The weights of an attention on demand, and statistics that stream over them."""

from typing import TYPE_CHECKING

from regard.base.other_libraries import answers_for
from regard.maps import call_map, changed_map  # noqa: F401  tell AttentionMap the families
from regard.maps.attention_map import AttentionMap
from regard.maps.changed_map import GradientMap, ValueWeightedMap
from regard.maps.combined_map import KeyGroupMap, ProductMap, SumMap
from regard.maps.dense_map import DenseMap
from regard.maps.divergence import Divergence
from regard.maps.paged_keys import PagedKeys
from regard.maps.reductions import (
    Distance,
    Entropy,
    KeyTotals,
    MassOn,
    MassWhere,
    Pool,
    Reduction,
    RowLinks,
    SignedMass,
    Similarity,
    Tile,
    TopLinks,
)
from regard.maps.ring_map import RingMap, RingTransportedMap
from regard.maps.transported_map import TransportedMap

__all__ = [
    "AttentionMap",
    "DenseMap",
    "Distance",
    "Divergence",
    "Entropy",
    "GradientMap",
    "KeyGroupMap",
    "KeyTotals",
    "MassOn",
    "MassWhere",
    "PagedKeys",
    "Pool",
    "ProductMap",
    "Reduction",
    "RingMap",
    "RingTransportedMap",
    "RowLinks",
    "SignedMass",
    "Similarity",
    "SumMap",
    "Tile",
    "TopLinks",
    "TransportedMap",
    "ValueWeightedMap",
]

if not TYPE_CHECKING:
    __getattr__ = answers_for(__name__, __all__)
