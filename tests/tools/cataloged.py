"""Mechanisms of the catalog by what runs them."""

from __future__ import annotations

import regard as rg
from regard.catalog import mechanisms
from regard.pieces.call_tensors import needs_of


def _has_tensors(name: str) -> bool | None:
    """Whether a scored mechanism needs tensors of the call; None for a transition or several attentions."""
    attention = mechanisms()[name].example()[0]
    if not isinstance(attention, rg.Attention) or attention.transition is not None:
        return None
    return any(map(needs_of, attention.pieces()))


#: Mechanisms with one score, one mask and one normalizer, and no tensors of the call: all engines run them, or say why
#: not.
SINGLE = sorted(
    name for name, entry in mechanisms().items() if _has_tensors(name) is False and entry.family != "selected"
)
#: The same with tensors of the call: gates of keys, or an indexer.
WITH_TENSORS = sorted(name for name in mechanisms() if _has_tensors(name))
#: Those whose weights are shares; statistics of other weights are those of `shares()`.
SHARES = [name for name in SINGLE if mechanisms()[name].example()[0].normalizer.has_shares]
#: Mechanisms whose keys another score chooses, by numbers of each call.
SELECTED = sorted(name for name, entry in mechanisms().items() if entry.family == "selected")
#: Mechanisms with a transition, which the engines `recurrent` and `reference` run.
TRANSPORTED = sorted(name for name, entry in mechanisms().items() if entry.family == "transported")
#: Mechanisms that are made of several attentions.
COMPOSITES = sorted(
    name for name, entry in mechanisms().items() if isinstance(entry.example()[0], rg.composites.Composite)
)
