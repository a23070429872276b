"""Gated DeltaNet."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.scores import Dot
from regard.transitions import GatedDelta


@explained
def gated_deltanet() -> Attention:
    """The delta rule with a decay: tokens correct single entries of the memory, and can clear all of it.

    The call has `log_decay` and `beta`, (B, H, J) each. Queries and keys get the length 1.
    """
    return Attention(Dot(), transition=GatedDelta())


MECHANISM = CatalogEntry(
    build=gated_deltanet,
    formula="w_ij = b_j exp(g_{j+1} + ... + g_i) q_i . A_i ... A_{j+1} k_j / sqrt(D) for j <= i, with A_t = I - "
    "b_t k_t k_t^T",
    paper="Yang et al. 2024, Gated Delta Networks, arXiv:2412.06464",
    family="transported",
    year=2024,
    used_by=("qwen3_next", "qwen3_5", "olmo_hybrid"),
    cost="O(n D E) time, O(n) memory; a state of D x E numbers for generation, at any length",
    disagree="the convolution over 4 tokens and SiLU come before, a gated norm after. transformers' "
    "use_qk_l2norm_in_kernel is what makes vectors of length 1.",
    also_called=("gated delta rule", "Gated DeltaNet", "GDN"),
)
