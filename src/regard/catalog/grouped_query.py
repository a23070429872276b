"""Grouped-query attention."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.masks import causal


@explained
def grouped_query() -> Attention:
    """Groups of query heads share one key/value head, so a cache is H / G times smaller.

    It has no arguments: the number of heads of the keys decides the sharing. With H query heads and G key heads, query
    head h uses key head floor(h G / H).
    """
    return Attention(mask=causal())


MECHANISM = CatalogEntry(
    build=grouped_query,
    formula="w_hij = softmax_j(q_hi . k_gj / sqrt(D)) over j <= i, with g = floor(h G / H)",
    paper="Ainslie et al. 2023, arXiv:2305.13245",
    year=2023,
    used_by=("llama", "mistral", "qwen3", "gemma3", "gpt_oss"),
    cost="O(H I J D) time; keys and values take G / H of multi-head's memory",
    sizes={"key_heads": 2},
    disagree="groups are consecutive query heads, as in Llama and torch's enable_gqa. For weights with interleaved "
    "groups (h mod G), permute the heads.",
    also_called=("grouped-query attention", "GQA", "GroupedQueryAttention", "num_key_value_heads"),
)
