"""MoBA: each query attends to the blocks whose mean keys fit it best."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.masks import causal
from regard.selections import BlockMeans


@explained
def moba(size: int = 512, k: int = 3) -> Attention:
    """Each query chooses `k` blocks of `size` keys by their mean keys; its own block is always one of them."""
    return Attention(mask=causal(), selection=BlockMeans(size, k))


MECHANISM = CatalogEntry(
    build=moba,
    formula="w_ij = softmax_j(q_i . k_j / sqrt(D)) over j <= i in the block of i and in the k - 1 earlier blocks with "
    "the greatest q_i . mean(k of the block)",
    paper="Lu et al. 2025, arXiv:2502.13189, section 2",
    family="selected",
    year=2025,
    cost="O(n^2 / size D + n k size D) time, O(n k + n) memory",
    tiny={"size": 4, "k": 3},
    disagree="flash-linear-attention never compares the last, whole block of a sequence, so a query behind it cannot "
    "choose it; here every block before the query's own is compared.",
    also_called=("mixture of block attention", "MoBA"),
)
