"""Linear attention."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.masks import causal
from regard.normalizers import SumNormalizer
from regard.scores import EluPlusOne, FeatureScore


@explained
def linear(is_causal: bool = True) -> Attention:
    """A dot product of features replaces the exponential, so sums over keys become one matrix: linear in n."""
    return Attention(FeatureScore(EluPlusOne()), mask=causal() if is_causal else None, normalizer=SumNormalizer())


MECHANISM = CatalogEntry(
    build=linear,
    formula="w_ij = phi(q_i) . phi(k_j) / sum_j phi(q_i) . phi(k_j) over j <= i, with phi(x) = elu(x) + 1",
    paper="Katharopoulos et al. 2020, arXiv:2006.16236",
    year=2020,
    cost="O(n D E) time, O(n) memory; a state of D x E numbers for generation, at any length",
    disagree="many later layers of this name omit the division by the sum of the row.",
    also_called=("linear attention", "LinearAttention", "linear Transformer", "kernel attention"),
)
