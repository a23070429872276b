"""Soft-capped attention."""

from regard.attention import Attention
from regard.catalog.mechanism import Mechanism
from regard.checks import explained
from regard.pieces import Softcap, causal


@explained
def softcap(cap: float = 50.0, is_causal: bool = True) -> Attention:
    """Scores are squeezed into +-cap before the softmax, which keeps training stable: Gemma 2."""
    return Attention(bias=Softcap(cap), mask=causal() if is_causal else None)


MECHANISM = Mechanism(
    build=softcap,
    formula="w_ij = softmax_j(cap tanh(q_i . k_j / (cap sqrt(D)))) over j <= i",
    paper="Gemma Team 2024, arXiv:2408.00118, section 2",
    cost="that of masked, and one tanh a pair",
    tiny={"cap": 1.5},
    disagree="it is no additive bias, and a kernel without it is wrong without a word: SDPA has none, which is why "
    "transformers runs Gemma 2 eagerly. Gemma 2 27B divides by sqrt(144), not by sqrt(D).",
)
