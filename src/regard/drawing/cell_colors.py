"""`CellColors`: how a heatmap shows its cells, by what they are: colors, their scale, numbers and the color bar."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor

from regard.base.errors import RegardError, nearest
from regard.drawing.color import ScaleName, WeightScale, colormap, text_color
from regard.drawing.panels import Panels

#: What the cells of a heatmap are.
Kind = Literal["weight", "mask", "position", "score"]
#: The greatest value of the colors: a number, None for the largest of the cells, or the choice of the kind.
Greatest = float | Literal["auto"] | None
#: The place on a colormap of a pair that may attend.
ALLOWED = 0.65


@dataclass(frozen=True)
class CellColors:
    """The colors of cells of a kind, on a scale that ends at `largest`; `cmap` replaces the colors of the kind.

    `label` is the text of the color bar. The logarithmic scale begins `decades` powers of ten below `largest`.
    """

    kind: Kind
    scale: ScaleName
    largest: float
    is_signed: bool
    cmap: Any
    label: str
    decades: int

    @staticmethod
    def of(shown: Panels, kind: Kind, scale: ScaleName | None, vmax: Greatest, cmap: Any = None) -> CellColors:
        """The colors of the cells of a figure. Without a scale, weights have that of the square root."""
        is_weight, is_signed = kind == "weight", shown.is_signed or kind in ("position", "score")
        scale = scale or ("sqrt" if is_weight else "linear")
        if scale == "log" and is_signed:
            raise RegardError('heatmap(scale="log"): a logarithmic scale has no place for numbers below 0.')
        if vmax == "auto":
            vmax = None if kind in ("position", "score") else 1.0
        # 1.0 also where all cells are 0: a scale needs a length
        largest = float(shown.cells.nan_to_num(0).abs().max()) or 1.0 if vmax is None else float(vmax)
        weight_scale = WeightScale(scale, shown.shape[1])
        on_scale = "" if scale == "linear" else f", {weight_scale.label} scale"
        label = f"{_quantity(shown, kind)}{on_scale}{_gray(shown, kind)}"
        return CellColors(kind, scale, largest, is_signed, cmap, label, weight_scale.decades)

    def draw(self, axes: Any, cells: Tensor, shape: tuple[int, int]) -> Any:
        """One matrix of cells as an image; its coordinates are those of the tokens. Cells that are NaN are gray.

        `shape` is the numbers of queries and of keys; there may be fewer cells.
        """
        I, J = shape
        aspect = "equal" if max(I, J) <= 4 * min(I, J) and self.kind != "position" else "auto"
        colors, extent = self._colormap().with_extremes(bad="0.8"), (-0.5, J - 0.5, I - 0.5, -0.5)
        return axes.imshow(
            cells.numpy(), cmap=colors, norm=self._norm(), aspect=aspect, extent=extent, interpolation="nearest"
        )

    def write_numbers(self, axes: Any, image: Any, values: Tensor, size: float) -> None:
        """Write a number into each cell of an image; in a mask a check mark where a pair may attend."""
        write_numbers(axes, image, values, size, _check_mark if self.kind == "mask" else two_digits)

    def add_bar(self, image: Any, axes: Any) -> None:
        """Add the color bar beside one panel or a list of panels: what a color means, and on which scale."""
        figure = (axes if hasattr(axes, "figure") else axes[0]).figure
        bar = figure.colorbar(image, ax=axes, label=self.label, shrink=0.8)
        if self.kind == "mask":
            bar.set_ticks([0.25, 0.75], labels=["no", "yes"])
        elif self.scale == "sqrt" and 0.02 < self.largest <= 1:
            bar.set_ticks(self._ticks(), labels=[f"{tick:g}" for tick in self._ticks()])
            bar.ax.minorticks_off()

    def _ticks(self) -> list[float]:
        """Ticks of the square root, which gives small weights room; on both sides of 0 for weights with signs."""
        above = [tick for tick in (0.01, 0.1, 0.25, 0.5, 1.0) if tick <= self.largest]
        return [*(-tick for tick in reversed(above) if self.is_signed), 0.0, *above]

    def _colormap(self) -> Any:
        """The colormap: `cmap`, or red and blue for numbers with signs, or the ramp.

        A mask has two of its colors, at 0 and at `ALLOWED`.
        """
        from matplotlib import colormaps
        from matplotlib.colors import ListedColormap

        colors = self.cmap
        if isinstance(colors, str):
            if colors not in colormaps:
                raise RegardError(f"heatmap(cmap={colors!r}): no such colormap. {nearest(colors, colormaps)}")
            colors = colormaps[colors]
        colors = colors or (colormaps["RdBu_r"] if self.is_signed else colormap())
        return ListedColormap([colors(0.0), colors(ALLOWED)]) if self.kind == "mask" else colors

    def _norm(self) -> Any:
        """The object of matplotlib that maps a cell to a place of the colormap, from 0 to 1."""
        from matplotlib.colors import FuncNorm, LogNorm, Normalize, PowerNorm

        least = -self.largest if self.is_signed else 0
        if self.scale == "log":
            return LogNorm(self.largest * 10.0**-self.decades, self.largest, clip=True)
        if self.scale == "linear":
            return Normalize(least, self.largest, clip=True)
        if self.is_signed:
            return FuncNorm((_signed_root, _signed_square), least, self.largest, clip=True)
        return PowerNorm(0.5, 0, self.largest, clip=True)


def write_numbers(
    axes: Any, image: Any, values: Tensor, size: float, said: Callable[[float], str] | None = None
) -> None:
    """Write a text into each cell of an image, black or white, so that it can be read on the color of the cell.

    `values` are (rows, columns), and `size` is that of the font in points. `said` makes the text of a value,
    by default with two digits; cells that are NaN or have an empty text stay free.
    """
    said = said or two_digits
    for i, row in enumerate(values.tolist()):
        for j, value in enumerate(row):
            if not math.isnan(value) and (text := said(value)):
                color = text_color(image.to_rgba(value))
                number = axes.text(j, i, text, ha="center", va="center", fontsize=size, color=color)
                number.set_in_layout(False)  # it is inside of its cell, and measuring thousands takes seconds


def two_digits(value: float) -> str:
    """A number with two digits after the point, and no sign before zero."""
    return f"{value:.2f}".replace("-0.00", "0.00")


def _check_mark(value: float) -> str:
    """A check mark for 1, nothing for 0."""
    return "\N{CHECK MARK}" if value else ""


def _quantity(shown: Panels, kind: Kind) -> str:
    """The quantity that the colors show."""
    is_pooled = tuple(shown.cells.shape[1:]) != shown.shape
    of_weights = "weight of a cell: the sum over its keys" if is_pooled else shown.quantity
    return {"weight": of_weights, "score": "score", "mask": "may attend", "position": "value"}[kind]


def _gray(shown: Panels, kind: Kind) -> str:
    """What gray cells are, if there are some."""
    meaning = " (gray: hidden by -inf)" if kind == "score" else " (gray: NaN)"
    return meaning if bool(shown.cells.isnan().any()) else ""


def _signed_root(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The square root that keeps the sign."""
    return np.sign(x) * np.sqrt(np.abs(x))


