"""Queries, keys and row statistics of maps with w_ij = exp(c q_i . k_j - r_i): the page computes weights from these."""

from __future__ import annotations

from typing import TypeGuard

from torch import Tensor

from regard.base.shapes import at_least_float32
from regard.maps.attention_map import AttentionMap
from regard.maps.scored_map import ScoredMap
from regard.pieces.normalizer import any_coarse
from regard.pieces.score import scale_of_heads


def is_dot(weights: AttentionMap) -> TypeGuard[ScoredMap]:
    """Whether w_ij = exp(c q_i . k_j - r_i) for allowed pairs, with one mask for all heads and precise r_i.

    >>> import torch, regard as rg
    >>> x = torch.randn(1, 2, 3, 4)
    >>> is_dot(rg.Attention()(x, x, x).weights)
    True
    """
    if type(weights) is not ScoredMap:
        return False
    attention = weights.attention
    scale = attention.score.scale(weights._prepared.query.shape[-1])
    plain = attention.normalizer.as_softmax is not None and not attention.bias
    one_mask = (
        attention.mask is None or attention.mask.allowed(weights.grid.tile(slice(0, 1), slice(0, 1))).shape[1] == 1
    )
    return scale is not None and plain and one_mask and not any_coarse(weights.row_statistic[0])


def scaled(weights: ScoredMap) -> tuple[Tensor, Tensor, Tensor]:
    """c q (H, I, D), k (G, J, D) and r (H, I) of the first text of a map that `is_dot`; r is 0 where a row is empty."""
    prepared, attention = weights._prepared, weights.attention
    query = at_least_float32(prepared.query)
    scale = scale_of_heads(attention.score, query, weights.grid)
    softmax = attention.normalizer.as_softmax
    assert scale is not None and softmax is not None
    empty = weights.row_statistic[0].isneginf()
    return (
        (query[0] * (scale / softmax.temperature)).float(),
        prepared.key[0].float(),
        weights.row_statistic[0].masked_fill(empty, 0.0)[0].float(),
    )
