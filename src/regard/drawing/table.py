"""`weight_table`: the weights of heads as text, for a terminal, a log or an exercise."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

from torch import Tensor

from regard.base.checks import Count, checked
from regard.drawing.panels import Heads, Panels, panels

if TYPE_CHECKING:
    from regard.drawing.picture import Tokens, Weights


@checked
def weight_table(
    weights: Weights, tokens: Tokens = None, head: Heads = None, *, batch: Count = 0, digits: Count = 2
) -> str:
    """The weights as a text table: a line for each query, a column for each key, with `digits` decimals.

    Arguments are those of `heatmap`. Several heads are several tables, each under its name. Long tokens are cut.

    >>> import torch, regard as rg
    >>> weights = torch.tensor([[1.0, 0.0], [0.3, 0.7]])
    >>> print(rg.weight_table(weights, ["hello", "world"]))
    query/key  hello  world
        hello   1.00   0.00
        world   0.30   0.70
    """
    shown = panels("weight_table", weights, tokens, head, batch)
    tables = zip(shown.names, shown.cells, strict=True)
    return "\n\n".join("\n".join([name] * bool(name) + _lines(shown, matrix, digits)) for name, matrix in tables)


def _lines(shown: Panels, matrix: Tensor, digits: int) -> list[str]:
    """One table. Each column is as wide as its widest entry."""
    I, J = shown.shape
    corner = "/".join(shown.axes)
    rows = [[corner, *(shown.keys or map(str, range(J)))]]
    for query, row in zip(shown.queries or map(str, range(I)), matrix.tolist(), strict=True):
        rows.append([query, *(f"{weight:.{digits}f}" for weight in row)])
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(" " * (w - _width(text)) + text for text, w in zip(row, widths, strict=True)) for row in rows]


def _width(text: str) -> int:
    """Columns of a terminal: two for wide characters, as in Chinese, none for combining marks."""
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in ("W", "F")) for c in text)
