"""`Paper`: words, cells and legends of a figure, in points from the top left. A figure grows downwards.

The file also has the panels: words with arcs, the map of a head, all heads, an alignment, a statistic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.base.errors import RegardError, nearest
from regard.drawing.color import WeightScale, text_color
from regard.drawing.picture import canvas
from regard.stats import STATISTICS

#: Points: the two sizes of letters, the tallest panel, and the largest cell.
SMALL, NORMAL, TALLEST, WIDEST = 7.0, 8.0, 640.0, 20.0
#: Points: the height of a figure on a page of A4 with its margins, and a panel that is made no lower.
PAGE, SHORTEST = 247 / 25.4 * 72, 90.0
#: More cells than these are one picture.
VECTORS = 4096
INK, SOFT, LINE, GOLD = "#111418", "#4a5158", "#c9c9c4", "#c27800"
#: A line of a table: panel, layer, head, quantity, query, query token, key, key token, value.
Row = tuple[str | int | float, ...]
#: From weights to places on the scale of colors, 0 to 1.
Place = Callable[[NDArray[np.floating]], NDArray[np.floating]]


@dataclass
class Paper:
    """A figure of a fixed width in points, with panels of at most `tallest`. What is drawn next begins at `y`.

    `axes` are those of matplotlib and cover the figure; one unit of them is a point, and y grows downwards.
    """

    width: float
    scale: WeightScale
    tallest: float = TALLEST
    figure: Any = field(init=False)
    axes: Any = field(init=False)
    y: float = 1.0
    widths: dict[tuple[str, float, bool], float] = field(init=False, default_factory=dict)  # of texts, as measured

    def __post_init__(self) -> None:
        self.figure = canvas("figure").paper_figure(self.width / 72)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()

    def move(self, artists: Sequence[Any], x: float, y: float) -> None:
        """Move what was drawn to the right and down, by points. It moves once only: the transform is replaced."""
        from matplotlib.transforms import Affine2D

        for artist in artists:
            artist.set_transform(Affine2D().translate(x, y) + self.axes.transData)

    def finish(self) -> Any:
        """The figure of matplotlib, as tall as what is drawn.

        Only here do the axes get their units, because the height is not known before.
        """
        height = self.y + 1
        self.figure.set_size_inches(self.width / 72, height / 72)
        self.axes.set(xlim=(0, self.width), ylim=(height, 0))
        return self.figure

    def text_width(self, text: str, size: float = SMALL, bold: bool = False) -> float:
        """The width of a text in points. Each is measured once, because paragraphs ask for the same repeatedly."""
        if (text, size, bold) not in self.widths:
            self.widths[text, size, bold] = canvas("figure").text_width(self.figure, text, size, bold)
        return self.widths[text, size, bold]

    def widest(self, labels: Sequence[str], size: float = SMALL) -> float:
        """The width of the widest label in points; 0 without labels."""
        return max((self.text_width(text, size) for text in labels), default=0.0)

    def write(self, text: str, x: float, y: float, size: float = SMALL, anchor: str = "left", **look: Any) -> None:
        """Text of a `size` in points, whose middle line is at y, and whose end that `anchor` names is at x.

        Turned text (`rotation=90`) begins or ends at y. `x` and `y` are in points from the left and from the top.
        """
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
        """A matrix of square cells: polygons if they are few, a picture if they are many. NaN is gray.

        Their top left is (x, y), `cell` is their side in points. `place` replaces the scale of the figure.
        """
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
        """An image with sharp cells, of places on the scale of colors from 0 to 1."""
        extent = (x, x + width, y + height, y)
        self.axes.imshow(places, extent=extent, aspect="auto", interpolation="nearest", **self.colors)

    def frame(self, x: float, y: float, width: float, height: float, **look: Any) -> None:
        """A rectangle without a ground, in points; `look` are further options of matplotlib."""
        from matplotlib.patches import Rectangle

        style = {"fill": False, "edgecolor": LINE, "linewidth": 0.5}
        self.axes.add_patch(Rectangle((x, y), width, height, **(style | look)))

    def tokens(self, labels: Sequence[str], x: float, y: float, cell: float, below: bool) -> None:
        """Labels at the left of rows, or `below` columns; every n-th if there is no room for all.

        (x, y) is the corner of the cells where the labels begin, `cell` the side of a cell in points.
        """
        for at in range(0, len(labels), every(cell)):
            middle = (at + 0.5) * cell
            if below:
                self.write(labels[at], x + middle, y + 3, anchor="right", rotation=90)
            else:
                self.write(labels[at], x - 3, y + middle, anchor="right")

    def ramp(self, ticks: Sequence[tuple[float, str]], said: str, x: float = 8.0) -> float:
        """The colors with their numbers, at `y`, which moves below them; returns where their name ends.

        `ticks` are places from 0 to 1 with their labels, and `said` is the name. The colors begin at `x`, in points.
        """
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
        """Lines of text over the whole width, from `y` on, which moves below them."""
        for line in self._lines(text):
            self.write(line, 0, self.y + 5, NORMAL)
            self.y += 10.5

    def _lines(self, text: str) -> list[str]:
        """A text as lines that fit the width. Words that are longer than a line are cut, as in Chinese."""
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
        """Whether a text is no wider than the figure."""
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


#: The most cells per side of a map; the least weight of an arc, if others are larger; the smallest cell with a number.
LARGEST, FEWEST, NUMBERED = 256, 0.02, 14.0
#: The most cells per side of a small map, and points for each token of a line of turned words.
THUMBNAIL, PITCH = 48, 9.2


@dataclass(frozen=True)
class Layer:
    """A layer of a figure: its number, and its weights and statistics, which are computed when they are asked for.

    `row(head, query)` are the weights of one query, (keys,). `cells(head, largest)` are those of a head or of the
    "mean", pooled to at most `largest` per side. `statistics()` has a number for each head by name. With `is_share` the
    weights are |weight| / sum of |weight|.
    """

    number: int
    num_heads: int
    row: Callable[[int, int], NDArray[np.floating]]
    cells: Callable[[int | str, int], NDArray[np.floating]]
    statistics: Callable[[], dict[str, list[float]]] | None = None
    is_share: bool = False


@dataclass(frozen=True)
class Content:
    """What a figure shows: layers, tokens of queries and keys, and what is chosen of them.

    `tokens` are those of queries and of keys as they are; `queries` and `keys` are their labels, readable and cut.
    `layer` is an index into `layers`, `head` a number or "mean", and `statistic` the name of one. With `is_cross` the
    queries are another text than the keys. `gold` are reference links (query, key, sure).
    """

    title: str
    model: str
    layers: Sequence[Layer]
    tokens: tuple[Sequence[str], Sequence[str]]
    queries: Sequence[str]
    keys: Sequence[str]
    is_cross: bool
    layer: int
    head: int | str
    query: int
    statistic: str
    gold: Sequence[tuple[int, int, bool]]

    @property
    def chosen(self) -> Layer:
        return self.layers[self.layer]

    @property
    def head_label(self) -> str:
        """The layer and the head in words: "layer 2, head 1"."""
        name = "mean of its heads" if self.head == "mean" else f"head {self.head}"
        return f"layer {self.chosen.number}, {name}"


@dataclass(frozen=True)
class Drawn:
    """What a panel returns: its width in points, what it says in the caption, and the rows of numbers that it shows.

    `is_of_head` asks for the name of the head in the caption, `has_weights` for the scale of weights.
    """

    width: float
    said: str
    rows: list[Row]
    is_of_head: bool = False
    has_weights: bool = True


def head_row(content: Content) -> NDArray[np.floating]:
    """The weights of the chosen query in the chosen head, or their mean over the heads of the layer."""
    layer = content.chosen
    if content.head == "mean":
        return np.mean([layer.row(head, content.query) for head in range(layer.num_heads)], axis=0)
    return layer.row(int(content.head), content.query)


def words(paper: Paper, content: Content) -> Drawn:
    """The tokens in a line, and an arc or a line from the query to each key.

    A long text shows as many keys as there is room for, around the query.
    """
    weights = head_row(content)
    room = int(paper.width // PITCH)
    middle = 0 if content.is_cross else _query_key(content)
    first = _first(middle, room, len(content.keys))
    shown = range(first, min(first + room, len(content.keys)))
    width = (_cross_words if content.is_cross else _self_words)(paper, content, shown, weights)
    rest, outside = "", 1 - float(weights[shown.start : shown.stop].sum())
    if len(shown) < len(content.keys):
        ends = f"{shown.start} to {shown.stop - 1} of {len(content.keys)}"
        rest = f" Tokens {ends}; {outside:.0%} of the weight is outside."
    place = ("words", content.chosen.number, content.head, "weight")
    query, keys = (content.query, content.tokens[0][content.query]), content.tokens[1]
    rows: list[Row] = [(*place, *query, j, keys[j], float(weights[j])) for j in shown]
    said = f"What “{content.queries[content.query]}” attends to; a thicker arc is a larger weight.{rest}"
    return Drawn(width, said, rows, is_of_head=True)


def _first(middle: int, room: int, count: int) -> int:
    """The first of `room` tokens around the token `middle`, of `count` in all."""
    return max(0, min(middle - room // 2, count - room))


@dataclass(frozen=True)
class Line:
    """Words in a line, from the left edge, in points: their middles, widths and height.

    They are turned if the line has no room for them.
    """

    middles: list[float]
    widths: list[float]
    height: float
    is_turned: bool

    @staticmethod
    def of(paper: Paper, labels: Sequence[str]) -> Line:
        """The line of some words, with a margin around each; turned words have columns of equal width."""
        widths = [paper.text_width(text, NORMAL, bold=True) + 5 for text in labels]
        is_turned = sum(widths) > paper.width
        if is_turned:
            widths = [min(paper.width / len(labels), 16.0)] * len(labels)
        ends = np.cumsum(widths)
        middles = [float(end - width / 2) for end, width in zip(ends, widths, strict=True)]
        return Line(middles, widths, paper.widest(labels, NORMAL) + 6 if is_turned else 13.0, is_turned)

    @property
    def end(self) -> float:
        """Where the last word ends."""
        return self.middles[-1] + self.widths[-1] / 2

    def draw(self, paper: Paper, labels: Sequence[str], weights: Sequence[float] | None, chosen: int | None) -> None:
        """Draw the words from `paper.y` on, each on the color of its weight, the `chosen` one bold and with a frame.

        `weights` has one for each word; None without colors.
        """
        for at, (text, x, width) in enumerate(zip(labels, self.middles, self.widths, strict=True)):
            place = 0.0 if weights is None else float(paper.scale.place(np.array([weights[at]]))[0])
            look = {"edgecolor": INK if at == chosen else "none", "linewidth": 1}
            fill = {"fill": True, "facecolor": paper.color(place)}
            paper.frame(x - width / 2 + 0.3, paper.y, width - 0.6, self.height, **look, **fill)
            style = {"weight": "bold" if at == chosen else "normal", "color": paper.text_color(place)}
            if self.is_turned:
                paper.write(text, x, paper.y + 3, NORMAL, "right", rotation=90, **style)
            else:
                paper.write(text, x, paper.y + self.height / 2, NORMAL, "center", **style)


def _self_words(paper: Paper, content: Content, shown: range, weights: NDArray[np.floating]) -> float:
    """Words of one text in a line, and an arc from the query to each of the `shown` keys; returns where the line ends.

    Arcs of far words rise higher (by the root of the distance). The strongest has its weight above it. Large weights
    are drawn last, on top.
    """
    labels, near = [content.keys[j] for j in shown], weights[shown.start : shown.stop]
    line, here = Line.of(paper, labels), _query_key(content) - shown.start
    least = _least_arc(near)
    reach = max([abs(x - line.middles[here]) for x, w in zip(line.middles, near, strict=True) if w >= least] or [1.0])
    top = min(56.0, max(22.0, reach / 2)) + 10
    base = paper.y + top
    strongest = int(near.argmax())
    for j in np.argsort(near):
        weight, distance = float(near[j]), abs(line.middles[j] - line.middles[here])
        if weight < least:
            continue
        rise = 15.0 if j == here else 10 + (top - 18) * (distance / max(reach, 1.0)) ** 0.5
        _arc(paper, line.middles[here], line.middles[j], base, rise, weight)
        if j == strongest:
            middle = (line.middles[here] + line.middles[j]) / 2
            ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
            said = short(weight) if weight >= 0.005 else f"{weight:.2g}"
            paper.write(said, middle, base - rise - 6, anchor="center", bbox=ground)
    paper.y = base
    line.draw(paper, labels, near.tolist(), here)
    paper.y += line.height
    return line.end


def _least_arc(weights: NDArray[np.floating]) -> float:
    """The least weight that is drawn: 0.02, or a fifth of the largest where all are small."""
    return max(1e-9, min(FEWEST, float(weights.max()) / 5))


def _query_key(content: Content) -> int:
    """The key that is the chosen query: the queries are the last keys."""
    return len(content.keys) - len(content.queries) + content.query


def _arc(paper: Paper, start: float, end: float, base: float, rise: float, weight: float) -> None:
    """An arc above `base` from the place `start` of a line to `end`, all in points from the left and from the top.

    It is `rise` points high; a Bezier curve reaches 3/4 of its control points, so they are 4/3 as high. A word's arc to
    itself is a loop. The color is that of `weight`.
    """
    if start == end:
        start, end = start - 3, end + 3
    control = base - rise * 1.33
    spread = 6 if abs(start - end) == 6 and rise == 15.0 else 0
    points = [(start, base), (start - spread, control), (end + spread, control), (end, base)]
    _stroke(paper, points, [1, 4, 4, 4], weight)


def _stroke(paper: Paper, points: list[tuple[float, float]], codes: list[int], weight: float) -> None:
    """A path of matplotlib whose color, width and opacity grow with the weight; `codes` are those of its points."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    look = {"edgecolor": paper.color(1 - 0.45 * (1 - weight)), "linewidth": 0.4 + 2.6 * weight}
    path = Path(points, codes)
    paper.axes.add_patch(PathPatch(path, facecolor="none", alpha=0.4 + 0.6 * weight**0.5, gid="arc", **look))


