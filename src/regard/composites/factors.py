"""Factors of a sum of attentions: one number for each part and row, fixed, learned, or given with the call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn

from regard.base.checks import Size, checked
from regard.base.errors import RegardError

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

    def __init__(self, *numbers: float) -> None:
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

    def __init__(self, head_dim: Size, initial: float = 0.8) -> None:
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


def check_number(owner: str, factors: Sequence[float | Tensor], num_parts: int) -> None:
    """Refuse another number of factors than parts."""
    if len(factors) != num_parts:
        raise RegardError(f"{owner}: {num_parts} parts need as many factors, got {len(factors)}.")
