"""Names of heads (L0.H2), and the number of each layer in its model, which module paths contain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from regard.checks import checked
from regard.errors import RegardError


def head_name(layer: int, head: int) -> str:
    """The name of a head in every text for users.

    >>> head_name(0, 2)
    'L0.H2'
    """
    return f"L{layer}.H{head}"


@checked
def layer_number(name: str) -> int | None:
    """The first number in a module path: "encoder.layer.3.attention.self" -> 3.

    >>> layer_number("encoder.layer.3.attention.self"), layer_number("cross_attention")
    (3, None)
    """
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


@checked
def layer_numbers(names: Iterable[str], given: Sequence[int] | None = None) -> list[int]:
    """The numbers of layers: `given` if it is not None, else the numbers in their module paths.

    If a path has no number, or the numbers do not rise (an encoder and a decoder, blocks within
    stages), the layers are numbered 0, 1, 2, ... in their order.

    >>> layer_numbers(["encoder.layer.4.attention.self", "encoder.layer.5.attention.self"])
    [4, 5]
    >>> layer_numbers(["encoder.layers.0.self_attn", "decoder.layers.0.self_attn"])
    [0, 1]
    """
    in_paths = [layer_number(name) for name in names]
    if given is not None:
        if len(given) != len(in_paths):
            raise RegardError(
                f"layer numbers: {len(given)} were given for {len(in_paths)} maps. Give one number for each map."
            )
        return list(given)
    known = [number for number in in_paths if number is not None]
    rising = len(known) == len(in_paths) and all(a < b for a, b in pairwise(known))
    return known if rising else list(range(len(in_paths)))
