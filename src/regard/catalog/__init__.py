"""The catalogue of named mechanisms. Each file of this folder is one mechanism."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from regard.catalog.entry import Mechanism
from regard.checks import checked
from regard.errors import RegardError, nearest

__all__ = ["Mechanism", "mechanism", "mechanisms"]


@cache
def mechanisms() -> dict[str, Mechanism]:
    """All mechanisms by name, in alphabetical order.

    >>> entries = mechanisms()
    >>> list(entries) == sorted(entries), entries["alibi"].paper
    (True, 'Press, Smith & Lewis 2022, arXiv:2108.12409')
    """
    names = [module.name for module in iter_modules(__path__) if module.name != "entry"]
    return {name: import_module(f"{__name__}.{name}").MECHANISM for name in sorted(names)}


@checked
def mechanism(name: str) -> Mechanism:
    """The mechanism of a name. The error for an unknown name suggests the most similar name.

    >>> mechanism("sliding_window").build(size=4).mask
    (causal() & window(size=4))
    """
    known = mechanisms()
    if name not in known:
        raise RegardError(f"catalogue: there is no mechanism {name!r}. {nearest(name, known)}")
    return known[name]
