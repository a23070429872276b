"""Multi-query attention."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.masks import causal


@explained
def multi_query() -> Attention:
    """All query heads share one key/value head: the smallest cache.

    It has no arguments: the keys have 1 head.
    """
    return Attention(mask=causal())


MECHANISM = CatalogEntry(
    build=multi_query,
    formula="w_hij = softmax_j(q_hi . k_j / sqrt(D)) over j <= i, the same k for every head h",
    paper="Shazeer 2019, arXiv:1911.02150",
    year=2019,
    used_by=("gpt_bigcode", "falcon"),
    cost="O(H I J D) time; keys and values take 1 / H of multi-head's memory",
    sizes={"key_heads": 1},
    also_called=("multi-query attention", "MQA", "MultiQueryAttention"),
)
