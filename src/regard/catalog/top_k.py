"""Top-k attention."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.normalizers import TopK


@explained
def top_k(k: int = 32) -> Attention:
    """Every query keeps only its `k` best keys: a softmax over their scores."""
    return Attention(normalizer=TopK(k))


MECHANISM = CatalogEntry(
    build=top_k,
    formula="w_ij = softmax_j(q_i . k_j / sqrt(D)) over the k greatest of row i",
    paper="Gupta et al. 2021, arXiv:2106.06899",
    year=2021,
    cost="O(I J D) time, O(I (k + J)) memory by blocks",
    tiny={"k": 3},
    disagree="if several keys have the k-th greatest score, some libraries keep them all; here k keys are kept.",
    also_called=("top-k attention",),
)
