"""The base class of modules that attend, and the listeners of their maps."""

from __future__ import annotations

from torch import nn

from regard.maps.listener import Listener, Listeners

__all__ = ["Attends", "Listener", "Listeners", "listeners"]

listeners = Listeners()


class Attends(nn.Module):
    """Base of modules that attend and tell: `regard.watch` finds them by it.

    `is_cross_attention` and `is_causal` say which part of a model the attention is.

    >>> import regard as rg
    >>> model = rg.nn.Blueprint(8, num_heads=2).decoder(layers=1)
    >>> [(each.is_cross_attention, each.is_causal) for each in model.modules() if isinstance(each, rg.nn.Attends)]
    [(False, True), (True, False)]
    """

    is_cross_attention: bool = False
    is_causal: bool = False
