"""`weighted_values`: the output W . values of a map, tile by tile, in O(n) memory."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.maps.attention_map import AttentionMap
from regard.shapes import at_least_float32, grouped_values


@torch.no_grad()
def weighted_values(weights: AttentionMap, values: Tensor) -> Tensor:
    """sum_j w_ij v_j, (B, H, I, E), of values (B, G, J, E); groups of H / G heads share the values of one.

    >>> import torch, regard as rg
    >>> q, k, v = torch.randn(3, 1, 2, 5, 4)
    >>> seen = rg.Attention(mask=rg.causal())(q, k, v)
    >>> torch.allclose(weighted_values(seen.weights, v), seen.output, atol=1e-6)
    True
    """
    B, H, I, J = weights.shape
    if values.ndim != 4 or (values.shape[0], values.shape[2]) != (B, J) or H % values.shape[1]:
        raise RegardError(
            f"weighted_values: the map has shape {(B, H, I, J)}, the values {tuple(values.shape)}. Values are "
            "(B, G, J, E), where G divides the number of heads."
        )
    dtype = torch.promote_types(weights._dtype, at_least_float32(values).dtype)
    output = torch.zeros(B, H, I, values.shape[3], dtype=dtype, device=weights.device)
    for tile in weights.tiles():
        output[:, :, tile.rows] += grouped_values(tile.weights.to(dtype), values[:, :, tile.cols].to(dtype))
    return output
