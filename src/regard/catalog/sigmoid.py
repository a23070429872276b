"""Sigmoid attention."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.masks import causal
from regard.normalizers import Sigmoid


@explained
def sigmoid(offset: float | None = None, is_causal: bool = True) -> Attention:
    """Each key gets a weight between 0 and 1 by itself: keys do not compete, and rows need not sum to 1."""
    return Attention(mask=causal() if is_causal else None, normalizer=Sigmoid(offset))


MECHANISM = CatalogEntry(
    build=sigmoid,
    formula="w_ij = 1 / (1 + exp(r_i - s_ij)) over j <= i, with s = q . k / sqrt(D), r_i = log(keys of row i)",
    paper="Ramapuram et al. 2024, arXiv:2409.04431",
    year=2024,
    cost="the same as masked; no row sum is needed",
    sizes={"heads": 2, "queries": 16},
    disagree="the paper and its code subtract the same log n in all rows, with n the length of the text "
    "(offset=log n). Then the first rows of a causal mask have small weights. x-transformers subtracts nothing.",
    also_called=("sigmoid attention", "FlashSigmoid", "SigmoidAttention"),
)
