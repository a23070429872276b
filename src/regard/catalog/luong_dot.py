"""Luong's attention, "dot"."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.scores import Dot


@explained
def luong_dot() -> Attention:
    """The score is the dot product of decoder state and encoder state, without a factor and without parameters."""
    return Attention(Dot(scale=1.0))


MECHANISM = CatalogEntry(
    build=luong_dot,
    formula="w_ij = softmax_j(q_i . k_j), with q the decoder state of the step itself (s_t)",
    paper="Luong, Pham & Manning 2015, arXiv:1508.04025, eq. 8",
    year=2015,
    cost="O(I J D) time, O(I + J) memory by blocks",
    sizes={"heads": 1, "queries": 7, "keys": 11},
    disagree="keras' Attention is this mechanism: it has no factor 1 / sqrt(D).",
    also_called=("dot-product attention", "DotProductAttention", "LuongAttention"),
)
