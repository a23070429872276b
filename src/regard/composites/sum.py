"""`Sum`: W = sum_m c_m W_m, such as differential attention or a gated sum of branches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from regard.attention import Attention
from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.composites.composite import Composite, CompositeCall
from regard.composites.factors import ConstantFactors, Factors, check_number
from regard.maps.attention_map import AttentionMap
from regard.maps.combined_map import SumMap, union, weighted_sum
from regard.pieces.mask import Mask


@checked
class Sum(Composite):
    """output_i = sum_m c_m,i sum_j w_m,ij v_j: several attentions of the same tokens, with a factor for each.

    `parts` are attentions, or composites. `factors` are numbers, or `Factors` with learned or given ones. With
    `splits_channels` each part has its own channels: queries and keys have as many times the width, and part m reads
    slice m of both. All parts share the values.

    >>> import torch, regard as rg
    >>> difference = rg.composites.Sum([rg.Attention(), rg.Attention()], [1.0, -0.5], splits_channels=True)
    >>> q, k, v = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 8)
    >>> seen = difference(q, k, v)
    >>> torch.allclose(seen.weights.dense().sum(-1), torch.tensor(0.5), atol=1e-5), seen.weights.is_signed
    (True, True)
    """

    def __init__(
        self,
        parts: Sequence[Attention | Composite],
        factors: Factors | Sequence[float],
        *,
        splits_channels: bool = False,
    ) -> None:
        super().__init__()
        for part in parts:
            if not isinstance(part, Attention | Composite):
                raise RegardError(f"Sum: a part must be an Attention or a Composite, got {type(part).__name__}.")
        self.parts = nn.ModuleList(parts)
        self.factors = factors if isinstance(factors, Factors) else ConstantFactors(*factors)
        if isinstance(self.factors, ConstantFactors):
            check_number("Sum", self.factors.numbers, len(parts))
        self.splits_channels = splits_channels

    def pieces(self) -> list[Any]:
        return [self.factors, *(piece for part in self.parts for piece in part.pieces())]  # type: ignore[operator]

    @property
    def mask(self) -> Mask | None:  # type: ignore[override]
        return union([part.mask for part in self.parts])  # type: ignore[misc]

    def run(self, call: CompositeCall) -> tuple[Tensor, AttentionMap]:
        factors = self.factors(call.tensors)
        check_number("Sum", factors, len(self.parts))
        seen = [
            call.attend(part, query, key, call.value, call.positions)  # type: ignore[arg-type]
            for part, query, key in zip(self.parts, *self._channels(call), strict=True)
        ]
        weights = SumMap([each.weights for each in seen], factors)  # it checks the shapes of the factors
        return weighted_sum([each.output for each in seen], factors), weights

    def _channels(self, call: CompositeCall) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The queries and the keys of each part."""
        count = len(self.parts)
        if not self.splits_channels:
            return [call.query] * count, [call.key] * count
        widths = call.query.shape[-1], call.key.shape[-1]
        if any(width % count for width in widths):
            raise RegardError(
                f"Sum(splits_channels=True): queries of width {widths[0]} and keys of width {widths[1]} cannot be cut "
                f"into {count} equal parts. Join the channels of the parts: torch.cat((q_1, q_2), -1)."
            )
        return call.query.chunk(count, -1), call.key.chunk(count, -1)

    def extra_repr(self) -> str:
        return "splits_channels=True" if self.splits_channels else ""
