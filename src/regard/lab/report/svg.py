"""Figures as SVG, for the light and the dark theme, inside a page or as a file."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, replace
from typing import Any
from xml.sax.saxutils import escape

#: A placeholder for the color of the text while matplotlib draws.
INK = "#010203"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif"
#: Colors that are distinct with color blindness (Okabe and Ito). The first is the color of the text.
COLORS = (INK, "#1b80c4", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8f8a2c", "#7a6fd0")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_LIGHT_OR_DARK = (
    "<style>svg{color:#1d2329;background:#fcfbf8}"
    "@media (prefers-color-scheme:dark){svg{color:#e6e3dc;background:#14171a}}</style>"
)


@dataclass(frozen=True)
class Figure:
    """A figure: `svg` is the whole element with title and description, in the color of the text around it.

    `look` is a sentence that says what to see in it; small figures have none.
    """

    name: str
    title: str
    description: str
    svg: str
    look: str = ""

    @property
    def alone(self) -> str:
        """The content of an SVG file, with the colors of the light and the dark theme."""
        opening = self.svg.index(">") + 1
        head = '<?xml version="1.0" encoding="utf-8"?>\n'
        return head + self.svg[:opening] + _LIGHT_OR_DARK + self.svg[opening:] + "\n"


def element(name: str, title: str, description: str, size: tuple[float, float], body: str) -> Figure:
    """The SVG element of a figure. The coordinates of `body` go from 0 to `size`."""
    width, height = (f"{side:g}" for side in size)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" role="img" '
        f'aria-labelledby="{name}-title {name}-description" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">'
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-description">{escape(description)}</desc>'
    )
    return Figure(name, title, description, f"{head}{body}</svg>")


def drawing(figure: Any, name: str, title: str, description: str, look: str) -> Figure:
    """A matplotlib figure as an SVG element: text stays text, ids are unique, and the result is deterministic.

    The other arguments are fields of `Figure`; `name` begins the ids.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    from regard.drawing.canvas import laid_out

    buffer = io.StringIO()
    FigureCanvasSVG(figure).figure.dpi = 72  # the layout measures texts as the file has them
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}), laid_out(figure):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    view_box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    assert view_box, "matplotlib writes a viewBox"
    body = re.sub(
        r"<metadata>.*?</metadata>", "", text[text.index(">", view_box.end()) + 1 : text.rindex("</svg>")], flags=re.S
    )
    # figures of one page need different ids; the links to ids are renamed with them
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", body)
    body = re.sub(r"(font: [^;\"]*?px) [^;\"]*", rf"\g<1> {FONT}", body)
    body = re.sub(r"\n\s*", "\n", body.replace(INK, "currentColor"))
    size = float(view_box[1]) / 0.75, float(view_box[2]) / 0.75  # pixels; matplotlib writes points
    return replace(element(name, title, description, size, _scaled(body)), look=look)


def _scaled(body: str) -> str:
    """Scale points of 1/72 inch to pixels of 1/96 inch."""
    return f'<g transform="scale(1.3333333)">{body}</g>'


def canvas(width: float, height: float) -> tuple[Any, Any]:
    """A matplotlib figure of a size in inches, and its axes, in the style of the report."""
    from regard.drawing.canvas import new_figure

    figure = new_figure(width, height)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, labelsize=9)
    axes.xaxis.label.set(color=INK, size=9.5)
    axes.yaxis.label.set(color=INK, size=9.5)
    axes.grid(axis="y", color=INK, alpha=0.12, linewidth=0.7)
    axes.set_axisbelow(True)
    return figure, axes
