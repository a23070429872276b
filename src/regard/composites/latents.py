"""`ThroughLatents`: tokens read tokens through a few latents, a product of two maps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.base.checks import Size, checked
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.composites.composite import Composite, CompositeCall
from regard.maps.attention_map import AttentionMap
from regard.maps.combined_map import ProductMap


@checked
class ThroughLatents(Composite):
    """W = softmax(q L^T / sqrt(D)) softmax(L k^T / sqrt(D)): latents read all tokens, and queries read the latents.

    L are `num_latents` learned vectors for each head. This is the cross-attention of a Perceiver's encoder (Jaegle et
    al. 2021, arXiv:2103.03206) and decoder (Perceiver IO, arXiv:2107.14795), without the layers between them.

    >>> import torch, regard as rg
    >>> q, k, v = torch.randn(3, 1, 2, 100, 8)
    >>> weights = rg.composites.ThroughLatents(num_latents=4, head_dim=8, num_heads=2)(q, k, v).weights
    >>> weights.shape, [factor.shape for factor in weights.factors]
    ((1, 2, 100, 100), [(1, 2, 100, 4), (1, 2, 4, 100)])
    """

    def __init__(self, num_latents: Size, head_dim: Size, num_heads: Size) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(num_heads, num_latents, head_dim))

    def run(self, call: CompositeCall) -> tuple[Tensor, AttentionMap]:
        H, M, D = self.latents.shape
        B, heads, I, head_dim = call.query.shape
        if (heads, head_dim) != (H, D):
            raise RegardError(
                f"ThroughLatents: made for {H} heads of width {D}, got queries (B, H, I, D) = "
                f"{(B, heads, I, head_dim)}."
            )
        latents = self.latents.to(call.query.dtype).expand(B, H, M, D)
        num_keys, plain = call.key.shape[2], Attention()
        read = call.attend(plain, latents, call.key, call.value, Positions.of(0, M, num_keys))
        write = call.attend(plain, call.query, latents, read.output, Positions.of(0, I, M))
        return write.output, ProductMap([write.weights, read.weights], call.positions)

    def extra_repr(self) -> str:
        H, M, D = self.latents.shape
        return f"{M}, {D}, {H}"
