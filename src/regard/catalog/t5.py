"""T5's relative bias."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.biases import T5Bias
from regard.catalog.entry import CatalogEntry
from regard.masks import causal
from regard.scores import Dot


@explained
def t5(num_heads: int, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> Attention:
    """A learned number per head and distance bucket is added to the unscaled dot product.

    `bidirectional=False` is for decoders: causal, with all buckets for earlier keys. All distances from `max_distance`
    on share a bucket.
    """
    bias = T5Bias(num_heads, num_buckets, max_distance, bidirectional)
    return Attention(Dot(scale=1.0), bias=bias, mask=None if bidirectional else causal())


MECHANISM = CatalogEntry(
    build=t5,
    formula="w_hij = softmax_j(q_hi . k_hj + b_h[bucket(j - i)]), buckets exact for near keys, else logarithmic",
    paper="Raffel et al. 2020, arXiv:1910.10683, section 2.1",
    year=2020,
    used_by=("t5", "mt5", "umt5", "longt5", "switch_transformers", "udop"),
    cost="the same as multi_head; num_buckets x H parameters",
    tiny={"num_heads": 4, "num_buckets": 8, "max_distance": 16},
    disagree="T5 scales the initial weights, not the scores. All layers of a stack share one table.",
    also_called=("relative position bias", "RelativePositionBias", "relative positional encoding"),
)
