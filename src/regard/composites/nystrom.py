"""`Nystrom`: softmax attention through landmarks, a product of three maps."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.attention import Attention
from regard.base.checks import Size, checked
from regard.base.positions import Positions
from regard.base.shapes import at_least_float32
from regard.composites.composite import Composite, CompositeCall
from regard.maps.attention_map import AttentionMap
from regard.maps.combined_map import ProductMap
from regard.maps.dense_map import DenseMap


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

    def run(self, call: CompositeCall) -> tuple[Tensor, AttentionMap]:
        I, J, M = call.query.shape[2], call.key.shape[2], self.num_landmarks
        plain = Attention()
        if max(I, J) <= M:
            seen = call.attend(plain, call.query, call.key, call.value, call.positions)
            return seen.output, seen.weights
        query, key = self._landmarks(call.query), self._landmarks(call.key)
        inverse = self._inverse(query, key)
        read = call.attend(plain, query, call.key, call.value, Positions.of(0, M, J))
        corrected = (inverse @ at_least_float32(read.output)).to(call.value.dtype)
        own_keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)  # the corrected values differ by query head
        write = call.attend(plain, call.query, own_keys, corrected, Positions.of(0, I, M))
        return write.output, ProductMap([write.weights, DenseMap(inverse), read.weights], call.positions)

    def _landmarks(self, x: Tensor) -> Tensor:
        """Means of segments of the sequence: (B, H, n, D) -> (B, H, M, D)."""
        means = F.adaptive_avg_pool1d(at_least_float32(x).flatten(0, 1).mT, self.num_landmarks)
        return means.mT.unflatten(0, x.shape[:2]).to(x.dtype)

    def _inverse(self, query: Tensor, key: Tensor) -> Tensor:
        """The approximate pseudo-inverse of the weights of landmarks on landmarks, (B, H, M, M)."""
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
