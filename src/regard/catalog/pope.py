"""PoPE: polar coordinates as positions."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.encodings import PoPE
from regard.masks import causal
from regard.scores import Dot


@explained
def pope(num_heads: int, head_dim: int, base: float = 10_000.0) -> Attention:
    """Each channel is a length, given by the content, at an angle, given by the position."""
    # encoded queries and keys have 2 D channels, and the scale is that of D
    return Attention(Dot(scale=head_dim**-0.5), position=PoPE(num_heads, head_dim, base), mask=causal())


MECHANISM = CatalogEntry(
    build=pope,
    formula="w_ij = softmax_j(sum_d softplus(q_id) softplus(k_jd) cos((i - j) base^(-d / D) - delta_d) / sqrt(D)) "
    "over j <= i",
    paper="Gopalakrishnan et al. 2025, arXiv:2509.10534",
    year=2025,
    cost="the same as masked at twice the width; H D parameters",
    tiny={"num_heads": 2, "head_dim": 8},
    sizes={"heads": 2, "queries": 16},
    also_called=("polar coordinate position embedding", "PoPE", "PolarEmbedding"),
)
