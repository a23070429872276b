"""Masked (causal) self-attention."""

from regard.attention import Attention
from regard.catalog.mechanism import Mechanism
from regard.checks import explained
from regard.pieces import causal


@explained
def masked() -> Attention:
    """No token sees a later one, so a whole sequence is trained on at once and generated step by step.

    Fewer queries than keys stand at the end: 2 queries against 5 keys see 4 and 5 keys.
    """
    return Attention(mask=causal())


MECHANISM = Mechanism(
    build=masked,
    formula="w_ij = softmax_j(q_i . k_j / sqrt(D)) over j <= i",
    paper="Vaswani et al. 2017, arXiv:1706.03762, section 3.2.3",
    cost="O(n^2 D / 2) time, O(n) memory by blocks",
    disagree="torch's is_causal=True aligns the first query with the first key when their numbers differ.",
)
