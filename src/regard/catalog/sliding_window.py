"""Sliding-window attention."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.masks import causal, window


@explained
def sliding_window(size: int = 256, is_causal: bool = True) -> Attention:
    """Queries attend only to near keys: the last `size` with their own, or `size` - 1 on each side."""
    near = window(size)
    return Attention(mask=causal() & near if is_causal else near)


MECHANISM = CatalogEntry(
    build=sliding_window,
    formula="w_ij = softmax_j(q_i . k_j / sqrt(D)) over i - size < j <= i",
    paper="Beltagy et al. 2020, Longformer, arXiv:2004.05150; Jiang et al. 2023, Mistral 7B, arXiv:2310.06825",
    year=2020,
    used_by=("mistral", "gemma2", "gemma3", "gpt_oss"),
    cost="O(n size D) time, O(n) memory",
    tiny={"size": 5},
    disagree="in Mistral and Hugging Face a query attends to `size` keys, as here. In attention-gym, x-transformers, "
    "jax and local-attention it attends to one more key.",
    also_called=("local attention", "SWA", "windowed attention"),
)
