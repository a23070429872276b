"""The catalog of named mechanisms. Each file of this folder is one mechanism."""

from __future__ import annotations

import re
import textwrap
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from regard.base.checks import checked
from regard.base.errors import RegardError, nearest
from regard.base.printing import Listing
from regard.catalog.entry import CatalogEntry

__all__ = ["CatalogEntry", "mechanism", "mechanisms"]

#: Ways to compute the weights of softmax attention, without the signs between words.
IMPLEMENTATIONS = re.compile(r"(flash|sdpa|fused|memoryefficient|xformers|paged)(attention|attn)?\d*")
KERNEL = (
    "That is a way to compute softmax attention in O(n) memory, and changes no weight. The mechanism is called "
    "'self_attention' here, and regard.attend runs it in such a kernel: regard.plan(query, key, value) names it."
)


class Mechanisms(Listing[CatalogEntry]):
    """The mechanisms of the catalog by name; printed, a line for each."""

    title = "mechanisms; rg.mechanism(name) has formula, paper and cost"
    header = ("name", "what it is", "family", "paper")

    def row(self, name: str, value: CatalogEntry) -> tuple[str, ...]:
        return name, value.summary, value.family, value.paper

    def __repr__(self) -> str:
        return "\n".join([f"{len(self)} {self.title}", *textwrap.wrap(", ".join(self), 100)])


def mechanisms() -> Mechanisms:
    """All mechanisms by name, in alphabetical order.

    >>> entries = mechanisms()
    >>> list(entries) == sorted(entries), entries["alibi"].paper
    (True, 'Press, Smith & Lewis 2022, arXiv:2108.12409')
    """
    return Mechanisms(_entries())


@cache
def _entries() -> dict[str, CatalogEntry]:
    """The entry of each file of this folder, by name."""
    names = [module.name for module in iter_modules(__path__) if module.name != "entry"]
    return {name: import_module(f"{__name__}.{name}").MECHANISM for name in sorted(names)}


@checked
def mechanism(name: str) -> CatalogEntry:
    """The mechanism of a name. The error for an unknown name gives its name in the catalog, or a similar name.

    >>> mechanism("sliding_window").build(size=4).mask
    (causal() & window(size=4))
    >>> mechanism("GQA")
    Traceback (most recent call last):
        ...
    regard.RegardError: catalog: there is no mechanism 'GQA'. It is called 'grouped_query' here.
    """
    known = mechanisms()
    if name not in known:
        ours = [entry.name for entry in known.values() if _plain(name) in map(_plain, (entry.name, *entry.also_called))]
        remedy = f"It is called {' or '.join(map(repr, ours))} here." if ours else nearest(name, known)
        remedy = KERNEL if IMPLEMENTATIONS.fullmatch(_plain(name)) else remedy
        raise RegardError(f"catalog: there is no mechanism {name!r}. {remedy}")
    return known[name]


def _plain(name: str) -> str:
    """A name without case and without signs between its words: "FAVOR+" and "favor" are the same."""
    return re.sub(r"[\W_]", "", name).lower()
