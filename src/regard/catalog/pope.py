"""PoPE: polar coordinates as positions."""

from regard.attention import Attention
from regard.catalog.entry import Mechanism
from regard.checks import explained
from regard.pieces import Dot, PoPE, causal


@explained
def pope(num_heads: int, width: int, base: float = 10_000.0) -> Attention:
    """Each channel is a length, given by the content, at an angle, given by the position."""
    return Attention(Dot(scale=width**-0.5), position=PoPE(num_heads, width, base), mask=causal())


MECHANISM = Mechanism(
    build=pope,
    formula="w_ij = softmax_j(sum_d softplus(q_id) softplus(k_jd) cos((i - j) base^(-d / D) - delta_d) / sqrt(D)) "
    "over j <= i",
    paper="Gopalakrishnan et al. 2025, arXiv:2509.10534",
    year=2025,
    cost="the same as masked at twice the width; H D parameters",
    tiny={"num_heads": 2, "width": 8},
    sizes={"heads": 2, "queries": 16},
    also_called=("polar coordinate position embedding", "PoPE", "PolarEmbedding"),
)
