"""The numbers of the first query and the first key of a call in the whole sequence, which its cache knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from regard.base.versions import mask_sizes
from regard.hf.calls import AttentionCall

#: Arguments of cross-attention.
OF_ENCODER = ("key_value_states", "encoder_hidden_states")
#: Names of the number by which a module asks its cache.
LAYER = ("layer_idx", "layer_id")


@dataclass(frozen=True)
class Place:
    """The number `start` of the first query, and what the cache says of the keys: how many, and the `first` number."""

    start: int
    num_keys: int
    first: int

    def of_call(self, call: AttentionCall) -> tuple[int, int]:
        """The numbers of the first query and key. Keys that are not the cache's (cross-attention) begin at 0."""
        return self.start, self.first if call.key.shape[2] == self.num_keys else 0


def place_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], is_cross: bool = False) -> Place | None:
    """The place of the next call of an attention module of transformers, from its arguments; None without a cache.

    When cross-attention runs, the self-attention of its layer has already put the keys of this call into the cache, so
    the length of the cache already counts its queries.
    """
    values = (*kwargs.values(), *args)
    cache = next((x for x in values if hasattr(x, "get_seq_length") and hasattr(x, "get_mask_sizes")), None)
    hidden = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    if cache is None or hidden is None or hidden.ndim < 2:
        return None
    layer = next((n for name in LAYER if isinstance(n := getattr(module, name, None), int)), 0)
    try:
        length = int(cache.get_seq_length(layer))
        if is_cross or any(kwargs.get(name) is not None for name in OF_ENCODER):
            return Place(max(length - hidden.shape[1], 0), 0, 0)
        num_keys, first = mask_sizes(cache, hidden.shape[1], layer)
        return Place(length, int(num_keys), int(first))
    except (ValueError, AttributeError, TypeError):  # a layer whose cache keeps no keys
        return None


def first_numbers(call: AttentionCall, place: Place | None, is_cross: bool = False) -> tuple[int, int]:
    """The numbers of the first query and key of a call. Without a cache the last query stands at the end."""
    if place is not None:
        return place.of_call(call)
    I, J = call.query.shape[2], call.key.shape[2]
    return (0 if is_cross else max(J - I, 0)), 0
