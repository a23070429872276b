"""Sinusoidal positions."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.encodings import Sinusoidal


@explained
def sinusoidal(base: float = 10_000.0) -> Attention:
    """Sines and cosines of the position are added to queries and keys before the scores are computed."""
    return Attention(position=Sinusoidal(base=base))


MECHANISM = CatalogEntry(
    build=sinusoidal,
    formula="w_ij = softmax_j((q_i + p_i) . (k_j + p_j) / sqrt(D)); p_(pos, 2m) = sin(pos / base^(2m / D)), "
    "p_(pos, 2m + 1) = cos(pos / base^(2m / D))",
    paper="Vaswani et al. 2017, arXiv:1706.03762, section 3.5",
    year=2017,
    used_by=("marian", "m2m_100", "pegasus", "distilbert"),
    cost="the same as multi_head, and O(n D) for additions",
    disagree="the paper adds them once, to the embeddings, so values contain them, too; here every layer adds "
    "them to queries and keys. tensor2tensor and Marian put all sines before all cosines.",
    also_called=("sinusoidal positional encoding", "SinusoidalPositionalEncoding", "PositionalEncoding"),
)
