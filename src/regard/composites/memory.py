"""`SegmentMemory`: linear attention to all earlier segments, whose keys are one sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.attention import Attention, Prepared
from regard.base.checks import Size, checked
from regard.base.shapes import Sizes, at_least_float32, without_zeros
from regard.composites.composite import Composite, CompositeCall, PreparedParts
from regard.maps.attention_map import AttentionMap
from regard.maps.scored_map import ScoredMap
from regard.masks import block_local, causal
from regard.normalizers import SumNormalizer
from regard.pieces.mask import Mask
from regard.scores import FeatureMap, FeatureScore


@checked
class SegmentMemory(Composite):
    """w_ij = phi(q_i) . phi(k_j) / sum_m phi(q_i) . phi(k_m) over the keys of earlier segments of `size` tokens.

    The sum over the keys of a segment is added to a state of W E numbers, which all queries of the next segment read,
    so time is linear in the length (Munkhdalai et al. 2024, arXiv:2404.07143, eq. 3 and 4). In the first segment the
    weights are 0. `features` is phi; None is that of `FeatureScore`. No engine runs it.

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 1, 4, 8)
    >>> rg.composites.SegmentMemory(size=2)(x, x, x).weights[0, 0]
    tensor([[0.0000, 0.0000, 0.0000, 0.0000],
            [0.0000, 0.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000, 0.0000]])
    """

    def __init__(self, size: Size, features: FeatureMap | None = None) -> None:
        super().__init__()
        self.size = size
        score = FeatureScore() if features is None else FeatureScore(features)
        mask = causal() & ~block_local(size)
        self.attention = Attention(score, mask=mask, normalizer=SumNormalizer())

    @property
    def mask(self) -> Mask | None:  # type: ignore[override]
        return self.attention.mask

    def prepare(self, call: CompositeCall) -> PreparedParts:
        """No parts: `join` sums over segments. If the keys are not those from position 0 on, one part with the mask."""
        sizes, positions = Sizes.of(call.query, call.key, call.value), call.positions
        is_aligned = 0 <= positions.start <= sizes.J - sizes.I and positions.keys.intervals == ((0, sizes.J),)
        if sizes.is_empty or not is_aligned:
            return PreparedParts([call.part(self.attention)], lambda seen: (seen[0].output, seen[0].weights))
        self.attention.check(sizes, positions, call.key.shape[-1])
        return PreparedParts([], lambda _: self._summed(call, sizes))

    def _summed(self, call: CompositeCall, sizes: Sizes) -> tuple[Tensor, AttentionMap]:
        """The output and the map by sums over segments. A column of ones in the values gives the sum of each row."""
        prepared = Prepared.of(self.attention, call.query, call.key, call.positions)
        query, key, value = map(at_least_float32, (prepared.query, prepared.key, call.value))
        state = self._states(key, torch.cat((value, torch.ones_like(value[..., :1])), -1))
        sums = self._read(query.unflatten(1, (sizes.G, sizes.R)), state, call.positions.start).flatten(1, 2)
        output, total = sums[..., :-1], sums[..., -1]
        output = output / without_zeros(total)[..., None]
        weights = ScoredMap(self.attention, prepared, call.positions, sizes, (total.detach(),))
        return output.to(call.value.dtype), weights

    def _states(self, key: Tensor, value: Tensor) -> Tensor:
        """What each of the n segments reads, and the next one: sums of phi(k_j) v_j^T over the segments before it.

        Features of keys (B, G, J, W), values (B, G, J, E) -> (B, G, n + 1, W, E).
        """
        missing = -key.shape[2] % self.size
        key, value = (F.pad(x, (0, 0, 0, missing)).unflatten(2, (-1, self.size)) for x in (key, value))
        return F.pad((key.mT @ value).cumsum(2), (0, 0, 0, 0, 1, 0))

    def _read(self, query: Tensor, state: Tensor, start: int) -> Tensor:
        """phi(q_i) times the state of its segment: (B, G, R, I, W) -> (B, G, R, I, E). `start`: of the first query.

        Zeros before and after the queries fill the first and the last segment.
        """
        num_queries, before = query.shape[3], start % self.size
        after = -(before + num_queries) % self.size
        segments = F.pad(query, (0, 0, before, after)).unflatten(3, (-1, self.size))
        first = start // self.size
        of_segment = state[:, :, None, first : first + segments.shape[3]]
        return (segments @ of_segment).flatten(3, 4)[:, :, :, before : before + num_queries]

    def pieces(self) -> list[Any]:
        return self.attention.pieces()

    def extra_repr(self) -> str:
        return f"{self.size}"
