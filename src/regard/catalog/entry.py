"""`CatalogEntry`: an entry of the catalog, with formula, paper, cost and a small example."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.attention import Mechanism
from regard.base.errors import RegardError, nearest
from regard.base.html_table import html_table
from regard.base.shapes import Sizes
from regard.pieces.call_tensors import needs_of

#: The families, in the order of the documentation, and what the weights of each are.
FAMILIES = {
    "scored": "A weight is w_ij = f(s_ij, r_i): a score of the pair, and a statistic of the row.",
    "selected": "Scored, and another score chooses the keys of each query.",
    "transported": "A key reaches a query through the transitions of all tokens between them. Weights may be negative.",
    "sum": "A sum of maps, with a factor for each row.",
    "key groups": "A key stands for many tokens.",
}

#: How examples draw the tensors of a call, from numbers in [0, 1); all others are such numbers. The code is for pages.
DRAWS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "log_forget": (lambda x: -x / 2, "-torch.rand{} / 2"),
    "log_decay": (lambda x: -x / 4, "-torch.rand{} / 4"),
    "index_query": (lambda x: x - 0.5, "torch.rand{} - 0.5"),
    "index_key": (lambda x: x - 0.5, "torch.rand{} - 0.5"),
    "address": (lambda x: torch.nn.functional.normalize(x - 0.5, dim=-1), "normalize(torch.rand{} - 0.5, dim=-1)"),
}


@dataclass(frozen=True)
class CatalogEntry:
    """A named attention: `build(...)` returns the `Attention`, or a `Composite` of several.

    `formula` is plain text, and `cost` gives time and memory for n tokens. `example` builds a small problem: `tiny` are
    the arguments of `build`, and `sizes` are heads, key heads, widths and lengths. `disagree` says where other
    libraries use the name for something else. `also_called` has its names in tutorials and other libraries,
    the first of them in words. `family` says what its weights are made of (scored, selected, transported, sum or key
    groups), `year` is that of the paper, and `used_by` are some models of transformers that have it, by their folders.

    >>> import regard as rg
    >>> mechanism = rg.mechanisms()["alibi"]
    >>> mechanism.signature
    'alibi(num_heads: int, is_causal: bool = True)'
    >>> mechanism.family, mechanism.year, mechanism.used_by
    ('scored', 2022, ('bloom', 'falcon', 'mpt'))
    >>> attention, query, key, value = mechanism.example(queries=3)
    >>> attention(query, key, value).output.shape
    torch.Size([2, 4, 3, 8])
    """

    build: Callable[..., Mechanism]
    formula: str
    paper: str
    cost: str
    tiny: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    disagree: str = ""
    also_called: tuple[str, ...] = ()
    family: str = "scored"
    year: int = 0
    used_by: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise RegardError(f"CatalogEntry(family={self.family!r}): {nearest(self.family, FAMILIES)}")

    def __repr__(self) -> str:
        return f"CatalogEntry({self.name!r}: {self.summary})"

    def _repr_html_(self) -> str:
        facts = {name: getattr(self, name) for name in ("summary", "formula", "paper", "cost", "family", "signature")}
        return html_table(self.name, (), list(facts.items()), self.disagree)

    @property
    def name(self) -> str:
        return self.build.__name__

    @property
    def summary(self) -> str:
        """The first line of the docstring of `build`."""
        return (inspect.getdoc(self.build) or "").split("\n")[0]

    @property
    def signature(self) -> str:
        """The parameters of `build`, as Python writes them."""
        parameters = inspect.signature(self.build).replace(return_annotation=inspect.Signature.empty)
        # types without their modules: regard.encodings.Scaling is Scaling
        without_modules = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", str(parameters))
        return f"{self.name}{without_modules}".replace("'", "")

    def example(
        self, seed: int = 0, dtype: torch.dtype = torch.float64, **sizes: int
    ) -> tuple[Any, Tensor, Tensor, Tensor]:
        """A small attention with random query, key and value. `sizes` override those of the mechanism.

        Sizes: batch, heads, key_heads, queries, keys, head_dim, key_dim, value_dim.
        """
        given = {"batch": 2, "heads": 4, "queries": 24, "head_dim": 8} | self.sizes | sizes
        given.setdefault("key_heads", given["heads"])
        given.setdefault("keys", given["queries"])
        given.setdefault("key_dim", given["head_dim"])
        given.setdefault("value_dim", given["key_dim"])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            attention = self.build(**self.tiny).to(dtype)
            query = torch.randn(given["batch"], given["heads"], given["queries"], given["head_dim"], dtype=dtype)
            key = torch.randn(given["batch"], given["key_heads"], given["keys"], given["key_dim"], dtype=dtype)
            value = torch.randn(given["batch"], given["key_heads"], given["keys"], given["value_dim"], dtype=dtype)
        return attention, query, key, value

    def tensors(self, attention: Any, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Any]:
        """Random tensors that the pieces of an example need for each call, by name. An axis of a free size has 4.

        >>> import regard as rg
        >>> attention, *inputs = rg.mechanism("deltanet").example()
        >>> tensors = rg.mechanism("deltanet").tensors(attention, *inputs)
        >>> tensors["beta"].shape, attention(*inputs, **tensors).weights.is_signed
        (torch.Size([2, 4, 24]), True)
        """
        return call_tensors(attention, query, key, value)


def call_tensors(attention: Any, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Any]:
    """Random tensors that the pieces of an attention need for a call, by name: the same ones for the same shapes."""
    sizes, found = Sizes.of(query, key, value), {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for name, axes in (need for piece in attention.pieces() for need in needs_of(piece).items()):
            shape = [int(axis) if axis.isdigit() else getattr(sizes, axis, 4) for axis in axes.split()]
            draw, _ = DRAWS.get(name, (torch.clone, ""))
            found[name] = draw(torch.rand(shape, dtype=query.dtype))
    return found
