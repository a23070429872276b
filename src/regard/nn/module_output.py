"""`ModuleOutput`: the output of a module with attention, and the map of its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from regard.base.errors import RegardError
from regard.maps import AttentionMap


class ModuleOutput:
    """The result of a module with attention: `output`, and `weights`, which is made when it is asked for.

    It unpacks to two, as the result of `nn.MultiheadAttention` does.

    >>> import torch, regard as rg
    >>> output, weights = rg.nn.MultiHeadAttention(8, 2)(torch.randn(1, 3, 8))
    >>> output.shape, weights.shape
    (torch.Size([1, 3, 8]), (1, 2, 3, 3))
    """

    def __init__(self, output: Tensor, weights: Callable[[], AttentionMap]) -> None:
        self.output, self._weights = output, weights

    @cached_property
    def weights(self) -> AttentionMap:
        """The map (B, H, I, J)."""
        return self._weights()

    def with_output(self, output: Tensor) -> ModuleOutput:
        """The same map with another output: that of the projection of the heads."""
        return ModuleOutput(output, lambda: self.weights)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.output, self.weights))

    @property
    def _map(self) -> AttentionMap | None:
        """The map; None if there is none. A notebook prints this object, so no error is raised."""
        try:
            return self.weights
        except RegardError:
            return None

    def __repr__(self) -> str:
        weights = self._map
        shown = "weights" if weights is None else f"weights {weights!r}"
        return f"ModuleOutput(output {tuple(self.output.shape)}, {'no ' * (weights is None)}{shown})"

    def _repr_svg_(self) -> str | None:
        weights = self._map
        return None if weights is None else weights._repr_svg_()


def _without_map(outputs: Any, _: Any) -> ModuleOutput:
    """The result of a module behind torch.export or torch.vmap: they take it apart to tensors, which have no map."""

    def refuse() -> AttentionMap:
        raise RegardError("weights: torch.export and torch.vmap return the output alone. Read `.output`.")

    return ModuleOutput(next(iter(outputs)), refuse)


pytree.register_pytree_node(
    ModuleOutput,
    lambda seen: ([seen.output], None),
    _without_map,
    serialized_type_name="regard.nn.ModuleOutput",
)
