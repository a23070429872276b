"""T5's relative bias."""

from regard.attention import Attention
from regard.catalog.mechanism import Mechanism
from regard.checks import explained
from regard.pieces import Dot, T5Bias, causal


@explained
def t5(num_heads: int, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> Attention:
    """A learned number for each head and bucket of distance is added to the unscaled product.

    `bidirectional=False` is the decoder: causal, with all buckets for the past.
    """
    bias = T5Bias(num_heads, num_buckets, max_distance, bidirectional)
    return Attention(Dot(scale=1.0), bias=bias, mask=None if bidirectional else causal())


MECHANISM = Mechanism(
    build=t5,
    formula="w_hij = softmax_j(q_hi . k_hj + b_h[bucket(j - i)]), exact buckets when near, logarithmic when far",
    paper="Raffel et al. 2020, arXiv:1910.10683, section 2.1",
    cost="that of multi_head; num_buckets x H parameters",
    tiny={"num_heads": 4, "num_buckets": 8, "max_distance": 16},
    disagree="T5 does not divide by sqrt(D): its initialisation does. One table serves all layers of a stack.",
)
