"""Scalable softmax."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.encodings import ScalableSoftmax
from regard.masks import causal


@explained
def scalable_softmax(num_heads: int) -> Attention:
    """Scores grow with the logarithm of the number of keys, so that long rows stay sharp. The factor is learned."""
    return Attention(position=ScalableSoftmax(num_heads), mask=causal())


MECHANISM = CatalogEntry(
    build=scalable_softmax,
    formula="w_hij = softmax_j(s_h log(i + 1) q_hi . k_hj / sqrt(D)) over j <= i",
    paper="Nakanishi 2025, arXiv:2501.19399",
    year=2025,
    cost="the same as masked; H parameters",
    tiny={"num_heads": 2},
    sizes={"heads": 2, "queries": 16},
    disagree="n is the number of keys of the row. Codes that take the length of the whole text for every row give "
    "other weights to all rows but the last.",
    also_called=("scalable softmax", "SSMax", "log-length scaling", "logn attention"),
)
