"""`Composite`: the base of attentions that are made of several. `attend` runs them like any other attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from regard.attention import Attention
from regard.base.positions import Positions
from regard.base.upper_layers import upper_layer
from regard.maps.attention_map import AttentionMap
from regard.pieces.holder import HoldsPieces
from regard.pieces.mask import Mask


class Attended(Protocol):
    """The result of a part: its output and its map."""

    @property
    def output(self) -> Tensor: ...
    @property
    def weights(self) -> AttentionMap: ...


@dataclass(frozen=True, eq=False)
class CompositeCall:
    """One call of `attend`: queries (B, H, I, D), keys and values of all tokens, positions, other tensors by name.

    `part(query, key, value, positions)` runs a part with the engine of the call.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    positions: Positions
    tensors: Mapping[str, Tensor]
    attend: Callable[[Attention | Composite, Tensor, Tensor, Tensor, Positions], Attended]


class Composite(HoldsPieces, ABC):
    """The base of attentions that are made of several: `attend` gives the output and one map of the whole.

    >>> import torch, regard as rg
    >>> class Twice(rg.composites.Composite):
    ...     def run(self, call):
    ...         seen = call.attend(rg.Attention(), call.query, call.key, call.value, call.positions)
    ...         return 2 * seen.output, rg.maps.SumMap([seen.weights], [2.0])
    >>> x = torch.zeros(1, 1, 3, 4)
    >>> Twice()(x, x, x).weights[0, 0, 0]
    tensor([0.6667, 0.6667, 0.6667])
    """

    #: The mask over tokens: no part lets a query attend to a token that it hides.
    mask: Mask | None = None

    def pieces(self) -> list[Any]:
        """The pieces of all parts, which may need tensors of the call."""
        return []

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        """`regard.attend` with this attention: the output, the weights, and the next cache."""
        return upper_layer("attention").attend(query, key, value, attention=self, **options)

    @abstractmethod
    def run(self, call: CompositeCall) -> tuple[Tensor, AttentionMap]:
        """The output (B, H, I, E), and the map W over tokens with output = W . values."""
