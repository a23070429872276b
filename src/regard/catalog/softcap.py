"""Soft-capped attention."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.biases import Softcap
from regard.catalog.entry import CatalogEntry
from regard.masks import causal


@explained
def softcap(cap: float = 50.0, is_causal: bool = True) -> Attention:
    """Scores are limited to (-cap, cap) before the softmax, which stabilizes training: Gemma 2."""
    return Attention(bias=Softcap(cap), mask=causal() if is_causal else None)


MECHANISM = CatalogEntry(
    build=softcap,
    formula="w_ij = softmax_j(cap tanh(q_i . k_j / (cap sqrt(D)))) over j <= i",
    paper="Gemma Team 2024, arXiv:2408.00118, section 2",
    year=2024,
    used_by=("gemma2", "t5gemma", "vaultgemma"),
    cost="the same as masked, and one tanh per pair",
    tiny={"cap": 1.5},
    disagree="a kernel without soft-capping gives wrong results without an error. SDPA has none, so transformers runs "
    "Gemma 2 eagerly. Gemma 2 27B divides by sqrt(144), not by sqrt(D).",
    also_called=("logit soft-capping",),
)
