"""MiniMax sparse attention: an indexer chooses blocks of keys."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.masks import causal
from regard.selections import BlockIndexer


@explained
def minimax_sparse(size: int = 128, k: int = 16, local: int = 1) -> Attention:
    """Each query attends to the `k` blocks of `size` keys that hold the greatest scores of a small indexer.

    The call has `index_query` (B, G, I, W), an index head for each key head, and `index_key` (B, 1, J, W). The block
    of the query and those before it, `local` in all, are always among the `k`.
    """
    return Attention(mask=causal(), selection=BlockIndexer(size, k, local))


MECHANISM = CatalogEntry(
    build=minimax_sparse,
    formula="w_ij = softmax_j(q_i . k_j / sqrt(D)) over j <= i in the local blocks before i and in the others of the k "
    "blocks with the greatest max_j x_i . y_j, for index queries x and index keys y",
    paper="MiniMax 2026 (MiniMax-M3), the code of transformers",
    family="selected",
    year=2026,
    used_by=("minimax_m3_vl",),
    cost="O(n^2 W + n k size D) time, O(n k + n) memory",
    tiny={"size": 4, "k": 3},
    also_called=("block sparse attention with an indexer", "MiniMax-M3 indexer"),
)
