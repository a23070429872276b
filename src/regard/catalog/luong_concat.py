"""Luong's attention, "concat"."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.scores import Concat


@explained
def luong_concat(query_dim: int, key_dim: int, hidden: int = 256, bias: bool = False) -> Attention:
    """A small network scores the concatenated decoder and encoder states: an equivalent form of Bahdanau's score.

    `hidden` is the width of the network. With `bias` it has a bias inside the tanh.
    """
    return Attention(Concat(query_dim, key_dim, hidden, bias))


MECHANISM = CatalogEntry(
    build=luong_concat,
    formula="w_ij = softmax_j(v . tanh(W [q_i ; k_j]))",
    paper="Luong, Pham & Manning 2015, arXiv:1508.04025, eq. 8",
    year=2015,
    cost="O(I J hidden) time, O(I + J) memory by blocks",
    tiny={"query_dim": 8, "key_dim": 6, "hidden": 5},
    sizes={"heads": 1, "queries": 7, "keys": 11, "key_dim": 6},
    also_called=("concat attention", "ConcatAttention"),
)
