"""Every public name of `regard`, by itself: `causal` of `regard`, `prefix` of `regard.masks`."""

from __future__ import annotations

from operator import attrgetter

import regard as rg
from regard.base.other_libraries import INNER_ROOMS, ROOMS

#: Rooms whose names are always typed with the room: `rg.nn.Transformer`.
APART = ("nn", "viewer", "lab")
#: Name -> value, of `regard` and of the rooms of attention, models and results.
PUBLIC = {
    name: getattr(room, name)
    for room in (*(getattr(rg, room) for room in ROOMS if room not in APART), rg)
    for name in room.__all__
    if name not in ROOMS
}


def named(path: str) -> object:
    """The value of a name: "causal", "prefix", "nn.Transformer", "lab.data.Pair", "Where.parse"."""
    room, _, name = path.rpartition(".")
    owner = attrgetter(room)(rg) if room in (*ROOMS, *INNER_ROOMS) else PUBLIC.get(room)
    return getattr(owner, name) if room else PUBLIC[name]