def _signed_square(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The inverse of `_signed_root`."""
    return np.sign(x) * x**2


def checked_cells(cells: Tensor, kind: Kind, is_signed: bool) -> Tensor:
    """The cells (panels, rows, columns) of a figure, -inf among scores as NaN.

    Numbers that the kind does not have are refused: weights below 0, unless `is_signed`.
    """
    if kind == "score":
        cells = cells.masked_fill(cells.isneginf(), math.nan)
    known = cells[~cells.isnan()]
    if not known.numel():
        return cells
    least, largest = float(known.min()), float(known.max())
    if kind == "mask" and not bool(((known == 0) | (known == 1)).all()):
        raise RegardError(
            f'heatmap(kind="mask"): a mask holds booleans, or 0 and 1; these go from {least:g} to {largest:g}.'
        )
    if known.isinf().any() or (kind == "weight" and least < -1e-6 and not is_signed):
        raise RegardError(
            f"heatmap: weights are finite and at least 0; these go from {least:g} to {largest:g}. Scores become "
            'weights by softmax(-1), or are drawn with kind="score"; encodings of positions with kind="position".'
        )
    return cells


def panel_titles(title: str | Sequence[str], names: Sequence[str]) -> tuple[list[str], str]:
    """The title of each panel, and that of the whole figure, empty if there is none.

    `title` is what the user gave: one text, empty for none, or one for each panel. `names` are the names of the panels.
    """
    if isinstance(title, str):
        return ([title or names[0]], "") if len(names) == 1 else ([*names], title)
    if len(title) != len(names):
        raise RegardError(f"heatmap: {len(title)} titles for {len(names)} panels. Give one for each, or one text.")
    return [*title], ""
