"""Tree attention: all branches of a tree of draft tokens in one call."""

from collections.abc import Sequence

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.masks import tree as tree_mask


@explained
def tree(parents: Sequence[int], context: int = 0) -> Attention:
    """A token attends to itself, to its ancestors in a tree of `parents`, and to the `context` before the tree.

    `parents[t]` is the number of the token that token t of the tree continues, -1 for the context.
    """
    return Attention(mask=tree_mask(parents, context))


MECHANISM = CatalogEntry(
    build=tree,
    formula="w_ij = softmax_j(q_i . k_j / sqrt(D)) over j = i, j an ancestor of i, or j < context",
    paper="Miao et al. 2024 (SpecInfer), arXiv:2305.09781, section 4",
    year=2024,
    cost="O(n (context + depth) D) time for long branches, O(n) memory",
    tiny={"parents": (-1, 0, 0, 1, 1, 2, -1, 6, 6, 7, *range(9, 39)), "context": 3},
    disagree="other libraries give the mask of the tree as a tensor, without the context, which all tokens see.",
    also_called=("tree attention", "speculative decoding mask", "draft tree", "token tree verification"),
)
