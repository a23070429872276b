"""Linformer: keys and values projected along the sequence."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.composites import Grouped
from regard.pieces.key_groups import ProjectedGroups


@explained
def linformer(length: int, num_groups: int = 256, is_shared: bool = False) -> Grouped:
    """Keys and values of all tokens are projected to a few, so cost is linear in the length.

    `seen.weights` is the map over tokens, and `seen.weights.by_group` that of the projected keys. With `is_shared` keys
    and values have one projection, F = E.
    """
    return Grouped(Attention(), ProjectedGroups(length, num_groups, is_shared))


MECHANISM = CatalogEntry(
    build=linformer,
    formula="w_ij = sum_m softmax_m(q_i . (E k)_m / sqrt(D)) F_mj, with E and F of size (num_groups, length)",
    paper="Wang et al. 2020, arXiv:2006.04768",
    family="key groups",
    year=2020,
    cost="O(n num_groups D) time, O(n num_groups) memory for E and F",
    tiny={"length": 40, "num_groups": 5},
    disagree="it cannot be causal, because each group holds all tokens. Layers and heads share E and F in some models; "
    "here all heads of a layer share them. F may be negative, so weights of tokens may be.",
    also_called=("low-rank attention", "Linformer", "LinformerSelfAttention"),
)
