"""Self-attention: one sequence attends to itself."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry


@explained
def self_attention() -> Attention:
    """Every token attends to every token of the same sequence, with one head and no mask.

    Query, key and value are three projections of the sequence.
    """
    return Attention()


MECHANISM = CatalogEntry(
    build=self_attention,
    formula="w_ij = softmax_j(q_i . k_j / sqrt(D)), with q_i = x_i W_q, k_j = x_j W_k, v_j = x_j W_v",
    paper="Vaswani et al. 2017, arXiv:1706.03762, eq. 1; the idea: Cheng, Dong & Lapata 2016, arXiv:1601.06733",
    year=2017,
    used_by=("bert", "roberta", "vit", "wav2vec2"),
    cost="O(n^2 D) time, O(n) memory by blocks",
    sizes={"heads": 1},
    also_called=("scaled dot-product attention", "SelfAttention", "ScaledDotProductAttention", "intra-attention"),
)
