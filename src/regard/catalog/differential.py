"""Differential attention: the difference of two softmaxes."""

from regard.attention import Attention
from regard.base.checks import explained
from regard.catalog.entry import CatalogEntry
from regard.composites import DifferenceFactors, Sum
from regard.masks import causal


@explained
def differential(head_dim: int, initial: float = 0.8, is_causal: bool = True) -> Sum:
    """Two softmaxes are subtracted, so what both attend to cancels: weights may be negative.

    `head_dim` is D, and `initial` is lambda_init. Queries and keys are (q_1, q_2) and (k_1, k_2), of width 2 D. Values
    usually have width 2 D, too.
    """
    mask = causal() if is_causal else None
    factors = DifferenceFactors(head_dim, initial)
    return Sum([Attention(mask=mask), Attention(mask=mask)], factors, splits_channels=True)


MECHANISM = CatalogEntry(
    build=differential,
    formula="w_ij = softmax_j(q_1i . k_1j / sqrt(D)) - lambda softmax_j(q_2i . k_2j / sqrt(D)) over j <= i, with "
    "lambda = exp(a_1 . b_1) - exp(a_2 . b_2) + lambda_init",
    paper="Ye et al. 2024, Differential Transformer, arXiv:2410.05258",
    family="sum",
    year=2024,
    used_by=("diffllama",),
    cost="the same as masked with heads of width D, twice",
    tiny={"head_dim": 4, "initial": 0.6},
    disagree="the paper then normalizes each head (RMS) and multiplies it by 1 - lambda_init; neither changes the map. "
    "lambda_init is 0.8 - 0.6 exp(-0.3 layer), counted from 0. DiffLlama has the halves as separate heads.",
    also_called=("differential attention", "DiffTransformer", "DiffLlamaAttention", "MultiheadDiffAttn"),
)
