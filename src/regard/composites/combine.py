"""`combine`: the weighted sum of several attentions of the same tokens, with one map."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from regard.attention_output import AttentionOutput
from regard.base.checks import checked
from regard.maps.combined_map import SumMap, weighted_sum


@checked
def combine(outputs: Sequence[AttentionOutput], factors: Sequence[float | Tensor]) -> AttentionOutput:
    """output_i = sum_m c_m,i output_m,i, with the map W = sum_m c_m W_m, for results of `attend` with the same values.

    A factor is a number, or a tensor that broadcasts against (B, H, I, 1): one number for each head is (H, 1, 1), one
    for each row (B, H, I, 1). Gradients flow through outputs and factors. The result has no cache: each part has its
    own.

    >>> import torch, regard as rg
    >>> q, k, v = torch.randn(2, 1, 2, 5, 8), torch.randn(2, 1, 2, 5, 8), torch.randn(1, 2, 5, 16)
    >>> first, second = (rg.Attention()(q[n], k[n], v) for n in (0, 1))
    >>> seen = rg.combine([first, second], factors=[1.0, -0.5])  # differential attention
    >>> torch.allclose(seen.weights.dense() @ v, seen.output, atol=1e-6), seen.weights.is_signed
    (True, True)
    """
    weights = SumMap([each.weights for each in outputs], factors)
    return AttentionOutput(weighted_sum([each.output for each in outputs], factors), weights)
