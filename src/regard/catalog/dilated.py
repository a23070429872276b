"""Dilated sliding-window attention."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.masks import causal
from regard.masks import dilated as window_with_gaps


@explained
def dilated(size: int = 64, dilation: int = 2, is_causal: bool = False) -> Attention:
    """A window with gaps: `size` - 1 keys on each side, `dilation` apart, so the window is wider at the same cost."""
    near = window_with_gaps(size, dilation)
    return Attention(mask=causal() & near if is_causal else near)


MECHANISM = CatalogEntry(
    build=dilated,
    formula="w_ij = softmax_j(q_i . k_j / sqrt(D)) over j = i + m dilation, |m| < size",
    paper="Beltagy, Peters & Cohan 2020, arXiv:2004.05150, section 3.1",
    year=2020,
    cost="O(n size dilation D) time as computed (gaps inside a block are not skipped), O(n) memory",
    tiny={"size": 3, "dilation": 3},
    disagree="in LongNet (arXiv:2307.02486) the name means a segment of which every r-th token is kept.",
    also_called=("dilated sliding window", "strided attention"),
)
