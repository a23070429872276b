"""Longformer: a window and a few global tokens."""

from collections.abc import Sequence

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.masks import global_tokens, window


@explained
def longformer(size: int = 257, global_positions: Sequence[int] = (0,)) -> Attention:
    """A window of `size` - 1 keys on each side; tokens at `global_positions` attend to all, and all attend to them."""
    return Attention(mask=window(size) | global_tokens(global_positions))


MECHANISM = CatalogEntry(
    build=longformer,
    formula="w_ij = softmax_j(q_i . k_j / sqrt(D)) over |i - j| < size, or i global, or j global",
    paper="Beltagy, Peters & Cohan 2020, arXiv:2004.05150, section 3.1",
    year=2020,
    used_by=("longformer", "led"),
    cost="O(n (size + num_global) D) time, O(n) memory",
    tiny={"size": 4, "global_positions": (0, 13)},
    disagree="attention_window of Hugging Face counts both sides, so w there is size = w / 2 + 1 here. In Longformer, "
    "global tokens have separate projections; here they share the projections of the other tokens.",
    also_called=("window with global attention", "LongformerSelfAttention"),
)
