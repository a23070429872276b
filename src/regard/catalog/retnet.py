"""Retention, of RetNet."""

import torch

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.encodings import RoPE
from regard.scores import Dot
from regard.transitions import Decay


@explained
def retnet(num_heads: int, head_dim: int) -> Attention:
    """Every head forgets at a constant rate of its own, and no row is normalized: a memory in place of weights.

    The heads keep 1 - 2^-5, 1 - 2^-6, ... of the memory at each token, so they look back over 32, 64, ... tokens.
    """
    decays = 1 - 2.0 ** -(5 + torch.arange(num_heads, dtype=torch.float64))
    return Attention(Dot(), position=RoPE(head_dim, interleaved=True), transition=Decay(decays.log()))


MECHANISM = CatalogEntry(
    build=retnet,
    formula="w_ij = q_i . k_j g_h^(i - j) / sqrt(D) for j <= i, q and k rotated by position, g_h = 1 - 2^(-5 - h)",
    paper="Sun et al. 2023, Retentive Network, arXiv:2307.08621",
    family="transported",
    year=2023,
    cost="O(n D E) time, O(n) memory; a state of D x E numbers for generation, at any length",
    tiny={"num_heads": 4, "head_dim": 8},
    disagree="the code of the paper divides by sums of decays and by the absolute row sum for numerical stability, "
    "and normalizes the output of each head; here are the weights of the formula. flash-linear-attention "
    "scales queries, the paper keys.",
    also_called=("multi-scale retention", "retention", "RetNet"),
)
