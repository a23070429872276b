"""Luong's attention, "dot"."""

from regard.attention import Attention
from regard.catalog.mechanism import Mechanism
from regard.checks import explained
from regard.pieces import Dot


@explained
def luong_dot() -> Attention:
    """The score of a decoder state and an encoder state is their plain product, with no factor and no weights."""
    return Attention(Dot(scale=1.0))


MECHANISM = Mechanism(
    build=luong_dot,
    formula="w_ij = softmax_j(q_i . k_j), with q the decoder state of the step itself (s_t)",
    paper="Luong, Pham & Manning 2015, arXiv:1508.04025, eq. 8",
    cost="O(I J D) time, O(I + J) memory by blocks",
    sizes={"heads": 1, "queries": 7, "keys": 11},
    disagree="keras' Attention is this one (no 1 / sqrt(D)), though it is often read as scaled dot-product.",
)
