"""Block-local attention."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.masks import block_local as own_block
from regard.masks import causal


@explained
def block_local(size: int = 64, before: int = 0, after: int = 0, is_causal: bool = False) -> Attention:
    """The sequence is cut into blocks. Tokens attend only to their own block, and optionally to neighboring blocks."""
    near = own_block(size, before, after)
    return Attention(mask=causal() & near if is_causal else near)


MECHANISM = CatalogEntry(
    build=block_local,
    formula="w_ij = softmax_j(q_i . k_j / sqrt(D)) over -before <= floor(j / size) - floor(i / size) <= after",
    paper="Liu et al. 2018, arXiv:1801.10198; Qiu et al. 2019, arXiv:1911.02972",
    year=2018,
    used_by=("longt5", "pegasus_x", "llama4"),
    cost="O(n size D) time, O(n) memory",
    tiny={"size": 5},
    disagree="the package local-attention adds the previous block by default (look_backward=0 is this mechanism).",
    also_called=("local attention in blocks", "chunked attention", "blockwise attention"),
)
