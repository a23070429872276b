"""Mechanisms of the catalogue by what runs them."""

from __future__ import annotations

import regard as rg
from regard.catalog import mechanisms
from regard.pieces.call_tensors import needs_of


def _is_single(name: str) -> bool:
    attention = mechanisms()[name].example()[0]
    if not isinstance(attention, rg.Attention) or attention.transition is not None or attention.selection is not None:
        return False
    return not any(map(needs_of, attention.pieces()))


#: Mechanisms with one score, one mask and one normaliser, and no tensors of the call: all engines run them, or say why
#: not.
SINGLE = sorted(name for name in mechanisms() if _is_single(name))
#: Mechanisms whose keys another score chooses, by numbers of each call.
SELECTED = sorted(name for name, entry in mechanisms().items() if entry.family == "selected")
#: Mechanisms with a transition, which the engines `recurrent` and `reference` run.
TRANSPORTED = sorted(name for name, entry in mechanisms().items() if entry.family == "transported")
#: Mechanisms that are made of several attentions.
COMPOSITES = sorted(name for name, entry in mechanisms().items() if isinstance(entry.example()[0], rg.Composite))
