"""Names of heads (L0.H2), and the number of each layer in its model, which module paths contain."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from regard.base.checks import checked
from regard.base.errors import RegardError

#: A part of a module path that is a number: 3 in "layer.3.attention", but not 1 in "attn1".
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
#: Names of lists of layers; GPT-2 calls its list "h".
COUNTED = re.compile(r"(layer|block|stage)s?$|^h$")


def head_name(layer: int, head: int) -> str:
    """The name of a head in every text for users.

    >>> head_name(0, 2)
    'L0.H2'
    """
    return f"L{layer}.H{head}"


def module_path(name: str) -> str:
    """The path of the module of a map. The maps of several calls of one module are "path (call 1)", "path (call 2)".

    >>> module_path("h.0.attn (call 2)"), module_path("h.0.attn")
    ('h.0.attn', 'h.0.attn')
    """
    return name.partition(" (call ")[0]


class LayerPath(str):
    """A module path that knows the number of its layer, which `layer_paths` reads; None if its path has no number."""

    number: int | None


@checked
def layer_number(name: str) -> int | None:
    """The number of the layer in a module path: "encoder.layer.3.attention.self" -> 3.

    It is the first number after a list of layers, else the first after any name, else the first of all:
    "0.model.layer.3.attention" -> 3. So it is not the place in a wrapper or within a layer. `layer_numbers` compares
    the paths of all layers, which decide where one path alone does not.

    >>> layer_number("encoder.layer.3.attention.self"), layer_number("cross_attention")
    (3, None)
    """
    if isinstance(name, LayerPath):
        return name.number
    found = [(before, int(part)) for before, part in pairwise(["", *name.split(".")]) if part.isdigit()]
    after_list = [number for before, number in found if COUNTED.search(before)]
    after_name = [number for before, number in found if before and not before.isdigit()]
    return next(iter([*after_list, *after_name, *(number for _, number in found)]), None)


def layer_paths(names: Iterable[str]) -> dict[str, LayerPath]:
    """The paths of all attention modules of a model, each with the number of its layer.

    Modules whose paths differ in numbers only are siblings. The number that differs between siblings counts layers. If
    several numbers differ (blocks within stages), siblings are counted 0, 1, 2, ... in their order. A path without
    siblings is read alone (`layer_number`).

    >>> [path.number for path in layer_paths(["0.bert.layer.0.attention", "0.bert.layer.1.attention"]).values()]
    [0, 1]
    >>> [path.number for path in layer_paths(["stages.0.blocks.0", "stages.1.blocks.0", "stages.1.blocks.1"]).values()]
    [0, 1, 2]
    """
    paths = {name: LayerPath(name) for name in names}
    families: dict[str, list[str]] = {}
    for name in paths:
        families.setdefault(NUMBER.sub("#", name), []).append(name)
    for family in families.values():
        columns = zip(*(map(int, NUMBER.findall(name)) for name in family), strict=True)
        differing = [column for column in columns if len(set(column)) > 1]
        counts = differing[0] if len(differing) == 1 else range(len(family))
        for name, count in zip(family, counts, strict=True):
            paths[name].number = count if differing else layer_number(name)
    return paths


@checked
def layer_numbers(names: Iterable[str] | Mapping[str, Any], given: Sequence[int] | None = None) -> list[int]:
    """The numbers of layers: `given` if it is not None, else the numbers in their module paths (`layer_paths`).

    `names` are the paths, or the maps by path.

    If a path has no number, or the numbers do not rise (an encoder and a decoder), the layers are numbered 0, 1, 2, ...
    in their order.

    >>> layer_numbers(["encoder.layer.4.attention.self", "encoder.layer.5.attention.self"])
    [4, 5]
    >>> layer_numbers(["encoder.layers.0.self_attn", "decoder.layers.0.self_attn"])
    [0, 1]
    """
    names = list(names)
    # a LayerPath keeps its number, which was read among all modules of its model; `names` may be some of them
    read = layer_paths(name for name in names if not isinstance(name, LayerPath))
    in_paths = [layer_number(read.get(name, name)) for name in names]
    if given is not None:
        if len(given) != len(in_paths):
            raise RegardError(
                f"layer numbers: {len(given)} were given for {len(in_paths)} maps. Give one number for each map."
            )
        return list(given)
    known = [number for number in in_paths if number is not None]
    rising = len(known) == len(in_paths) and all(a < b for a, b in pairwise(known))
    return known if rising else list(range(len(in_paths)))
