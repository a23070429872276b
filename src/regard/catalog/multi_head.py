"""Multi-head attention."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry


@explained
def multi_head() -> Attention:
    """Several heads attend in parallel, each in its own subspace of the width; their outputs are concatenated.

    The number of heads is the size of axis 1 of query, key and value.
    """
    return Attention()


MECHANISM = CatalogEntry(
    build=multi_head,
    formula="w_hij = softmax_j(q_hi . k_hj / sqrt(D)) for heads h = 1 ... H of width D = C / H",
    paper="Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2",
    year=2017,
    used_by=("bert", "gpt2", "t5", "vit", "whisper"),
    cost="O(H I J D) time, O(H (I + J)) memory by blocks",
    disagree="in boolean masks of nn.MultiheadAttention, True = may not attend, the opposite of here and of "
    "scaled_dot_product_attention. It also averages the weights over heads by default.",
    also_called=("multi-head attention", "MHA", "MultiHeadAttention", "MultiHeadedAttention"),
)
