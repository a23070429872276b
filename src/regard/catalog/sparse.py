"""Sparse attention by entmax."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.base.errors import RegardError
from regard.catalog.entry import CatalogEntry
from regard.normalizers import Entmax15, Normalizer, Softmax, Sparsemax

_NORMALIZERS: dict[float, Normalizer] = {1.0: Softmax(), 1.5: Entmax15(), 2.0: Sparsemax()}


@explained
def sparse(alpha: float = 1.5) -> Attention:
    """Weights are exactly 0 for keys with scores far below the best: entmax (1.5) or sparsemax (2)."""
    if alpha not in _NORMALIZERS:
        raise RegardError(f"sparse(alpha={alpha}): alpha must be 1 (softmax), 1.5 (entmax) or 2 (sparsemax).")
    return Attention(normalizer=_NORMALIZERS[alpha])


MECHANISM = CatalogEntry(
    build=sparse,
    formula="w_i = max((alpha - 1) s_i - t_i, 0)^(1 / (alpha - 1)), with t_i such that the row sums to 1",
    paper="Peters, Niculae & Martins 2019, arXiv:1905.05702; Martins & Astudillo 2016, arXiv:1602.02068",
    year=2019,
    cost="O(I J (D + log J)) time, O(I + J) memory by blocks",
    disagree="elsewhere the name often means a sparse mask, as in longformer and bigbird.",
    also_called=("sparse attention", "sparsemax", "entmax"),
)
