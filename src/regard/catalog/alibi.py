"""ALiBi: attention with linear biases."""

from regard.attention import Attention
from regard.catalog.mechanism import Mechanism
from regard.checks import explained
from regard.pieces import ALiBi, causal


@explained
def alibi(num_heads: int, is_causal: bool = True) -> Attention:
    """Scores fall linearly with distance, with a slope fixed for each head: no position embedding at all."""
    return Attention(bias=ALiBi(num_heads), mask=causal() if is_causal else None)


MECHANISM = Mechanism(
    build=alibi,
    formula="w_hij = softmax_j(q_hi . k_hj / sqrt(D) - m_h |i - j|) over j <= i, with m_h = 2^(-8 h / H)",
    paper="Press, Smith & Lewis 2022, arXiv:2108.12409",
    cost="that of masked, and no parameters",
    tiny={"num_heads": 4},
    disagree="for head counts that are no power of two the authors' code (and BLOOM's) takes every other slope of "
    "the next power; attention-gym and attzoo do not. Without a causal mask a signed distance, which some "
    "libraries use, rewards the future.",
)
