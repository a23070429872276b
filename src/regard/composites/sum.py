"""`Sum`: W = sum_m c_m W_m, such as differential attention or a gated sum of branches; and `combine` of results.

Factors of a sum are one number for each part and row: fixed, learned, or given with the call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import Mechanism
from regard.attention_output import AttentionOutput
from regard.base.checks import Number, Size, checked
from regard.base.errors import RegardError
from regard.composites.composite import Composite, CompositeCall, Part, PreparedParts
from regard.maps.attention_map import AttentionMap
from regard.maps.combined_map import SumMap, union, weighted_sum
from regard.pieces.mask import Mask

#: No tensors of the call.
EMPTY: Mapping[str, str] = MappingProxyType({})


class Factors(nn.Module, ABC):
    """Base of all factors: calling one gives a factor for each part, a number or a tensor (B | 1, H | 1, I | 1, 1).

    >>> import torch, regard as rg
    >>> class Halves(rg.composites.Factors):
    ...     def forward(self, tensors):
    ...         return [0.5, 0.5]
    >>> x = torch.zeros(1, 1, 2, 4)
    >>> rg.composites.Sum([rg.Attention(mask=rg.causal()), rg.Attention()], Halves())(x, x, x).weights[0, 0]
    tensor([[0.7500, 0.2500],
            [0.5000, 0.5000]])
    """

    #: The tensors that a call takes by name, and their axes.
    needs: Mapping[str, str] = EMPTY

    @abstractmethod
    def forward(self, tensors: Mapping[str, Tensor]) -> Sequence[float | Tensor]:
        """The factors; `tensors` are those of the call, by name."""


@checked
class ConstantFactors(Factors):
    """Numbers that never change.

    >>> import regard as rg
    >>> rg.composites.ConstantFactors(1.0, -0.5)({})
    (1.0, -0.5)
    """

    def __init__(self, *numbers: Number) -> None:
        super().__init__()
        self.numbers = tuple(float(number) for number in numbers)

    def forward(self, tensors: Mapping[str, Tensor]) -> Sequence[float | Tensor]:
        return self.numbers

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.numbers))


@checked
class DifferenceFactors(Factors):
    """1 and -lambda, lambda = exp(a_1 . b_1) - exp(a_2 . b_2) + lambda_init with learned vectors a and b of width D
    (Ye et al. 2024, Differential Transformer, arXiv:2410.05258, eq. 2). All heads of a layer share one lambda.

    >>> import regard as rg
    >>> one, factor = rg.composites.DifferenceFactors(head_dim=64, initial=0.8)({})
    >>> one, abs(factor.item() + 0.8) < 0.5
    (1.0, True)
    """

    def __init__(self, head_dim: Size, initial: Number = 0.8) -> None:
        super().__init__()
        self.initial = initial
        self.of_first, self.of_second = (nn.Parameter(torch.randn(2, head_dim) * 0.1) for _ in range(2))

    def forward(self, tensors: Mapping[str, Tensor]) -> Sequence[float | Tensor]:
        first, second = (vectors.prod(0).sum().exp() for vectors in (self.of_first, self.of_second))
        return 1.0, second - first - self.initial

    def extra_repr(self) -> str:
        return f"{self.of_first.shape[1]}, initial={self.initial}"


@checked
class HeadGate(Factors):
    """g and 1 - g with a learned g = sigmoid(b) for each head (Munkhdalai et al. 2024, arXiv:2404.07143, eq. 10).

    >>> import regard as rg
    >>> [factor.flatten().tolist() for factor in rg.composites.HeadGate(num_heads=2)({})]
    [[0.5, 0.5], [0.5, 0.5]]
    """

    def __init__(self, num_heads: Size) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(num_heads))

    def forward(self, tensors: Mapping[str, Tensor]) -> Sequence[float | Tensor]:
        logits = self.logits[:, None, None]
        return logits.sigmoid(), (-logits).sigmoid()

    def extra_repr(self) -> str:
        return f"{len(self.logits)}"


@checked
class GateFactors(Factors):
    """A gate for each part and row, given with the call as `gates` (B, H, I, num_parts).

    >>> import torch, regard as rg
    >>> gates = rg.composites.GateFactors(num_parts=2)
    >>> two = rg.composites.Sum([rg.Attention(mask=rg.causal()), rg.Attention()], gates)
    >>> x = torch.zeros(1, 1, 2, 4)
    >>> two(x, x, x, gates=torch.tensor([[[[1.0, 0.0], [0.5, 0.5]]]])).weights[0, 0]
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """

    def __init__(self, num_parts: Size) -> None:
        super().__init__()
        self.num_parts = num_parts

    @property
    def needs(self) -> Mapping[str, str]:  # type: ignore[override]
        return {"gates": f"B H I {self.num_parts}"}

    def forward(self, tensors: Mapping[str, Tensor]) -> Sequence[float | Tensor]:
        return tensors["gates"].split(1, -1)

    def extra_repr(self) -> str:
        return f"{self.num_parts}"


def _check_number(owner: str, factors: Sequence[float | Tensor], num_parts: int) -> None:
    """Refuse another number of factors than parts."""
    if len(factors) != num_parts:
        raise RegardError(f"{owner}: {num_parts} parts need as many factors, got {len(factors)}.")


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
        parts: Sequence[Mechanism],
        factors: Factors | Sequence[Number],
        *,
        splits_channels: bool = False,
    ) -> None:
        super().__init__()
        for part in parts:
            if not isinstance(part, Mechanism):
                raise RegardError(f"Sum: a part must be an Attention or a Composite, got {type(part).__name__}.")
        self.parts = nn.ModuleList(parts)
        self.factors = factors if isinstance(factors, Factors) else ConstantFactors(*factors)
        if isinstance(self.factors, ConstantFactors):
            _check_number("Sum", self.factors.numbers, len(parts))
        self.splits_channels = splits_channels

    def pieces(self) -> list[Any]:
        return [self.factors, *(piece for part in self.parts for piece in part.pieces())]  # type: ignore[operator]

    @property
    def mask(self) -> Mask | None:  # type: ignore[override]
        return union([part.mask for part in self.parts])  # type: ignore[misc]

    def prepare(self, call: CompositeCall) -> PreparedParts:
        """Each part attends with its queries and keys to the same values; the outputs are added with their factors."""
        factors = self.factors(call.tensors)
        _check_number("Sum", factors, len(self.parts))
        parts = [
            Part(part, query, key, call.value, call.positions)  # type: ignore[arg-type]
            for part, query, key in zip(self.parts, *self._channels(call), strict=True)
        ]

        def join(seen: list[AttentionOutput]) -> tuple[Tensor, AttentionMap]:
            weights = SumMap([each.weights for each in seen], factors)  # it checks the shapes of the factors
            return weighted_sum([each.output for each in seen], factors), weights

        return PreparedParts(parts, join)

    def _channels(self, call: CompositeCall) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The queries and the keys of each part."""
        num_parts = len(self.parts)
        if not self.splits_channels:
            return [call.query] * num_parts, [call.key] * num_parts
        widths = call.query.shape[-1], call.key.shape[-1]
        if any(width % num_parts for width in widths):
            raise RegardError(
                f"Sum(splits_channels=True): queries of width {widths[0]} and keys of width {widths[1]} cannot be cut "
                f"into {num_parts} equal parts. Join the channels of the parts: torch.cat((q_1, q_2), -1)."
            )
        return call.query.chunk(num_parts, -1), call.key.chunk(num_parts, -1)

    def extra_repr(self) -> str:
        return "splits_channels=True" if self.splits_channels else ""


@checked
def combine(outputs: Sequence[AttentionOutput], factors: Sequence[Number | Tensor]) -> AttentionOutput:
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
