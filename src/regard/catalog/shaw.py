"""Shaw's relative positions."""

from regard.attention import Attention
from regard.catalog.mechanism import Mechanism
from regard.checks import explained
from regard.pieces import ShawBias


@explained
def shaw(width: int, reach: int = 16) -> Attention:
    """Each distance up to `reach` has a learned key that is added to the keys; beyond, the outermost serves."""
    return Attention(bias=ShawBias(width, reach))


MECHANISM = Mechanism(
    build=shaw,
    formula="w_ij = softmax_j(q_i . (k_j + a_clip(j - i, -reach, reach)) / sqrt(D))",
    paper="Shaw, Uszkoreit & Vaswani 2018, arXiv:1803.02155, eq. 4 and 5",
    cost="O(I J D + I reach D) time, O((I + J) D + I reach) memory by blocks",
    tiny={"width": 8, "reach": 3},
    disagree="the paper also adds learned vectors to the values (eq. 3) and finds that the keys alone do as well "
    "(its table 3); the keys are what is meant here. transformers 5 ignores BERT's relative_key without a word.",
)
