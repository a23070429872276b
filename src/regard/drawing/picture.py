"""`heatmap`: the weights of one head, of several heads, or their mean, as a figure of matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from os import PathLike
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from regard.base.checks import Count, checked
from regard.base.errors import MissingPackage, RegardError
from regard.drawing.cell_colors import CellColors, Greatest, Kind, checked_cells, panel_titles
from regard.drawing.color import ScaleName
from regard.drawing.panels import Heads, Panels, as_weights, panels, token_lists
from regard.maps import AttentionMap

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
    title: str | Sequence[str] = "",
    vmax: Greatest = "auto",
    scale: ScaleName | None = None,
    cmap: Any = None,
    kind: Kind | None = None,
    axes: Any = None,
    colorbar: bool = True,
) -> Figure:
    """The weights as a figure: a row for each query, a column for each key, dark is more; needs matplotlib.

    `weights` are an `AttentionMap`, or a tensor or array (I, J), (H, I, J) or (B, H, I, J), of which entry `batch` is
    drawn. `tokens` are one list, or a pair of lists (query tokens, key tokens). `head` is a number, a list of numbers,
    "mean" for the mean of all heads, or None for a grid of all heads. `title` is one text, or a list with one for each
    panel. Small maps have their numbers in the cells; maps of more than 512 tokens are pooled.

    Colors go from 0 to `vmax`, 1 for weights; None takes the largest. `scale` is "sqrt" by default, so that small
    weights are visible, or "linear" or "log"; the color bar names it. `cmap` is a colormap of matplotlib or its name.
    A map of weights that may be negative has two colors, from -`vmax` to `vmax`: red is above 0, blue below.

    `kind` is "weight"; "mask" for booleans (True = may attend), which have a check mark in each allowed cell;
    "position" for a table (positions, channels); or "score" for scores before the softmax. The last two are linear,
    with two colors. The figure is a new one, of bounded size, or that of your own `axes`: one, or a list with one for
    each panel. `colorbar=False` leaves the color bar out. Save it with `figure.savefig("map.png")`.

    A weight that is NaN is a gray cell, and the label of the color bar says so. For example, the softmax of a row in
    which all scores are -inf is NaN. Infinite and negative weights raise a `RegardError`.

    >>> import torch, regard as rg
    >>> weights = torch.tensor([[0.9, 0.1], [0.3, 0.7]])
    >>> figure = rg.heatmap(weights, ["hello", "world"])
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['0.90', '0.10', '0.30', '0.70']
    """
    if isinstance(vmax, float | int) and not vmax > 0:
        raise RegardError(f"heatmap(vmax={vmax}): colors go from 0 to vmax, so it must be above 0; None: the largest.")
    kind = kind or ("mask" if _is_boolean(weights) else "weight")
    shown = _shown(weights, tokens, head, batch, kind)
    canvas("heatmap")  # matplotlib, or the error that names it
    return draw_panels(shown, title, CellColors.of(shown, kind, scale, vmax, cmap), axes, colorbar)


def draw_panels(
    shown: Panels, title: str | Sequence[str], colors: CellColors, axes: Any = None, colorbar: bool = True
) -> Figure:
    """A figure of all panels, or the panels on the axes of a figure of the caller.

    `title` is one text or one for each panel, `axes` are those of matplotlib. Without `colorbar` there is no bar of
    colors.
    """
    titles, of_all = panel_titles(title, shown.names)
    if axes is not None:
        return _on_axes(shown, colors, axes, titles, colorbar)
    layout = PanelGrid.of(shown)
    figure = canvas("heatmap").new_figure(*layout.figure_size(shown))
    places = figure.subplots(layout.rows, layout.cols, squeeze=False, sharex=True, sharey=True).flatten()
    images = [_draw(place, shown, n, layout, colors) for n, place in enumerate(places[: len(shown.cells)])]
    for place in places[len(shown.cells) :]:
        place.set_axis_off()
    _name_axes(shown, layout, places)
    small = {} if len(titles) == 1 else {"fontsize": 9, "pad": 3}
    for place, text in zip(places, titles, strict=False):
        place.set_title(text, parse_math=False, **small)
    if of_all:
        figure.suptitle(of_all, parse_math=False)
    if colorbar:
        colors.add_bar(images[0], list(places))
    return figure


def _is_boolean(weights: Any) -> bool:
    """Whether these are truth values, in a tensor, an array or lists."""
    return not isinstance(weights, AttentionMap) and as_weights("heatmap", weights).dtype == torch.bool


def _shown(weights: Any, tokens: Any, head: Heads, batch: int, kind: Kind) -> Panels:
    """The panels of a figure, with checked cells. Only maps of weights are pooled.

    One list of tokens of a table of positions names its rows; its columns are channels, with their numbers.
    """
    if kind == "position" and tokens is not None and len(token_lists(tokens)) == 1:
        num_channels = as_weights("heatmap", weights).shape[3]
        tokens = tokens, [*map(str, range(num_channels))]
    shown = panels("heatmap", weights, tokens, head, batch, LARGEST if kind == "weight" else None)
    names = ("position", "channel") if kind == "position" else shown.axes
    return replace(shown, cells=checked_cells(shown.cells, kind, shown.is_signed), axes=names)


@checked
def show_or_save(path: str | PathLike[str]) -> None:
    """Show the open figures of pyplot, as `pyplot.show()` does. Where there is no window, save the last one as `path`.

    >>> import tempfile, regard as rg
    >>> from matplotlib import pyplot
    >>> lines = pyplot.plot([1, 2, 4])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rg.drawing.show_or_save(f"{folder}/line.png")
    """
    canvas("show_or_save").show_or_save(path)


@dataclass(frozen=True)
class PanelGrid:
    """The grid of panels, and the side of a cell in inches, which decides what has room."""

    rows: int
    cols: int
    cell: float

    @staticmethod
    def of(shown: Panels) -> PanelGrid:
        """The most square grid, with the largest cells that fit into the space for one or several panels."""
        count, (I, J) = len(shown.cells), shown.shape
        cols = math.ceil(math.sqrt(count))
        rows = math.ceil(count / cols)
        across, down = PANEL_SPACE if count == 1 else GRID_SPACE
        return PanelGrid(rows, cols, min(LARGEST_CELL, across / (cols * J), down / (rows * I)))

    @property
    def label_size(self) -> float:
        """The size of the letters of tokens in points, so that a line of them fits beside a cell."""
        return min(10.0, 58 * self.cell)

    @property
    def number_size(self) -> float:
        """The size of numbers in cells in points, so that four characters (0.25) fit into one."""
        return min(9.0, 23 * self.cell)

    def figure_size(self, shown: Panels) -> tuple[float, float]:
        """In inches: the cells, the labels of the tokens, titles and the color bar."""
        I, J = shown.shape
        longest = max(map(len, (*(shown.queries or ()), *(shown.keys or ()))), default=3)
        labels = 0.4 + EM * longest * self.label_size
        width, height = max(self.cols * (self.cell * J + 0.25), 1.5), max(self.rows * (self.cell * I + 0.35), 1.2)
        return width + labels + 1.1, height + labels + 0.4


def canvas(operation: str) -> ModuleType:
    """The module `regard.drawing.canvas`. It imports matplotlib, which is optional, so it is loaded at the first
    figure.

    `operation` is the name of the function in the error that asks for matplotlib.
    """
    try:
        return import_module("regard.drawing.canvas")
    except ModuleNotFoundError:
        raise MissingPackage(operation, "matplotlib", "view") from None


def _draw(axes: Any, shown: Panels, number: int, layout: PanelGrid, colors: CellColors) -> Any:
    """Draw one panel, with numbers in its cells if they are large enough and not pooled; returns the image of
    matplotlib.
    """
    image = colors.draw(axes, shown.cells[number], shown.shape)
    if layout.cell >= NUMBERED_CELL and tuple(shown.cells.shape[1:]) == shown.shape:
        colors.write_numbers(axes, image, shown.cells[number], layout.number_size)
    return image


def name_tokens(axis: Any, labels: list[str], size: float, cell: float = 0.0) -> None:
    """Tokens as labels of an axis, as text and never as formulas; turned below columns that are too narrow for them.

    `size` is that of the letters in points, `cell` the width of a column in inches.
    """
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


def _on_axes(shown: Panels, colors: CellColors, axes: Any, titles: list[str], colorbar: bool) -> Any:
    """The panels on the axes of a figure of the caller, whose sizes decide what has room.

    `titles` has one for each panel. `colorbar`: whether the figure gets a bar of colors.
    """
    places = [axes] if hasattr(axes, "imshow") else [*np.ravel(np.asarray(axes, dtype=object))]
    if not places or not all(hasattr(place, "imshow") for place in places):
        raise RegardError(f"heatmap(axes={axes!r}): axes are those of matplotlib: figure, axes = pyplot.subplots().")
    if len(shown.cells) != len(places):
        pairs = "one pair of axes" if len(places) == 1 else f"{len(places)} pairs of axes"
        raise RegardError(
            f"heatmap(axes=...): {pairs} for {len(shown.cells)} heads. Choose one head, head=0, or the mean, "
            'head="mean", or give a list of axes; without axes= all heads are drawn.'
        )
    for n, (place, title) in enumerate(zip(places, titles, strict=True)):
        box = place.get_window_extent()
        inches = min(box.width / shown.shape[1], box.height / shown.shape[0]) / place.figure.dpi
        layout = PanelGrid(1, 1, min(LARGEST_CELL, inches))
        image = _draw(place, shown, n, layout, colors)
        _name_axis(place.yaxis, shown.axes[0], shown.queries, layout)
        _name_axis(place.xaxis, shown.axes[1], shown.keys, layout)
        place.set_title(title, parse_math=False)
    if colorbar:
        colors.add_bar(image, places[0] if len(places) == 1 else places)
    return places[0].figure
