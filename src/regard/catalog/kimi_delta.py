"""Kimi Delta Attention."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.scores import Dot
from regard.transitions import KimiDelta


@explained
def kimi_delta() -> Attention:
    """Gated DeltaNet with a decay for each channel of the keys.

    The call has `log_decay` (B, H, J, D) and `beta` (B, H, J). Queries and keys get the length 1.
    """
    return Attention(Dot(), transition=KimiDelta())


MECHANISM = CatalogEntry(
    build=kimi_delta,
    formula="w_ij = b_j q_i . A_i ... A_{j+1} k_j / sqrt(D) for j <= i, with A_t = (I - b_t k_t k_t^T) diag(exp g_t)",
    paper="Kimi Team 2025, Kimi Linear, arXiv:2510.26692",
    family="transported",
    year=2025,
    used_by=("kimi_linear",),
    cost="O(n D E) time, O(n) memory; a state of D x E numbers for generation, at any length",
    disagree="the memory decays before it is read and erased, unlike in RWKV-7.",
    also_called=("Kimi delta attention", "KDA", "Kimi Linear"),
)
