"""Learned absolute positions."""

from regard.attention import Attention
from regard.catalog.mechanism import Mechanism
from regard.checks import explained
from regard.pieces import LearnedPositions


@explained
def learned_positions(length: int, width: int) -> Attention:
    """A learned vector for each position is added to queries and keys; there are `length` of them and no more."""
    return Attention(position=LearnedPositions(length, width))


MECHANISM = Mechanism(
    build=learned_positions,
    formula="w_ij = softmax_j((q_i + p_i) . (k_j + p_j) / sqrt(D)), with p learned",
    paper="Gehring et al. 2017, arXiv:1705.03122, section 3.1",
    cost="that of multi_head, and length x D parameters",
    tiny={"length": 40, "width": 8},
    disagree="the paper, BERT and GPT-2 add them to the embeddings, once; here they enter queries and keys.",
)
