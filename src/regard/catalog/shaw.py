"""Shaw's relative positions."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.biases import ShawBias
from regard.catalog.entry import CatalogEntry


@explained
def shaw(head_dim: int, reach: int = 16) -> Attention:
    """Each distance up to `reach` has a learned vector that is added to keys; larger distances share the last."""
    return Attention(bias=ShawBias(head_dim, reach))


MECHANISM = CatalogEntry(
    build=shaw,
    formula="w_ij = softmax_j(q_i . (k_j + a_clip(j - i, -reach, reach)) / sqrt(D))",
    paper="Shaw, Uszkoreit & Vaswani 2018, arXiv:1803.02155, eq. 4 and 5",
    year=2018,
    used_by=("wav2vec2_bert", "seamless_m4t_v2"),
    cost="O(I J D + I reach D) time, O((I + J) D + I reach) memory by blocks",
    tiny={"head_dim": 8, "reach": 3},
    disagree="the paper also adds learned vectors to the values (eq. 3), and finds that keys alone work as well "
    "(table 3). Here only keys have them. transformers 5 silently ignores relative_key of BERT.",
    also_called=("relative position representations", "relative positional encoding"),
)
