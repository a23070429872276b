"""ALiBi: attention with linear biases."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.biases import ALiBi
from regard.catalog.entry import CatalogEntry
from regard.masks import causal


@explained
def alibi(num_heads: int, is_causal: bool = True) -> Attention:
    """Scores decrease linearly with distance, with a fixed slope per head. There is no position embedding."""
    return Attention(bias=ALiBi(num_heads), mask=causal() if is_causal else None)


MECHANISM = CatalogEntry(
    build=alibi,
    formula="w_hij = softmax_j(q_hi . k_hj / sqrt(D) - m_h |i - j|) over j <= i, with m_h = 2^(-8 h / H)",
    paper="Press, Smith & Lewis 2022, arXiv:2108.12409",
    year=2022,
    used_by=("bloom", "falcon", "mpt"),
    cost="the same as masked; no parameters",
    tiny={"num_heads": 4},
    disagree="if the number of heads is not a power of two, the authors' code (and BLOOM) uses every second slope of "
    "the next power; attention-gym and attzoo do not. Some libraries use a signed distance: without a causal mask it "
    "increases the scores of later keys.",
    also_called=("attention with linear biases", "get_slopes"),
)
