"""`Attends`, the base class of modules with attention, and the listeners that get their maps."""

from __future__ import annotations

from torch import nn

from regard.maps.listener import Listener, Listeners

__all__ = ["Attends", "Listener", "Listeners", "listeners"]

#: The listeners of all modules: `with listeners.to(listener):` gives it every map that a module makes.
listeners = Listeners()


class Attends(nn.Module):
    """The base class of modules that give their maps to listeners. `regard.watch` finds modules by this class.

    `is_cross_attention` and `is_causal` tell which part of a model the attention belongs to.

    >>> import regard as rg
    >>> model = rg.nn.TransformerConfig(8, num_heads=2).decoder(layers=1)
    >>> [(m.is_cross_attention, m.is_causal) for m in model.modules() if isinstance(m, rg.nn.Attends)]
    [(False, True), (True, False)]
    """

    is_cross_attention: bool = False
    is_causal: bool = False
