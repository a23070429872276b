"""Cosine attention."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.scores import Cosine


@explained
def cosine(factor: float = 10.0) -> Attention:
    """Scores depend only on the angle between query and key, not on their lengths: Swin v2."""
    return Attention(Cosine(factor))


MECHANISM = CatalogEntry(
    build=cosine,
    formula="w_ij = softmax_j(factor cos(q_i, k_j))",
    paper="Liu et al. 2022, Swin Transformer V2, arXiv:2111.09883, section 3.2; Henry et al. 2020, arXiv:2010.04245",
    year=2022,
    used_by=("swinv2", "swin2sr"),
    cost="O(I J D) time, O(I + J) memory by blocks",
    disagree="Swin v2 learns a factor per head (at most 100) and adds a position bias.",
    also_called=("cosine attention", "content-based attention"),
)
