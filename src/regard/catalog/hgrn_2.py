"""HGRN-2."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.scores import Dot
from regard.transitions import ChannelDecay


@explained
def hgrn_2() -> Attention:
    """A gated recurrence with a matrix as memory: a channel writes as much as it forgets.

    The key is 1 - f for a forget gate f, so give keys of ones and the logarithm of f as `log_decay` (B, H, J, D).
    Other keys are multiplied by 1 - f.
    """
    return Attention(Dot(scale=1.0), transition=ChannelDecay(complement=True))


MECHANISM = CatalogEntry(
    build=hgrn_2,
    formula="w_ij = q_i . ((1 - f_j) f_{j+1} ... f_i) for j <= i, with forget gates f in [0, 1] of each channel "
    "and keys of ones",
    paper="Qin et al. 2024, HGRN2: Gated Linear RNNs with State Expansion, arXiv:2404.07904",
    family="transported",
    year=2024,
    cost="O(n D E) time, O(n) memory; a state of D x E numbers for generation, at any length",
    disagree="the paper raises the forget gates of later layers by a lower bound, which is part of its layer.",
    also_called=("gated linear recurrence", "HGRN2", "HGRN-2"),
)
