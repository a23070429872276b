"""Cross-attention: one sequence attends to another."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry


@explained
def cross() -> Attention:
    """Queries come from one sequence, keys and values from another: a decoder attends to an encoder."""
    return Attention()


MECHANISM = CatalogEntry(
    build=cross,
    formula="w_ij = softmax_j(q_i . k_j / sqrt(D)), with q from the target (I) and k, v from the source (J)",
    paper="Vaswani et al. 2017, arXiv:1706.03762, section 3.2.3",
    year=2017,
    used_by=("bart", "t5", "marian", "whisper", "blip_2"),
    cost="O(I J D) time, O(I + J) memory by blocks",
    sizes={"queries": 7, "keys": 11, "value_dim": 6},
    also_called=("encoder-decoder attention", "CrossAttention", "source-target attention"),
)
