"""How values with many numbers are printed: a tensor as its shape, and a dict of results as a line for each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from regard.base.html_table import html_table

V = TypeVar("V")


def folded(value: object) -> str:
    """The repr of a value, with its shape in place of each tensor.

    >>> import torch
    >>> folded({"beta": torch.zeros(1, 2), "parts": (torch.zeros(3), 4)})
    "{'beta': tensor (1, 2), 'parts': (tensor (3,), 4)}"
    """
    if isinstance(value, Tensor):
        return f"tensor {(*value.shape,)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name!r}: {folded(part)}' for name, part in value.items())}}}"
    if type(value) is tuple:
        return f"({', '.join(map(folded, value))}{',' * (len(value) == 1)})"
    return repr(value)


def folded_repr(self: Any) -> str:
    """The `__repr__` of a dataclass whose fields hold tensors."""
    shown = (f"{field.name}={folded(getattr(self, field.name))}" for field in fields(self) if field.repr)
    return f"{type(self).__name__}({', '.join(shown)})"


class Listing(dict[str, V]):
    """A dict that prints a line for each of its items, and a table in a notebook.

    A subclass names the items in `title`, and the columns of the table in `header`; `row` has the cells of one item.

    >>> class Lengths(Listing[str]):
    ...     title, header = "words", ("word", "length")
    ...     def row(self, name, value):
    ...         return name, len(value)
    >>> Lengths(a="one", b="three")
    2 words
      a: 3
      b: 5
    """

    title: ClassVar[str]
    header: ClassVar[Sequence[str]]

    def row(self, name: str, value: V) -> Sequence[object]:
        """The cells of one item; the first is its name."""
        raise NotImplementedError

    def __repr__(self) -> str:
        rows = (self.row(name, value) for name, value in self.items())
        lines = [f"  {first}: {', '.join(map(str, cells))}" for first, *cells in rows]
        return "\n".join([f"{len(self)} {self.title}", *lines])

    def _repr_html_(self) -> str:
        rows = [self.row(name, value) for name, value in self.items()]
        return html_table(f"{len(self)} {self.title}", self.header, rows)
