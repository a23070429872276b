"""Gated linear attention."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.scores import Dot
from regard.transitions import ChannelDecay


@explained
def gla() -> Attention:
    """Every token decides, channel by channel of the keys, how much of the memory stays.

    The call has `log_decay` (B, H, J, D), the logarithm of the gates.
    """
    return Attention(Dot(), transition=ChannelDecay())


MECHANISM = CatalogEntry(
    build=gla,
    formula="w_ij = q_i . (k_j exp(g_{j+1} + ... + g_i)) / sqrt(D) for j <= i, with log-decays g of each channel",
    paper="Yang et al. 2023, Gated Linear Attention, arXiv:2312.06635",
    family="transported",
    year=2023,
    cost="O(n D E) time, O(n) memory; a state of D x E numbers for generation, at any length",
    disagree="flash-linear-attention divides its log-gates by 16 in the layer, not in the operator.",
    also_called=("gated linear attention", "GLA"),
)
