"""Mechanisms of the catalogue by what runs them."""

from __future__ import annotations

import regard as rg
from regard.catalog import mechanisms


def _is_single(name: str) -> bool:
    attention = mechanisms()[name].example()[0]
    return isinstance(attention, rg.Attention) and attention.transition is None


#: Mechanisms with one score, one mask and one normaliser: every engine runs them, or says why not.
SINGLE = sorted(name for name in mechanisms() if _is_single(name))
#: Mechanisms with a transition, which the engines `recurrent` and `reference` run.
TRANSPORTED = sorted(name for name, entry in mechanisms().items() if entry.family == "transported")
#: Mechanisms that are made of several attentions.
COMPOSITES = sorted(name for name, entry in mechanisms().items() if isinstance(entry.example()[0], rg.Composite))
