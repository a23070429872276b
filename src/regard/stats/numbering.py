"""Which layer a map is of: the number in its module path, the same whether all layers are looked at or a few."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from regard.checks import checked
from regard.errors import RegardError


@checked
def layer_number(name: str) -> int | None:
    """The first number in a module path: "encoder.layer.3.attention.self" -> 3.

    >>> layer_number("encoder.layer.3.attention.self"), layer_number("cross_attention")
    (3, None)
    """
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


@checked
def layer_numbers(names: Iterable[str], given: Sequence[int] | None = None) -> list[int]:
    """The numbers of some layers: those `mask_tensor`, else those in their module paths.

    Where a path has no number, or the numbers do not rise (an encoder and a decoder, blocks within
    stages), layers are numbered by their place.

    >>> layer_numbers(["encoder.layer.4.attention.self", "encoder.layer.5.attention.self"])
    [4, 5]
    >>> layer_numbers(["encoder.layers.0.self_attn", "decoder.layers.0.self_attn"])
    [0, 1]
    """
    found = [layer_number(name) for name in names]
    if given is not None:
        if len(given) != len(found):
            raise RegardError(f"layer numbers: {len(given)} were given for {len(found)} maps. Give one for each map.")
        return list(given)
    known = [number for number in found if number is not None]
    rising = len(known) == len(found) and all(a < b for a, b in pairwise(known))
    return known if rising else list(range(len(found)))
