"""Luong's attention, "general"."""

from regard.attention import Attention
from regard.catalog.entry import Mechanism
from regard.checks import explained
from regard.pieces import Bilinear


@explained
def luong_general(query_width: int, key_width: int, num_heads: int = 1) -> Attention:
    """A learned matrix compares decoder and encoder states, which may have different widths."""
    return Attention(Bilinear(query_width, key_width, num_heads))


MECHANISM = Mechanism(
    build=luong_general,
    formula="w_ij = softmax_j(q_i W k_j)",
    paper="Luong, Pham & Manning 2015, arXiv:1508.04025, eq. 8",
    year=2015,
    cost="O(I D D' + I J D') time, O(I + J) memory by blocks",
    tiny={"query_width": 8, "key_width": 6},
    sizes={"heads": 1, "queries": 7, "keys": 11, "key_width": 6},
    also_called=("multiplicative attention", "MultiplicativeAttention", "bilinear attention", "LuongAttention"),
)
