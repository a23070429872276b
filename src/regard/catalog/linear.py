"""Linear attention."""

from regard.attention import Attention
from regard.catalog.mechanism import Mechanism
from regard.checks import explained
from regard.pieces import EluPlusOne, KernelScore, SumNormalizer, causal


@explained
def linear(is_causal: bool = True) -> Attention:
    """The exponential gives way to a product of features, and sums over keys to one matrix: linear in n."""
    return Attention(KernelScore(EluPlusOne()), mask=causal() if is_causal else None, normalizer=SumNormalizer())


MECHANISM = Mechanism(
    build=linear,
    formula="w_ij = phi(q_i) . phi(k_j) / sum_j phi(q_i) . phi(k_j) over j <= i, with phi(x) = elu(x) + 1",
    paper="Katharopoulos et al. 2020, arXiv:2006.16236",
    cost="O(n D E) time, O(n) memory; a state of D x E numbers to generate with, whatever the length",
    disagree="many later layers of this name leave out the division by the row's sum.",
)
