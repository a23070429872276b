"""Forgetting attention."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.biases import ForgettingBias
from regard.catalog.entry import CatalogEntry
from regard.masks import causal


@explained
def forgetting() -> Attention:
    """Each token has a gate that reduces the weights of all keys before it: a learned, content-dependent ALiBi.

    The call has `log_forget` (B, H, J), the logarithms of the gates.
    """
    return Attention(bias=ForgettingBias(), mask=causal())


MECHANISM = CatalogEntry(
    build=forgetting,
    formula="w_ij = softmax_j(q_i . k_j / sqrt(D) + sum of log f_l over j < l <= i) over j <= i",
    paper="Lin et al. 2025, Forgetting Transformer (FoX), arXiv:2503.02130",
    year=2025,
    cost="the same as masked, with a bias for each pair",
    sizes={"heads": 2, "queries": 16},
    disagree="x-transformers has it as data-dependent ALiBi, and also a form for both directions. The gate of a token "
    "applies to the keys before it, not to its own.",
    also_called=("forgetting attention", "FoX", "Forgetting Transformer", "DataDependentAlibi"),
)
