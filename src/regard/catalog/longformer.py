"""Longformer: a window and a few global tokens."""

from collections.abc import Sequence

from regard.attention import Attention
from regard.catalog.mechanism import Mechanism
from regard.checks import explained
from regard.pieces import global_tokens, window


@explained
def longformer(size: int = 257, global_positions: Sequence[int] = (0,)) -> Attention:
    """Every query sees `size` - 1 keys on each side; the tokens at `global_positions` see and are seen by all."""
    return Attention(mask=window(size) | global_tokens(global_positions))


MECHANISM = Mechanism(
    build=longformer,
    formula="w_ij = softmax_j(q_i . k_j / sqrt(D)) over |i - j| < size, or i global, or j global",
    paper="Beltagy, Peters & Cohan 2020, arXiv:2004.05150, section 3.1",
    cost="O(n (size + num_global) D) time, O(n) memory",
    tiny={"size": 4, "global_positions": (0, 13)},
    disagree="Hugging Face's attention_window counts both sides together, so its w is size = w / 2 + 1 here. "
    "Longformer gives global tokens projections of their own; here they share those of the other tokens.",
)