def _cross_words(paper: Paper, content: Content, shown: range, weights: NDArray[np.floating]) -> float:
    """Queries above, keys below, a line from the chosen query for each weight; returns where the longer line ends."""
    room = int(paper.width // PITCH)
    first = _first(content.query, room, len(content.queries))
    own = content.queries[first : first + room]
    keys, here = [content.keys[j] for j in shown], content.query - first
    upper, lower = Line.of(paper, own), Line.of(paper, keys)
    upper.draw(paper, own, None, here)
    top = paper.y + upper.height
    for j, x in zip(shown, lower.middles, strict=True):
        if weights[j] >= _least_arc(weights[shown.start : shown.stop]):
            _stroke(paper, [(upper.middles[here], top), (x, top + 40)], [1, 2], float(weights[j]))
    paper.y = top + 40
    lower.draw(paper, keys, weights[shown.start : shown.stop].tolist(), None)
    paper.y += lower.height
    return max(upper.end, lower.end)


def map_of_head(paper: Paper, content: Content) -> Drawn:
    """The weights of one head, with tokens beside its rows and below its columns."""
    cells = content.chosen.cells(content.head, LARGEST)
    rows, cols = cells.shape
    queries, keys = labels_of_cells(content.queries, rows), labels_of_cells(content.keys, cols)
    left = 15 + paper.widest(queries)
    cell = min(WIDEST, (paper.width - left - 1) / cols, (paper.tallest - 60) / rows)
    paper.cells(cells, left, paper.y, cell)
    is_whole = cells.shape == (len(content.queries), len(content.keys))
    if cell >= NUMBERED and is_whole:
        _numbers(paper, cells, left, cell)
    paper.tokens(queries, left, paper.y, cell, below=False)
    low = paper.y + rows * cell
    paper.tokens(keys, left, low, cell, below=True)
    names = ("query (target)", "key (source)") if content.is_cross else ("query", "key")
    paper.write(names[0], 4, paper.y + rows * cell / 2, anchor="center", rotation=90, color=SOFT)
    paper.y = low + paper.widest(keys[:: every(cell)]) + 10
    paper.write(names[1], left + cols * cell / 2, paper.y, anchor="center", color=SOFT)
    paper.y += 5
    what = ("target word", "source word") if content.is_cross else ("query", "key")
    pooled = "" if is_whole else " A cell is a sum over keys, averaged over queries."
    said = f"Each row is a {what[0]} and shows what it attends to; each column is a {what[1]}.{pooled}"
    return Drawn(left + cols * cell, said, table("map", content, content.chosen.number, content.head, cells), True)


def _numbers(paper: Paper, cells: NDArray[np.floating], x: float, cell: float) -> None:
    """The weight in each cell, at `x` and `paper.y`."""
    for (i, j), value in np.ndenumerate(cells):
        color = paper.text_color(float(paper.scale.place(np.array([value]))[0]))
        paper.write(short(float(value)), x + (j + 0.5) * cell, paper.y + (i + 0.5) * cell, anchor="center", color=color)


def short(weight: float) -> str:
    """Two digits without a zero before them; nothing for less than 0.005.

    >>> short(0.714), short(0.999), short(0.001)
    ('.71', '1', '')
    """
    return "1" if weight >= 0.995 else f"{weight:.2f}"[1:] if weight >= 0.005 else ""


def heads(paper: Paper, content: Content) -> Drawn:
    """A small map of each head: a row for each layer, a column for each head.

    Numbers of heads and layers are left out where they would touch.
    """
    columns = max(layer.num_heads for layer in content.layers)
    left = 12 + paper.widest([str(layer.number) for layer in content.layers])
    pitch = min(44.0, (paper.width - left) / columns, (paper.tallest - 12) / len(content.layers))
    step, rows = max(1, int(np.ceil(10 / pitch))), []
    for head in range(0, columns, step):
        paper.write(str(head), left + (head + 0.46) * pitch, paper.y + 4, anchor="center")
    paper.y += 10
    for at, layer in enumerate(content.layers):
        if at % step == 0:
            paper.write(str(layer.number), left - 3, paper.y + 0.46 * pitch, anchor="right")
        for head in range(layer.num_heads):
            cells = layer.cells(head, THUMBNAIL)
            _thumbnail(paper, cells, left + head * pitch, 0.92 * pitch)
            rows += table("heads", content, layer.number, head, cells)
        paper.y += pitch
    return Drawn(left + columns * pitch, "Each picture is one head, a row per layer.", rows)


def _thumbnail(paper: Paper, cells: NDArray[np.floating], x: float, side: float) -> None:
    """A small map of one head as a picture in a square, at `x` and `paper.y`."""
    paper.picture(np.ma.masked_invalid(paper.scale.place(cells)), x, paper.y, side, side)
    paper.frame(x, paper.y, side, side, linewidth=0.4, gid="head")


def alignment(paper: Paper, content: Content) -> Drawn:
    """The mean of the heads of every layer, side by side, and the gold links outlined.

    Only the first row of maps has the keys above it, and only the first map of a row the queries. The first layers are
    shown, as many as fit `paper.tallest`.
    """
    grid = Grid.of(paper, content)
    shown = content.layers[: grid.columns * max(1, int((paper.tallest - grid.above) // (grid.tall + 16)))]
    rows: list[Row] = []
    for n, layer in enumerate(shown):
        x, y = grid.corner(n, paper.y)
        cells = layer.cells("mean", max(len(content.keys), len(content.queries)))
        paper.cells(cells, x, y, grid.cell)
        title = f"layer {layer.number}" if len(content.layers) > 1 else "mean of heads"
        paper.write(title, x, y - (grid.above + 5 if n < grid.columns else 6), weight="bold")
        for j, text in enumerate(content.keys if n < grid.columns else ()):
            paper.write(text, x + (j + 0.5) * grid.cell, y - 3, anchor="left", rotation=90)
        if n % grid.columns == 0:
            paper.tokens(content.queries, x, y, grid.cell, below=False)
        _outline(paper, content, x, y, grid.cell)
        rows += table("alignment", content, layer.number, "mean", cells)
    width, paper.y = grid.corner(grid.columns - 1, 0)[0] + grid.wide, grid.corner(len(shown) - 1, paper.y)[1]
    paper.y += grid.tall + 4
    missing = f" The first {len(shown)} of {len(content.layers)} are shown." if len(shown) < len(content.layers) else ""
    gold = " Outlined: gold links; a dashed outline is a possible link." if content.gold else ""
    what = "a target word, each column a source word" if content.is_cross else "a query, each column a key"
    return Drawn(width, f"The mean of the heads of a layer. Each row is {what}.{gold}{missing}", rows)


@dataclass(frozen=True)
class Grid:
    """Maps side by side, in points: room for the labels at the left and above, a cell, the size of a map.

    A map is `wide` x `tall`, and there are `columns` maps in a row.
    """

    left: float
    above: float
    columns: int
    cell: float
    wide: float
    tall: float

    @staticmethod
    def of(paper: Paper, content: Content) -> Grid:
        """The grid with as many maps in a row as have room, with cells of at most 14 points.

        A text whose cells would be smaller than a letter is refused.
        """
        left, above, num_keys = paper.widest(content.queries) + 4, paper.widest(content.keys) + 4, len(content.keys)
        columns = int((paper.width - left + 10) // (num_keys * (SMALL + 0.8) + 10))
        columns = max(1, min(len(content.layers), columns))
        cell = min(14.0, ((paper.width - left + 10) / columns - 10) / num_keys)
        if cell < SMALL:
            raise RegardError(
                f"figure: the panel alignment has no room for {num_keys} keys in {paper.width / 72 * 2.54:.3g} cm. "
                "Take a larger width=, or the panel 'map', which pools long texts."
            )
        return Grid(left, above, columns, cell, cell * num_keys, cell * len(content.queries))

    def corner(self, number: int, top: float) -> tuple[float, float]:
        """The top left of the cells of map `number`, in a grid that begins at `top`."""
        row, column = divmod(number, self.columns)
        return self.left + column * (self.wide + 10), top + self.above + 12 + row * (self.tall + 16)


def _outline(paper: Paper, content: Content, x: float, y: float, cell: float) -> None:
    """Frames around the cells of the gold links, with a thin white frame inside of each; possible links are dashed.

    (x, y) is the top left of the map, `cell` the side of a cell.
    """
    for i, j, is_sure in content.gold:
        style = {"edgecolor": GOLD, "linewidth": 1, "linestyle": "-" if is_sure else (0, (2, 1.4)), "gid": "gold"}
        halo = {"edgecolor": "white", "linewidth": 0.5, "gid": "halo"}  # so that it is visible on every color
        for inset, look in ((1.2, halo), (0.5, style)):
            paper.frame(x + j * cell + inset, y + i * cell + inset, cell - 2 * inset, cell - 2 * inset, **look)


def statistics(paper: Paper, content: Content) -> Drawn:
    """One statistic of each head as a number on its color: a row for each layer, a column for each head."""
    name = content.statistic
    values = [_statistic(layer, name) for layer in content.layers]
    left = 22 + paper.widest([str(layer.number) for layer in content.layers])
    ends = min(map(min, values)), max(map(max, values))
    right = _values(paper, content, values, left, ends)
    paper.write("head", (left + right) / 2, paper.y + 6, anchor="center", color=SOFT)
    paper.y += 14
    right = max(right, paper.ramp([(0, f"{ends[0]:.2g}"), (1, f"{ends[1]:.2g}")], name, x=left))
    rows: list[Row] = [
        ("statistics", layer.number, head, name, "", "", "", "", value)
        for layer, row in zip(content.layers, values, strict=True)
        for head, value in enumerate(row)
    ]
    meaning = next((statistic.meaning for statistic in STATISTICS if statistic.name == name), "")
    return Drawn(
        right, f"{name[0].upper()}{name[1:]} of every head{f': {meaning}' if meaning else ''}.", rows, has_weights=False
    )


def _values(paper: Paper, content: Content, values: list[list[float]], left: float, ends: tuple[float, float]) -> float:
    """The cells of a statistic from `paper.y` on, which moves below them; returns where they end, in points.

    `values` has a row for each layer and a number for each head. The cells begin `left` points from the left. `ends`
    are the least and the largest value, the ends of the colors.
    """
    columns = max(map(len, values))
    cell, tall = min(32.0, (paper.width - left) / columns), min(14.0, (paper.tallest - 60) / len(values))
    for head in range(0, columns, max(1, int(np.ceil(10 / cell)))):
        paper.write(str(head), left + (head + 0.5) * cell, paper.y + 4, anchor="center")
    top, step = paper.y + 10, max(1, int(np.ceil(8 / tall)))
    for at, (layer, row) in enumerate(zip(content.layers, values, strict=True)):
        y = top + at * tall
        if at % step == 0:
            paper.write(str(layer.number), left - 4, y + tall / 2, anchor="right")
        for head, value in enumerate(row):
            _value(paper, (left + head * cell, y, cell - 0.6, tall - 0.6), value, ends)
    paper.y = top + len(values) * tall
    paper.write("layer", 4, (top + paper.y) / 2, anchor="center", rotation=90, color=SOFT)
    return left + columns * cell


def _statistic(layer: Layer, name: str) -> list[float]:
    """One statistic of a layer, a number for each head; unknown names are refused."""
    if layer.statistics is None:
        raise RegardError(
            "figure: the panel statistics needs an AttentionMap, the result of rg.watch, or a TextReading; "
            "an array of weights has no statistics."
        )
    values = layer.statistics()
    if name not in values:
        raise RegardError(f"figure: there is no statistic {name!r}. {nearest(name, values)}")
    return values[name]


def _value(paper: Paper, box: tuple[float, float, float, float], value: float, ends: tuple[float, float]) -> None:
    """One cell of a statistic: its color, and its number if the `box` (x, y, width, height) in points has room.

    `ends` are the least and the largest value. The least has the place 0.004, the lightest color that is not white.
    """
    least, most = ends
    place = max((value - least) / ((most - least) or 1.0), 0.004)
    paper.frame(*box, fill=True, facecolor=paper.color(place), edgecolor="none", gid="cell")
    if box[2] >= 16.4 and box[3] >= 7.9:
        color, digits = paper.text_color(place), 0 if most >= 10 else 2
        paper.write(f"{value:.{digits}f}", box[0] + box[2] / 2, box[1] + box[3] / 2, anchor="center", color=color)


def table(panel: str, content: Content, number: int, head: int | str, cells: NDArray[np.floating]) -> list[Row]:
    """A row for each cell of a map, (rows, columns). A cell of several tokens names the first and the last of them.

    `panel` is the name of the panel, `number` that of the layer.
    """
    rows, cols = cells.shape
    quantity = "weight" if (rows, cols) == (len(content.queries), len(content.keys)) else "weight of a cell"
    queries, keys = (named_cells(side, count) for side, count in zip(content.tokens, cells.shape, strict=True))
    return [
        (panel, number, head, quantity, *queries[i], *keys[j], float(value)) for (i, j), value in np.ndenumerate(cells)
    ]


def named_cells(labels: Sequence[str], count: int) -> list[tuple[int | str, str]]:
    """The tokens of each of `count` cells.

    >>> named_cells(["a", "b", "c"], 3)[1], named_cells(["a", "b", "c", "d"], 2)[1]
    ((1, 'b'), ('2-3', 'c … d'))
    """
    ends = [(-(-at * len(labels) // count), -(-(at + 1) * len(labels) // count) - 1) for at in range(count)]
    return [
        (first, labels[first]) if first == last else (f"{first}-{last}", f"{labels[first]} … {labels[last]}")
        for first, last in ends
    ]


def labels_of_cells(labels: Sequence[str], count: int) -> list[str]:
    """A label for each cell: its token, or its first token with its number."""
    if len(labels) == count:
        return list(labels)
    firsts = [-(-at * len(labels) // count) for at in range(count)]
    return [f"{labels[first][:9]} {first}" for first in firsts]


#: The panels by name.
PANELS: dict[str, Callable[[Paper, Content], Any]] = {
    "words": words,
    "map": map_of_head,
    "heads": heads,
    "alignment": alignment,
    "statistics": statistics,
}
