"""Every public name of `regard`, by itself: `causal` of `regard`, `prefix` of `regard.masks`."""

from __future__ import annotations

import regard as rg
from regard.other_libraries import ROOMS

#: Rooms whose names are always typed with the room: `rg.nn.Transformer`.
APART = ("nn", "data", "seq2seq", "viewer")
#: Name -> value, of `regard` and of the rooms of attention, models and results.
PUBLIC = {
    name: getattr(room, name)
    for room in (*(getattr(rg, room) for room in ROOMS if room not in APART), rg)
    for name in room.__all__
    if name not in ROOMS
}


def named(path: str) -> object:
    """The value of a name: "causal", "prefix", "nn.Transformer", "Where.parse"."""
    room, _, name = path.rpartition(".")
    owner = getattr(rg, room) if room in ROOMS else PUBLIC.get(room)
    return getattr(owner, name) if room else PUBLIC[name]
