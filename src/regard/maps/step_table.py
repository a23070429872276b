"""`StepTable`: one query, step by step, with every number from the scores to the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from torch import Tensor

from regard.attention import Attention, Prepared
from regard.base.errors import RegardError
from regard.base.html_table import html_table
from regard.base.shapes import at_least_float32, grouped_scores, without_autocast
from regard.pieces.grid import Grid
from regard.pieces.score import scale_of_heads

#: The most keys and the most channels of a value that the printed table has.
KEYS, CHANNELS = 20, 3
#: The names of steps that are printed in another form.
HEADERS = {"product": "q . k"}


@dataclass(frozen=True, eq=False)
class StepTable:
    """The numbers of one query for each key: what `weights.step_table(query)` returns.

    `steps` has a tensor (J,) for each step, in the order of the computation: "product" (q . k, if the score is a dot
    product), "scaled" (or "score"), one step for each bias by its class, "masked" (the normalizer's `masked_score`,
    such as -inf, where the mask hides the key), "weight". A step that the attention does not have is left out. `value`
    (J, E) has the values of the keys, or is None. `tokens` are the names of the keys, and `query` is the name of the
    query.

    >>> import torch, regard as rg
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    >>> print(rg.attend(x, x, x, is_causal=True).weights.step_table(1, value=x))
    Query 1, batch entry 0, head 0. Softmax(temperature=1.0, sink=None) makes weights of the scores.
    key  q . k  scaled  masked  weight         value  weight x value
      0   0.00    0.00    0.00    0.06  (1.00, 0.00)    (0.06, 0.00)
      1   4.00    2.83    2.83    0.94  (0.00, 2.00)    (0.00, 1.89)
      2   2.00    1.41    -inf    0.00  (1.00, 1.00)    (0.00, 0.00)
    sum                           1.00        output    (0.06, 1.89)
    """

    title: str
    query: str
    tokens: tuple[str, ...]
    steps: dict[str, Tensor]
    value: Tensor | None = None

    @property
    def weights(self) -> Tensor:
        """The last step, (J,)."""
        return self.steps["weight"]

    @property
    def contributions(self) -> Tensor:
        """What each key adds to the output: weight x value, (J, E)."""
        if self.value is None:
            raise RegardError(
                "step_table: without values there are no contributions and no output. Give the values of the call: "
                "weights.step_table(query, value=value); or watch with rg.watch(model, keep='qkv')."
            )
        return self.weights[:, None] * self.value

    @property
    def output(self) -> Tensor:
        """The output of this head for the query, the sum of the contributions, (E,)."""
        return self.contributions.sum(0)

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        """The header and the rows of the printed table; the last row has the sums."""
        columns = [list(map(_number, step.tolist())) for step in self.steps.values()]
        header, last = ["key", *(HEADERS.get(name, name) for name in self.steps)], [""] * len(columns)
        last[-1] = _number(float(self.weights.sum()))
        if self.value is not None:
            columns += [[_vector(row) for row in rows] for rows in (self.value, self.contributions)]
            header, last = [*header, "value", "weight x value"], [*last, "output", _vector(self.output)]
        shown = self.weights.abs().argsort(descending=True, stable=True)[:KEYS].sort().values.tolist()
        rows = [[self.tokens[j], *(column[j] for column in columns)] for j in shown]
        return header, [*rows, ["sum", *last]]

    @property
    def _note(self) -> str:
        """Which keys are printed, if not all are."""
        J = len(self.tokens)
        return "" if J <= KEYS else f"The {KEYS} of {J} keys with the largest weights; the sums are over all keys."

    def _repr_html_(self) -> str:
        header, rows = self._cells()
        return html_table(self.title, header, rows, self._note)

    def __str__(self) -> str:
        header, rows = self._cells()
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in (header, *rows)]
        return "\n".join([self.title, *[self._note] * bool(self._note), *lines])

    __repr__ = __str__


def _number(number: float) -> str:
    return f"{number:z.2f}"  # z: no minus before 0.00


def _vector(numbers: Tensor) -> str:
    shown = ", ".join(map(_number, numbers[:CHANNELS].tolist()))
    return f"({shown}, ...)" if len(numbers) > CHANNELS else f"({shown})"


def score_steps(attention: Attention, tile: Prepared, grid: Grid) -> dict[str, Tensor]:
    """The scores of a tile (B, H, I, J) after each step, as `regard.attention.scores` computes them."""
    query, key, steps = at_least_float32(tile.query), at_least_float32(tile.key), {}
    with without_autocast(query.device):
        is_dot = scale_of_heads(attention.score, query, grid) is not None
        if is_dot:
            steps["product"] = grouped_scores(query, key)
        scores = steps["scaled" if is_dot else "score"] = attention.score.tile(query, key, grid)
        for bias, rows, cols in zip(attention.bias, tile.rows, tile.cols, strict=True):
            scores = bias.transform(scores.clone(), grid, rows, cols)
            steps[_new_name(type(bias).__name__, steps)] = scores
        if attention.mask is not None:
            steps["masked"] = scores.masked_fill(~attention.mask.allowed(grid), attention.normalizer.masked_score)
    return steps


def _new_name(name: str, known: dict[str, Tensor]) -> str:
    """The name, with a number if it is known: ALiBi, ALiBi 2."""
    return next(new for n in count(1) if (new := name if n == 1 else f"{name} {n}") not in known)


def values_of_head(value: Tensor, shape: tuple[int, ...], batch: int, head: int) -> Tensor:
    """The values (J, E) that query head `head` of batch entry `batch` reads, of values with 2 to 4 axes.

    `shape` is that of the map.
    """
    B, H, _, J = shape
    four = value if value.ndim == 4 else value[None, None] if value.ndim == 2 else value[:, None]
    if (
        value.ndim not in (2, 3, 4)
        or four.shape[0] != B
        or four.shape[2] != J
        or not four.shape[1]
        or H % four.shape[1]
    ):
        raise RegardError(
            f"weights.step_table(value=...): values of shape {tuple(value.shape)} do not fit weights of shape "
            f"{tuple(shape)}. Give the values of the call, (batch, heads, keys, width): here ({B}, {H}, {J}, width)."
        )
    return at_least_float32(four[batch, head // (H // four.shape[1])]).detach()


def names_of(tokens: Sequence[str] | None, number: int, what: str) -> tuple[str, ...]:
    """The tokens as names, or their numbers. The map has `number` of `what`, such as keys."""
    if tokens is not None and len(tokens) != number:
        raise RegardError(
            f"weights.step_table: the map has {number} {what}, got {len(tokens)} tokens. Give one token for each."
        )
    return tuple(map(str, range(number) if tokens is None else tokens))
