"""Transformer-XL's relative positions."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.biases import TransformerXLBias
from regard.catalog.entry import CatalogEntry
from regard.masks import causal


@explained
def transformer_xl(num_heads: int, head_dim: int, base: float = 10_000.0) -> Attention:
    """Separate scores for content and distance, each with a learned bias, so that earlier segments can be reused.

    The memory of earlier segments is a cache, or more keys than queries.
    """
    return Attention(bias=TransformerXLBias(num_heads, head_dim, base), mask=causal())


MECHANISM = CatalogEntry(
    build=transformer_xl,
    formula="w_ij = softmax_j((q_i . k_j + q_i . W r_(i-j) + u . k_j + v . W r_(i-j)) / sqrt(D)) over j <= i",
    paper="Dai et al. 2019, arXiv:1901.02860, section 3.3",
    year=2019,
    used_by=("xlnet", "parakeet", "wav2vec2_conformer", "fastspeech2_conformer"),
    cost="O(I J D) time twice over, O(I + J) memory by blocks",
    tiny={"num_heads": 4, "head_dim": 8},
    also_called=("relative attention", "relative positional encoding"),
)
