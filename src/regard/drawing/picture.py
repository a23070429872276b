"""`heatmap`: the weights of one head, of several heads, or their mean, as a figure of matplotlib."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from regard.base.checks import Count, checked
from regard.base.errors import MissingPackage, RegardError
from regard.drawing.color import colormap, text_color
from regard.drawing.panels import Heads, Panels, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from regard.drawing.panels import Tokens, Weights

#: The most cells per side of a picture; larger maps are pooled.
LARGEST = 512
#: Inches: the largest side of a cell, and the smallest side of a cell with a number, and with tokens beside it.
LARGEST_CELL, NUMBERED_CELL, NAMED_CELL = 0.5, 0.26, 0.11
#: Inches: the width of a letter for each point of its size.
EM = 0.65 / 72
#: Inches: the width and height of all cells together, for one panel and for several.
PANEL_SPACE, GRID_SPACE = (10.0, 9.0), (15.0, 11.0)


@checked
def heatmap(
    weights: Weights,
    tokens: Tokens = None,
    head: Heads = None,
    *,
    batch: Count = 0,
    title: str = "",
    vmax: float | None = 1.0,
    axes: Any = None,
) -> Figure:
    """The weights as a figure: a row for each query, a column for each key, dark is more; needs matplotlib.

    A map of weights that may be negative has two colors, from -`vmax` to `vmax`: red is above 0, blue below.

    `weights` are an `AttentionMap`, or a tensor or array (I, J), (H, I, J) or (B, H, I, J), of which entry `batch` is
    drawn. `tokens` are one list, or a pair of lists (query tokens, key tokens). `head` is a number, a list of numbers,
    "mean" for the mean of all heads, or None for a grid of all heads. Colors go from 0 to `vmax`, by the square root,
    so that small weights are visible; None takes the largest weight. Small maps have their numbers in the cells; maps
    of more than 512 tokens are pooled. The figure is a new one, of bounded size, or that of your own `axes`. Save it
    with `figure.savefig("map.png")`.

    A weight that is NaN is a gray cell, and the label of the color bar says so. For example, the softmax of a row in
    which all scores are -inf is NaN. Infinite and negative weights raise a `RegardError`.

    >>> import torch, regard as rg
    >>> weights = torch.tensor([[0.9, 0.1], [0.3, 0.7]])
    >>> figure = rg.heatmap(weights, ["hello", "world"])
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['0.90', '0.10', '0.30', '0.70']
    """
    if vmax is not None and not vmax > 0:
        raise RegardError(f"heatmap(vmax={vmax}): colors go from 0 to vmax, so it must be above 0; None: the largest.")
    if axes is not None and not hasattr(axes, "imshow"):
        raise RegardError(f"heatmap(axes={axes!r}): axes are those of matplotlib: figure, axes = pyplot.subplots().")
    shown = panels("heatmap", weights, tokens, head, batch, LARGEST)
    _check_values(shown)
    return draw_panels(shown, title, vmax, axes)


def draw_panels(shown: Panels, title: str, vmax: float | None, axes: Any) -> Figure:
    """A figure of all panels, or one panel on the axes of a figure of the caller."""
    if axes is not None:
        return _on_axes(shown, axes, title, vmax)
    layout = PanelGrid.of(shown)
    figure = canvas("heatmap").new_figure(*layout.figure_size(shown))
    places = figure.subplots(layout.rows, layout.cols, squeeze=False, sharex=True, sharey=True).flatten()
    images = [_draw(place, shown, n, layout, vmax) for n, place in enumerate(places[: len(shown.cells)])]
    for place in places[len(shown.cells) :]:
        place.set_axis_off()
    _name_axes(shown, layout, places)
    if len(shown.cells) == 1:
        places[0].set_title(title or shown.names[0], parse_math=False)
    elif title:
        figure.suptitle(title, parse_math=False)
    figure.colorbar(images[0], ax=list(places), label=colorbar_label(shown), shrink=0.8)
    return figure


@dataclass(frozen=True)
class PanelGrid:
    """The grid of panels, and the side of a cell in inches, which decides what has room."""

    rows: int
    cols: int
    cell: float

    @staticmethod
    def of(shown: Panels) -> PanelGrid:
        count, (I, J) = len(shown.cells), shown.shape
        cols = math.ceil(math.sqrt(count))
        rows = math.ceil(count / cols)
        across, down = PANEL_SPACE if count == 1 else GRID_SPACE
        return PanelGrid(rows, cols, min(LARGEST_CELL, across / (cols * J), down / (rows * I)))

    @property
    def label_size(self) -> float:
        """In points."""
        return min(10.0, 58 * self.cell)

    @property
    def number_size(self) -> float:
        return min(9.0, 23 * self.cell)

    def figure_size(self, shown: Panels) -> tuple[float, float]:
        """In inches: the cells, the labels of the tokens, titles and the color bar."""
        I, J = shown.shape
        longest = max(map(len, (*(shown.queries or ()), *(shown.keys or ()))), default=3)
        labels = 0.4 + EM * longest * self.label_size
        width, height = max(self.cols * (self.cell * J + 0.25), 1.5), max(self.rows * (self.cell * I + 0.35), 1.2)
        return width + labels + 1.1, height + labels + 0.4


def canvas(operation: str) -> ModuleType:
    """The module that draws. matplotlib is optional, so it is imported at the first figure."""
    try:
        return import_module("regard.drawing.canvas")
    except ModuleNotFoundError:
        raise MissingPackage(operation, "matplotlib", "view") from None


def draw_cells(
    axes: Any, cells: Tensor, shape: tuple[int, int], vmax: float | None = 1.0, is_signed: bool = False
) -> Any:
    """One matrix of cells as an image; its coordinates are those of the tokens. Cells that are NaN are gray."""
    from matplotlib import colormaps
    from matplotlib.colors import FuncNorm, PowerNorm

    I, J = shape
    aspect = "equal" if max(I, J) <= 4 * min(I, J) else "auto"
    colors = (colormaps["RdBu_r"] if is_signed else colormap()).with_extremes(bad="0.8")
    extent = (-0.5, J - 0.5, I - 0.5, -0.5)
    values = cells.numpy()
    norm: Any = PowerNorm(0.5, 0, vmax, clip=True)
    if is_signed:
        largest = float(np.nanmax(np.abs(values))) if vmax is None else vmax
        norm = FuncNorm((_signed_root, _signed_square), -largest, largest, clip=True)
    return axes.imshow(values, cmap=colors, norm=norm, aspect=aspect, extent=extent, interpolation="nearest")


def _signed_root(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.sign(x) * np.sqrt(np.abs(x))


def _signed_square(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.sign(x) * x**2


def write_numbers(axes: Any, image: Any, values: Tensor, size: float) -> None:
    """A number in each cell of an image, black or white, so that it can be read on the color of the cell."""
    for i, row in enumerate(values.tolist()):
        for j, value in enumerate(row):
            if not math.isnan(value):
                color = text_color(image.to_rgba(value))
                said = f"{value:.2f}".replace("-0.00", "0.00")
                number = axes.text(j, i, said, ha="center", va="center", fontsize=size, color=color)
                number.set_in_layout(False)  # it is inside of its cell, and measuring thousands takes seconds


def colorbar_label(shown: Panels) -> str:
    """The quantity that the colors show."""
    is_pooled = tuple(shown.cells.shape[1:]) != shown.shape
    quantity = "weight of a cell: the sum over its keys" if is_pooled else shown.quantity
    return f"{quantity} (gray: NaN)" if shown.cells.isnan().any() else quantity


def _draw(axes: Any, shown: Panels, number: int, layout: PanelGrid, vmax: float | None) -> Any:
    """One panel, its tokens and its numbers."""
    highest = float(shown.cells.nan_to_num(0).abs().max()) or 1.0 if vmax is None else vmax
    image = draw_cells(axes, shown.cells[number], shown.shape, highest, shown.is_signed)
    if len(shown.cells) > 1:
        axes.set_title(shown.names[number], fontsize=9, pad=3)
    if layout.cell >= NUMBERED_CELL and tuple(shown.cells.shape[1:]) == shown.shape:
        write_numbers(axes, image, shown.cells[number], layout.number_size)
    return image


def name_tokens(axis: Any, labels: list[str], size: float, cell: float = 0.0) -> None:
    """Tokens as labels of an axis, as text and never as formulas; turned below columns that are too narrow for them."""
    widest = EM * max(map(len, labels)) * size
    turned = {"rotation": 90} if axis.axis_name == "x" and widest > cell else {}
    axis.set_ticks(
        range(len(labels)), labels, fontsize=size, family=canvas("heatmap").fonts(), parse_math=False, **turned
    )


def _name_axis(axis: Any, name: str, labels: list[str] | None, layout: PanelGrid) -> None:
    """The name of an axis and its tokens; positions if there are no tokens, or no room for them."""
    from matplotlib.ticker import MaxNLocator

    axis.set_label_text(name)
    if labels is None or layout.cell < NAMED_CELL:
        axis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
    else:
        name_tokens(axis, labels, layout.label_size, layout.cell)


def _name_axes(shown: Panels, layout: PanelGrid, places: Any) -> None:
    """Names and tokens at the outer panels only: below each column of panels, and at the left."""
    count = len(shown.cells)
    for n, place in enumerate(places[:count]):
        is_lowest, is_left = n + layout.cols >= count, n % layout.cols == 0
        if is_left:
            _name_axis(place.yaxis, shown.axes[0], shown.queries, layout)
        if is_lowest:
            _name_axis(place.xaxis, shown.axes[1], shown.keys, layout)
        place.tick_params(labelbottom=is_lowest, labelleft=is_left, length=2)


def _on_axes(shown: Panels, axes: Any, title: str, vmax: float | None) -> Any:
    """One panel on the axes of a figure of the caller, whose size decides what has room."""
    if len(shown.cells) > 1:
        raise RegardError(
            f"heatmap(axes=...): one pair of axes for {len(shown.cells)} heads. Choose one head, head=0, or the mean, "
            'head="mean"; without axes= all heads are drawn.'
        )
    box = axes.get_window_extent()
    inches = min(box.width / shown.shape[1], box.height / shown.shape[0]) / axes.figure.dpi
    layout = PanelGrid(1, 1, min(LARGEST_CELL, inches))
    image = _draw(axes, shown, 0, layout, vmax)
    _name_axis(axes.yaxis, shown.axes[0], shown.queries, layout)
    _name_axis(axes.xaxis, shown.axes[1], shown.keys, layout)
    axes.set_title(title or shown.names[0], parse_math=False)
    axes.figure.colorbar(image, ax=axes, label=colorbar_label(shown), shrink=0.8)
    return axes.figure


def _check_values(shown: Panels) -> None:
    """Refuse numbers that are no weights: scores before the softmax, or differences."""
    known = shown.cells[~shown.cells.isnan()]
    if known.numel() and (known.isinf().any() or (known.min() < -1e-6 and not shown.is_signed)):
        raise RegardError(
            f"heatmap: weights are finite and at least 0; these go from {float(known.min()):g} to "
            f"{float(known.max()):g}. Scores become weights by softmax(-1)."
        )
