"""Masked (causal) self-attention."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.masks import causal


@explained
def masked() -> Attention:
    """No token attends to later tokens. So a model trains on all positions at once, and generates token by token.

    If there are fewer queries than keys, the queries are the last tokens: 2 queries with 5 keys attend to 4 and 5 keys.
    """
    return Attention(mask=causal())


MECHANISM = CatalogEntry(
    build=masked,
    formula="w_ij = softmax_j(q_i . k_j / sqrt(D)) over j <= i",
    paper="Vaswani et al. 2017, arXiv:1706.03762, section 3.2.3",
    year=2017,
    used_by=("gpt2", "llama", "mistral", "qwen3"),
    cost="O(n^2 D / 2) time, O(n) memory by blocks",
    disagree="torch's is_causal=True aligns the first query with the first key, also if their numbers differ.",
    also_called=(
        "causal attention",
        "CausalAttention",
        "CausalSelfAttention",
        "MaskedSelfAttention",
        "autoregressive attention",
    ),
)
