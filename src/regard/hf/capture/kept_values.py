"""The values (B, G, J, E) of a captured call, and the reason why a call has none."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from math import prod
from typing import Any

from torch import Tensor

from regard.base.errors import RegardError
from regard.hf.capture.weighted_sums import WeightedSum


class NoValues(Exception):
    """The reason why a captured call has no values."""


class LostProjection(NoValues):
    """The reason why an output projection that the call had is not known any more."""


def values_reader(call: Any) -> Callable[[], Tensor]:
    """A function that reads the values of a call, for its map.

    It holds a copy of the call without the map: a map and a call that hold each other would stay in memory until the
    garbage collector runs.
    """
    alone = copy(call)
    vars(alone).pop("map", None)
    vars(alone).update({name: empty for name, empty in (("maps", []), ("_map", None)) if name in vars(alone)})

    def read() -> Tensor:
        try:
            return alone.read_values()
        except NoValues as reason:
            raise RegardError(f"weights.value: {reason}.") from None

    return read


def values_of_product(product: WeightedSum, shape: tuple[int, int, int, int], kind: str) -> Tensor | NoValues:
    """The values of a product with weights (B, H, I, J), or the reason why its operands do not show them."""
    (B, H, _, J), values = shape, product.by_key
    if values is None:
        return NoValues(f"the product of {kind} with its weights does not show which axes of its values are the keys")
    leading, of_weights = tuple(values.shape[:-2]), tuple(product.weights.tensor.shape[:-2])
    sizes = f"weights of shape {tuple(product.weights.tensor.shape)}, values of shape {tuple(values.shape)}"
    fits = of_weights in ((B, H), (B * H,)) or prod(of_weights) == B * H == B
    if values.shape[-2] != J or not fits:
        return NoValues(f"the product of {kind} does not show which axes are batch, heads and keys: {sizes}")
    if prod(leading) == B * H:
        return values.detach().reshape(B, H, J, -1)
    if len(leading) == 2 and leading[0] in (1, B) and leading[1] in (1, H):
        return values.detach().expand(B, -1, -1, -1)
    return NoValues(f"the product of {kind} does not show which axes are batch, heads and keys: {sizes}")
