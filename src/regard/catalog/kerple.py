"""KERPLE: biases by distance with learned shapes."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.biases import KERPLEBias
from regard.catalog.entry import CatalogEntry
from regard.masks import causal


@explained
def kerple(num_heads: int, power: bool = False, is_causal: bool = True) -> Attention:
    """Scores decrease with the logarithm of the distance, or a power of it; each head learns how fast."""
    return Attention(bias=KERPLEBias(num_heads, power), mask=causal() if is_causal else None)


MECHANISM = CatalogEntry(
    build=kerple,
    formula="w_hij = softmax_j(q_hi . k_hj / sqrt(D) - a_h log(1 + b_h |i - j|)) over j <= i; power: - a_h |i - j|^b_h",
    paper="Chi et al. 2022, arXiv:2205.09921",
    year=2022,
    cost="the same as masked; 2 H parameters",
    tiny={"num_heads": 2},
    sizes={"heads": 2, "queries": 16},
    also_called=("kernelized relative positional embedding", "KERPLE", "ParallelKerpleLog"),
)
