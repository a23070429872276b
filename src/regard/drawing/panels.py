"""`Panels`: the weights of the chosen heads, with the names of heads, queries and keys, for pictures and tables.

`weight_table` writes them as text, for a terminal, a log or an exercise.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from regard.base.checks import Count, checked
from regard.base.errors import RegardError
from regard.base.shapes import tensor_of_array
from regard.maps import AttentionMap
from regard.maps.indices import indices
from regard.masks import Mask

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    Tokens = Sequence[object] | tuple[Sequence[object], Sequence[object]] | None
    Weights = AttentionMap | Tensor | ArrayLike

#: The most characters of a label.
LONGEST = 14
#: Invisible characters that belong to words: the joiners of Persian, of Indic scripts and of emoji.
JOINERS = "\u200c\u200d"

#: One head, several heads, the mean of all heads, or each head.
Heads = int | Sequence[int] | Literal["mean"] | None


@dataclass(frozen=True)
class Panels:
    """One matrix of cells for each chosen head, (heads, rows, columns), and the names of its parts.

    A cell is a weight, or the sum over some keys and the mean over some queries if the map is larger than asked for.
    `shape` is that of the map. Without tokens, `queries` and `keys` are None. `axes` are the names of the rows and
    columns, and `quantity` is what a cell is, such as "weight". With `is_signed` cells may be negative.
    """

    cells: Tensor
    names: list[str]
    shape: tuple[int, int]
    queries: list[str] | None
    keys: list[str] | None
    axes: tuple[str, str]
    is_signed: bool = False
    quantity: str = "weight"


def panels(operation: str, weights: Any, tokens: Any, head: Heads, batch: int, largest: int | None = None) -> Panels:
    """The chosen heads of one text; maps with more than `largest` queries or keys are pooled to that many cells.

    `operation` is the call that errors name, here and below, `tokens` those of the keys or of both, and `batch` the
    index of the text.
    """
    source = weights if isinstance(weights, AttentionMap) else as_weights(operation, weights)
    B, H, I, J = source.shape
    if not 0 <= batch < B:
        raise RegardError(f"{operation}: batch {batch} is out of range; the weights have a batch of {B}.")
    if 0 in (H, I, J):
        raise RegardError(
            f"{operation}: the weights have the shape {tuple(source.shape)}, so there is nothing to show."
        )
    queries, keys = _tokens(operation, tokens, I, J)
    is_mean = isinstance(head, str) and head == "mean"
    chosen: list[int] = [0] if is_mean else indices(operation, "head", cast("Any", head), H).tolist()
    if not chosen:
        raise RegardError(f"{operation}: the list of heads is empty. Leave out head= for all {H} heads.")
    cells = _cells(source, batch, slice(None) if is_mean else chosen, largest).detach().float().cpu()
    cells, names = (cells.mean(0, keepdim=True), [f"mean of {H} heads"]) if is_mean else (cells, _names(chosen))
    is_signed = isinstance(source, AttentionMap) and source.is_signed
    names = names if max(H, len(names)) > 1 else [""]
    return Panels(cells, names, (I, J), queries, keys, _axes(queries, keys), is_signed)


def _names(heads: list[int]) -> list[str]:
    return [f"head {head}" for head in heads]


def as_weights(operation: str, weights: Any) -> Tensor:
    """Weights of any kind as a tensor (B, H, I, J)."""
    remedy = (
        "The maps of rg.watch are seen[0], seen[1], ..., one for each layer; that of rg.attend is the second of "
        "output, weights = rg.attend(...)."
    )
    if isinstance(weights, Mask):
        raise RegardError(f"{operation}: a mask becomes a tensor by mask.dense(length), such as {weights!r}.dense(6).")
    try:
        tensor = weights if isinstance(weights, Tensor) else tensor_of_array(np.asarray(weights))
    except (TypeError, ValueError, RuntimeError):
        raise RegardError(
            f"{operation}: expected an AttentionMap or an array of weights, got {type(weights).__name__}. {remedy}"
        ) from None
    if tensor.ndim not in (2, 3, 4) or tensor.is_complex():
        raise RegardError(
            f"{operation}: expected weights of shape (queries, keys), (heads, queries, keys) or "
            f"(batch, heads, queries, keys), got {tuple(tensor.shape)}. {remedy}"
        )
    return tensor[(None,) * (4 - tensor.ndim)]


def _cells(weights: AttentionMap | Tensor, batch: int, heads: Any, largest: int | None) -> Tensor:
    """The weights of some heads, (heads, rows, columns), pooled if they are more than `largest` per side.

    A pooled cell is the sum over its keys, averaged over its queries.
    """
    I, J = weights.shape[2:]
    if largest is None or max(I, J) <= largest:
        return weights[batch, heads]
    if isinstance(weights, AttentionMap):
        return weights.pool(largest, largest)[batch, heads]
    # a tensor is small enough to be pooled by two matrix products
    of_row, of_col = (_cell_of(n, min(largest, n)) for n in (I, J))
    sums = of_row.T @ weights[batch, heads].detach().float().cpu() @ of_col
    return sums / of_row.sum(0)[:, None]


def _cell_of(length: int, count: int) -> Tensor:
    """The cell of each token, as a matrix of 0 and 1, (length, count); the cells are those of `regard.maps.Pool`."""
    return one_hot(torch.arange(length) * count // length, count).float()


def _tokens(operation: str, tokens: Any, I: int, J: int) -> tuple[list[str] | None, list[str] | None]:
    """The labels of I queries and J keys; (None, None) without tokens. Tokens in another number are refused."""
    if tokens is None:
        return None, None
    if isinstance(tokens, str):
        raise RegardError(f"{operation}: tokens must be a list, got the text {tokens[:40]!r}. Split it: text.split().")
    if not hasattr(tokens, "__len__") or getattr(tokens, "ndim", 1) == 0:
        raise RegardError(f"{operation}: tokens must be a list, got {type(tokens).__name__}. Give one token for each.")
    sides = token_lists(tokens)
    is_pair, queries, keys = len(sides) == 2, sides[0], sides[-1]
    if not is_pair and I != J:
        raise RegardError(
            f"{operation}: one list of {len(keys)} tokens for {I} queries and {J} keys. Give two lists: "
            "(query tokens, key tokens)."
        )
    if (len(queries), len(keys)) != (I, J):
        given = f"{len(queries)} query tokens and {len(keys)} key tokens" if is_pair else f"{len(keys)} tokens"
        raise RegardError(
            f"{operation}: {given} for {I} queries and {J} keys. Give one token for each"
            + (", the queries first." if is_pair else ", special tokens such as [CLS] included.")
        )
    return [label(str(token)) for token in queries], [label(str(token)) for token in keys]


def token_lists(tokens: Any) -> list[list[Any]]:
    """[tokens of queries, tokens of keys] of a pair of lists, or [tokens] of one list for both."""
    sides = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
    is_pair = len(sides) == 2 and not any(isinstance(side, str) or not hasattr(side, "__len__") for side in sides)
    return [list(side) for side in sides] if is_pair else [sides]


def label(token: str) -> str:
    r"""A token as it can be read: invisible characters escaped, and cut to `LONGEST` characters.

    >>> label("the"), label("\n"), label(" "), label("incomprehensibility")
    ('the', '\\n', '␣', 'incomprehensi…')
    """
    text = "".join(map(_visible, token)) if token.strip(" ") else "␣" * len(token)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _visible(character: str) -> str:
    """A character, or its escape if it is invisible."""
    invisible = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in JOINERS
    return character.encode("unicode_escape").decode() if invisible else character


def _axes(queries: list[str] | None, keys: list[str] | None) -> tuple[str, str]:
    """The names of the axes. Queries that are no interval of the keys belong to another text: cross-attention.

    They may be the last keys only, as after a cache.
    """
    if queries is None or keys is None or any(keys[n:][: len(queries)] == queries for n in range(len(keys))):
        return "query", "key"
    return "query (target)", "key (source)"


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
    """The lines of one table of a matrix (queries, keys). Each column is as wide as its widest entry."""
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
