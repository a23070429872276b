"""Luong's attention, "concat"."""

from regard.attention import Attention
from regard.catalog.entry import Mechanism
from regard.checks import explained
from regard.pieces import Concat


@explained
def luong_concat(query_width: int, key_width: int, hidden: int = 256, bias: bool = False) -> Attention:
    """A small network scores the concatenated decoder and encoder states: an equivalent form of Bahdanau's score."""
    return Attention(Concat(query_width, key_width, hidden, bias))


MECHANISM = Mechanism(
    build=luong_concat,
    formula="w_ij = softmax_j(v . tanh(W [q_i ; k_j]))",
    paper="Luong, Pham & Manning 2015, arXiv:1508.04025, eq. 8",
    year=2015,
    cost="O(I J hidden) time, O(I + J) memory by blocks",
    tiny={"query_width": 8, "key_width": 6, "hidden": 5},
    sizes={"heads": 1, "queries": 7, "keys": 11, "key_width": 6},
    also_called=("concat attention", "ConcatAttention"),
)
