"""Attention through a few vectors: learned latents (`ThroughLatents`), or means of tokens (`Nystrom`).

The map over tokens is a product of maps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention import Attention
from regard.attention_output import AttentionOutput
from regard.base.checks import Size, checked
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import at_least_float32
from regard.composites.composite import Composite, CompositeCall, Part, PreparedParts
from regard.maps.attention_map import AttentionMap
from regard.maps.combined_map import ProductMap
from regard.maps.dense_map import DenseMap


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

    def prepare(self, call: CompositeCall) -> PreparedParts:
        """Latents read the tokens, and queries read the latents: their values are the output of the first part."""
        H, M, D = self.latents.shape
        B, heads, I, head_dim = call.query.shape
        if (heads, head_dim) != (H, D):
            raise RegardError(
                f"ThroughLatents: made for {H} heads of width {D}, got queries (B, H, I, D) = "
                f"{(B, heads, I, head_dim)}."
            )
        latents = self.latents.to(call.query.dtype).expand(B, H, M, D)
        num_keys, plain = call.key.shape[2], Attention()
        read = Part(plain, latents, call.key, call.value, Positions.of(0, M, num_keys))
        write = Part(plain, call.query, latents, lambda output: output, Positions.of(0, I, M))

        def join(seen: list[AttentionOutput]) -> tuple[Tensor, AttentionMap]:
            return seen[1].output, ProductMap([seen[1].weights, seen[0].weights], call.positions)

        return PreparedParts([read, write], join)

    def extra_repr(self) -> str:
        H, M, D = self.latents.shape
        return f"{M}, {D}, {H}"


@checked
class Nystrom(Composite):
    """W = softmax(q k~^T) A^+ softmax(q~ k^T), A = softmax(q~ k~^T) (Xiong et al. 2021, arXiv:2102.03902, eq. 13).

    Landmarks q~ and k~ are means of `num_landmarks` segments of equal length. If their number does not divide the
    length, a token may be in two neighboring segments, as in torch's adaptive pooling. A^+ is approximated by
    `iterations` steps of eq. 11 and may be negative, so weights may be too. A sequence of at most `num_landmarks`
    tokens has full softmax attention, as in transformers.

    >>> import torch, regard as rg
    >>> q, k, v = torch.randn(3, 1, 2, 12, 8)
    >>> seen = rg.composites.Nystrom(num_landmarks=4)(q, k, v)
    >>> torch.allclose(seen.weights.dense() @ v, seen.output, atol=1e-5), seen.weights.is_signed
    (True, True)
    """

    def __init__(self, num_landmarks: Size = 64, iterations: Size = 6) -> None:
        super().__init__()
        self.num_landmarks, self.iterations = num_landmarks, iterations

    def prepare(self, call: CompositeCall) -> PreparedParts:
        """Landmarks read the tokens, A^+ mixes what they read, and the tokens read the landmarks."""
        I, J, M = call.query.shape[2], call.key.shape[2], self.num_landmarks
        plain = Attention()
        if max(I, J) <= M or 0 in (I, J):  # landmarks are means of at least one token
            return PreparedParts([call.part(plain)], lambda seen: (seen[0].output, seen[0].weights))
        query, key = self._landmarks(call.query), self._landmarks(call.key)
        inverse = self._inverse(query, key)
        head_keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)  # landmark values differ by query head

        def landmark_values(output: Tensor) -> Tensor:
            """The values of the second part: the output of the first, times A^+."""
            return (inverse @ at_least_float32(output)).to(call.value.dtype)

        def join(seen: list[AttentionOutput]) -> tuple[Tensor, AttentionMap]:
            factors = [seen[1].weights, DenseMap(inverse), seen[0].weights]
            return seen[1].output, ProductMap(factors, call.positions)

        from_tokens = Part(plain, query, call.key, call.value, Positions.of(0, M, J))
        to_tokens = Part(plain, call.query, head_keys, landmark_values, Positions.of(0, I, M))
        return PreparedParts([from_tokens, to_tokens], join)

    def _landmarks(self, x: Tensor) -> Tensor:
        """Means of segments of the sequence: (B, H, n, D) -> (B, H, M, D)."""
        means = F.adaptive_avg_pool1d(at_least_float32(x).flatten(0, 1).mT, self.num_landmarks)
        return means.mT.unflatten(0, x.shape[:2]).to(x.dtype)

    def _inverse(self, query: Tensor, key: Tensor) -> Tensor:
        """The approximate pseudo-inverse of the weights of landmarks on landmarks, (B, H, M, M).

        The first matrix is A^T / (|A|_1 |A|_inf), where the rows of A sum to 1. Each step is eq. 11 of the paper.
        """
        query, key = at_least_float32(query), at_least_float32(key)
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        weights = (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1)
        inverse = weights.mT / weights.sum(-2).amax(-1)[..., None, None]
        unit = torch.eye(self.num_landmarks, dtype=weights.dtype, device=weights.device)
        for _ in range(self.iterations):
            product = weights @ inverse
            inverse = 0.25 * inverse @ (13 * unit - product @ (15 * unit - product @ (7 * unit - product)))
        return inverse

    def extra_repr(self) -> str:
        return f"{self.num_landmarks}, iterations={self.iterations}"
