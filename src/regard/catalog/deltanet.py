"""DeltaNet."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.scores import Dot
from regard.transitions import Delta


@explained
def deltanet() -> Attention:
    """A memory that each token corrects: it reads what its key gives, and replaces a share of it by its value.

    The call has `beta` (B, H, J), the shares. Queries and keys get the length 1.
    """
    return Attention(Dot(), transition=Delta())


MECHANISM = CatalogEntry(
    build=deltanet,
    formula="w_ij = b_j q_i . A_i ... A_{j+1} k_j / sqrt(D) for j <= i, with A_t = I - b_t k_t k_t^T and unit "
    "vectors q and k",
    paper="Schlag et al. 2021, arXiv:2102.11174; Yang et al. 2024, arXiv:2406.06484",
    family="transported",
    year=2021,
    cost="O(n D E) time, O(n) memory; a state of D x E numbers for generation, at any length",
    disagree="the first paper passes keys through a feature map and divides them by their sum; the second through "
    "SiLU, and to length 1.",
    also_called=("delta rule", "DeltaNet", "fast weight programmer"),
)
