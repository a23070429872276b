"""FIRE: a small network of the distance."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.biases import FIREBias
from regard.catalog.entry import CatalogEntry
from regard.masks import causal


@explained
def fire(num_heads: int, hidden: int = 32, threshold: int = 512, fixed_length: int | None = None) -> Attention:
    """A small network turns the distance, as a share of the query's position, into a bias for each head.

    L in the formula is learned, and begins at `threshold`: up to this position the bias depends on the distance alone.
    With `fixed_length` the distance is divided as at this position everywhere.
    """
    return Attention(bias=FIREBias(num_heads, hidden, threshold, fixed_length), mask=causal())


MECHANISM = CatalogEntry(
    build=fire,
    formula="w_hij = softmax_j(q_hi . k_hj / sqrt(D) + f_h(psi(i - j) / psi(max(i, L)))) over j <= i, "
    "psi(x) = log(|c x| + 1)",
    paper="Li et al. 2023, arXiv:2310.04418",
    year=2023,
    cost="O(n^2 (D + hidden)) time, O(n) memory; with fixed_length the same as masked",
    tiny={"num_heads": 2, "hidden": 4, "threshold": 5},
    sizes={"heads": 2, "queries": 16},
    disagree="the divisor grows with the position of the query, so the bias is no function of i - j alone. Codes that "
    "divide by the greatest length have that of fixed_length.",
    also_called=("functional interpolation for relative positions", "FIRE"),
)
