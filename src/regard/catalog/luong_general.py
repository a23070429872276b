"""Luong's attention, "general"."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.scores import Bilinear


@explained
def luong_general(query_dim: int, key_dim: int, num_heads: int = 1) -> Attention:
    """A learned matrix compares decoder and encoder states, which may have different widths.

    Each of `num_heads` heads has its own.
    """
    return Attention(Bilinear(query_dim, key_dim, num_heads))


MECHANISM = CatalogEntry(
    build=luong_general,
    formula="w_ij = softmax_j(q_i W k_j)",
    paper="Luong, Pham & Manning 2015, arXiv:1508.04025, eq. 8",
    year=2015,
    cost="O(I D D' + I J D') time, O(I + J) memory by blocks",
    tiny={"query_dim": 8, "key_dim": 6},
    sizes={"heads": 1, "queries": 7, "keys": 11, "key_dim": 6},
    also_called=("multiplicative attention", "MultiplicativeAttention", "bilinear attention", "LuongAttention"),
)
