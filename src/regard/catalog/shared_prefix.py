"""Continuations that share a prefix, packed into one sequence."""

from collections.abc import Sequence

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.masks import shared_prefix as shared_prefix_mask


@explained
def shared_prefix(prefix: int, lengths: Sequence[int]) -> Attention:
    """Continuations of `lengths` attend to the first `prefix` tokens and to themselves, all of them causally."""
    return Attention(mask=shared_prefix_mask(prefix, lengths))


MECHANISM = CatalogEntry(
    build=shared_prefix,
    formula="w_ij = softmax_j(q_i . k_j / sqrt(D)) over j <= i with j < prefix, or i and j in one continuation",
    paper="Juravsky et al. 2024 (Hydragen), arXiv:2402.05099, section 3",
    year=2024,
    cost="O((n prefix + sum of lengths^2) D) time, O(n) memory",
    tiny={"prefix": 5, "lengths": (4, 7, 3, 30)},
    also_called=("shared prefix", "prefix sharing", "prefix packing", "cascade attention"),
)
