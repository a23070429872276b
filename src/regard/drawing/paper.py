"""`Paper`: words, cells and legends of a figure, in points from the top left. A figure grows downwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.drawing.picture import canvas
from regard.drawing.ramp import text_color
from regard.drawing.scale import WeightScale

#: Points: the two sizes of letters, the tallest panel, and the largest cell.
SMALL, NORMAL, TALLEST, WIDEST = 7.0, 8.0, 640.0, 20.0
#: More cells than these are one picture.
VECTORS = 4096
INK, SOFT, LINE, GOLD = "#111418", "#4a5158", "#c9c9c4", "#c27800"
#: A line of a table: panel, layer, head, quantity, query, query token, key, key token, value.
Row = tuple[str | int | float, ...]
Place = Callable[[NDArray[np.floating]], NDArray[np.floating]]


@dataclass
class Paper:
    """A figure of a fixed width in points. What is drawn next begins at `y`."""

    width: float
    scale: WeightScale
    figure: Any = field(init=False)
    axes: Any = field(init=False)
    y: float = 1.0

    def __post_init__(self) -> None:
        self.figure = canvas("figure").paper_figure(self.width / 72)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()

    def move(self, artists: Sequence[Any], x: float, y: float) -> None:
        """Move what is drawn to the right and down."""
        from matplotlib.transforms import Affine2D

        for artist in artists:
            artist.set_transform(Affine2D().translate(x, y) + self.axes.transData)

    def finish(self) -> Any:
        """The figure, as tall as what is drawn."""
        height = self.y + 1
        self.figure.set_size_inches(self.width / 72, height / 72)
        self.axes.set(xlim=(0, self.width), ylim=(height, 0))
        return self.figure

    def text_width(self, text: str, size: float = SMALL, bold: bool = False) -> float:
        return canvas("figure").text_width(self.figure, text, size, bold)

    def widest(self, labels: Sequence[str], size: float = SMALL) -> float:
        return max((self.text_width(text, size) for text in labels), default=0.0)

    def write(self, text: str, x: float, y: float, size: float = SMALL, anchor: str = "left", **look: Any) -> None:
        """Text whose middle line is at y. Turned text (`rotation=90`) begins or ends at y."""
        turned = look.get("rotation") == 90
        ends = {"left": "bottom", "right": "top", "center": "center"}
        placed = {"ha": "center", "va": ends[anchor]} if turned else {"ha": anchor, "va": "center_baseline"}
        style = {"fontsize": size, "color": INK, "family": canvas("figure").paper_fonts(), "parse_math": False}
        self.axes.text(x, y, text, **placed, **(style | look))

    @property
    def colors(self) -> dict[str, Any]:
        """The colors of cells, for matplotlib."""
        return {"cmap": canvas("figure").paper_colors(), "vmin": 0, "vmax": 1}

    def color(self, place: float) -> str:
        """The color of a place of the scale, from 0 to 1."""
        return canvas("figure").color_of(place)

    def text_color(self, place: float) -> str:
        """Black or white, whichever can be read on this color."""
        return text_color(canvas("figure").paper_colors()(place))

    def cells(self, values: NDArray[np.floating], x: float, y: float, cell: float, place: Place | None = None) -> None:
        """A matrix of square cells: polygons if they are few, a picture if they are many. NaN is gray."""
        rows, cols = values.shape
        places = np.ma.masked_invalid((place or self.scale.place)(values))
        if rows * cols <= VECTORS:
            edges = x + cell * np.arange(cols + 1), y + cell * np.arange(rows + 1)
            mesh = self.axes.pcolormesh(*edges, places, edgecolors="face", linewidth=0.05, **self.colors)
            mesh.set_gid("cells")
        else:
            self.picture(places, x, y, cols * cell, rows * cell)
        self.frame(x, y, cols * cell, rows * cell)

    def picture(self, places: Any, x: float, y: float, width: float, height: float) -> None:
        """A matrix as an image with sharp cells."""
        extent = (x, x + width, y + height, y)
        self.axes.imshow(places, extent=extent, aspect="auto", interpolation="nearest", **self.colors)

    def frame(self, x: float, y: float, width: float, height: float, **look: Any) -> None:
        from matplotlib.patches import Rectangle

        style = {"fill": False, "edgecolor": LINE, "linewidth": 0.5}
        self.axes.add_patch(Rectangle((x, y), width, height, **(style | look)))

    def tokens(self, labels: Sequence[str], x: float, y: float, cell: float, below: bool) -> None:
        """Labels at the left of rows, or below columns; every n-th if there is no room for all."""
        for at in range(0, len(labels), every(cell)):
            middle = (at + 0.5) * cell
            if below:
                self.write(labels[at], x + middle, y + 3, anchor="right", rotation=90)
            else:
                self.write(labels[at], x - 3, y + middle, anchor="right")

    def ramp(self, ticks: Sequence[tuple[float, str]], said: str, x: float = 8.0) -> float:
        """The colors with their numbers, at `y`, which moves below them; returns where their name ends."""
        width = min(150.0, self.width * 0.5)
        self.picture(np.linspace(0.004, 1, 256)[None], x, self.y, width, 6)
        self.frame(x, self.y, width, 6)
        for place, label in ticks:
            at = x + place * width
            self.axes.plot([at, at], [self.y + 6, self.y + 8], color=SOFT, linewidth=0.5)
            self.write(label, at, self.y + 12.5, anchor="center")
        self.write(said, x + width + 12, self.y + 3.5)
        self.y += 18
        return x + width + 12 + self.text_width(said)

    def paragraph(self, text: str) -> None:
        """Lines of text over the whole width."""
        for line in self._lines(text):
            self.write(line, 0, self.y + 5, NORMAL)
            self.y += 10.5

    def _lines(self, text: str) -> list[str]:
        lines = [""]
        for word in text.split():
            longer = f"{lines[-1]} {word}".strip()
            if lines[-1] and self.text_width(longer, NORMAL) > self.width:
                lines.append("")
                longer = word
            while (
                self.text_width(longer, NORMAL) > self.width and len(longer) > 1
            ):  # words without spaces, as in Chinese
                fits = next(n for n in range(len(longer) - 1, 0, -1) if self._fits(longer[:n]) or n == 1)
                lines[-1], longer = longer[:fits], longer[fits:]
                lines.append("")
            lines[-1] = longer
        return [line for line in lines if line]

    def _fits(self, text: str) -> bool:
        return self.text_width(text, NORMAL) <= self.width


def every(cell: float) -> int:
    """Of how many tokens one has room for its label, beside cells of this size in points.

    >>> every(12), every(4)
    (1, 2)
    """
    step = 1
    while step * cell < SMALL + 0.8:
        step *= 2
    return step
