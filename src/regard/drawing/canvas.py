"""Figures of matplotlib that a notebook shows and that no global state holds. This file alone imports matplotlib."""

from __future__ import annotations

import csv
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

from matplotlib import rc_context, rcParams
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, fontManager
from numpy import linspace

from regard.base.errors import RegardError
from regard.base.whole_files import write_whole
from regard.drawing.color import colormap

#: What a figure can be saved as.
KINDS = ("pdf", "svg", "png", "csv")
#: Fonts for the scripts that matplotlib's own font lacks, as systems name them. The installed ones are used.
FONTS = (
    *("Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Sans SC", "Noto Sans JP", "Noto Sans KR", "WenQuanYi Zen Hei"),
    *("Hiragino Sans", "PingFang SC", "Microsoft YaHei", "Malgun Gothic", "Arial Unicode MS"),
    *("Noto Sans Arabic", "Noto Naskh Arabic", "Noto Sans Hebrew", "Noto Sans Devanagari", "Noto Sans Thai"),
    *("Noto Sans Symbols", "Noto Sans Symbols2", "Noto Emoji", "Segoe UI Emoji"),
)
#: Fonts of papers, in the order of choice; matplotlib's own if none of them is installed.
PAPER_FONTS = ("Helvetica", "Arial", "Liberation Sans", "Nimbus Sans")
#: Backends of matplotlib that have no window.
FILES_ONLY = ("agg", "cairo", "pdf", "pgf", "ps", "svg", "template")
#: Dots to an inch on a screen and in print.
DPI, PRINT_DPI = 110, 300
#: Fonts inside of a PDF as TrueType, text in an SVG as text.
FONT_OPTIONS: Any = {"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "regard"}
#: Without these, a figure has no layout engine but its own.
NO_LAYOUT: Any = {"figure.autolayout": False, "figure.constrained_layout.use": False}


class NotebookFigure(Figure):
    """A figure that shows itself as the result of a notebook's cell. pyplot does not know it."""

    def _repr_png_(self) -> bytes:
        return png(self)


class PaperFigure(NotebookFigure):
    """A figure at its size in a paper. `caption` says what it shows, and `rows` are the numbers that it shows: the
    lines of the .csv, the header first.
    """

    caption: str = ""
    rows: Sequence[Sequence[str | int | float]] = ()

    def save(self, path: str | os.PathLike[str], *, transparent: bool = False) -> Path:
        """Write a .pdf or .svg (vectors), a .png (300 dots per inch) or a .csv (`rows`), completely or not at all."""
        path = Path(path)
        kind = path.suffix.lower().removeprefix(".")
        if kind not in KINDS:
            raise RegardError(
                f"figure.save({str(path)!r}): the name must end with {', '.join(f'.{kind}' for kind in KINDS[:-1])} or "
                f".{KINDS[-1]}, which chooses the format."
            )
        content = self._csv() if kind == "csv" else self._drawn(kind, transparent)
        write_whole(path, content)
        return path

    def _drawn(self, kind: str, transparent: bool) -> bytes:
        """The file as bytes. Without a date, so that the same figure gives the same bytes."""
        about = {"Title": self.caption}
        metadata = about if kind == "png" else about | {"Date" if kind == "svg" else "CreationDate": None}
        return saved(self, kind, dpi=PRINT_DPI, transparent=transparent, metadata=metadata)

    def _csv(self) -> bytes:
        """The rows as CSV in UTF-8. The mark at the start of the file (utf-8-sig) tells Excel the encoding."""
        text = StringIO(newline="")
        csv.writer(text).writerows(self.rows)
        return text.getvalue().encode("utf-8-sig", "replace")


def paper_figure(width: float) -> PaperFigure:
    """An empty figure of a width in inches; `Paper.finish` sets its height when all is drawn."""
    figure = PaperFigure(figsize=(width, 1.0))
    FigureCanvasAgg(figure)
    return figure


def new_figure(width: float, height: float) -> NotebookFigure:
    """An empty figure of a size in inches."""
    figure = NotebookFigure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def text_width(figure: Figure, text: str, size: float, bold: bool = False) -> float:
    """The width of a text in points, at a size of letters in points.

    Letters are measured ten times as large, because those of a screen have whole pixels.
    """
    font = FontProperties(family=paper_fonts(), size=10 * size, weight="bold" if bold else "normal")
    with boxes_for_missing_glyphs():
        width, _, _ = figure.canvas.get_renderer().get_text_width_height_descent(text, font, False)  # pyright: ignore
    return width * 7.2 / figure.dpi  # pixels to points (72 an inch), and a tenth


@cache
def paper_colors() -> Any:
    """The ramp of the page on white: 0 is white, and NaN is gray."""
    ramp = colormap()
    return ListedColormap([(1, 1, 1, 1), *ramp(linspace(0, 1, 255))], name="regard paper").with_extremes(bad="0.8")


def color_of(place: float) -> str:
    """The color of a place of the scale, from 0 to 1."""
    return to_hex(paper_colors()(place))


def paper_fonts() -> list[str]:
    """The fonts of a figure for a paper, in the order in which a character is looked up."""
    return [*(name for name in PAPER_FONTS if name in _installed()), *fonts()]


def show_or_save(path: str | os.PathLike[str]) -> None:
    """Show the figures of pyplot. Where there is no window, write the current one to `path` and print its name."""
    from matplotlib import get_backend, pyplot

    if not pyplot.get_fignums():
        raise RegardError(
            "show_or_save: pyplot has no figure. A figure of rg.heatmap without axes= is not one of pyplot's: save it "
            f"by figure.savefig({str(path)!r}), or draw into pyplot's by rg.heatmap(..., axes=pyplot.gca())."
        )
    figure, kind = pyplot.gcf(), Path(path).suffix[1:].lower() or "png"
    if kind not in (kinds := figure.canvas.get_supported_filetypes()):
        raise RegardError(
            f"show_or_save({str(path)!r}): a picture has one of these endings: {', '.join(sorted(kinds))}."
        )
    if get_backend().lower() in FILES_ONLY:
        write_whole(Path(path), saved(figure, kind, dpi=DPI))
        print(f"The picture is in {path}: there is no window to show it.", file=sys.stderr)
    else:
        pyplot.show()


def png(figure: Any) -> bytes:
    """A figure of matplotlib as a PNG for a screen."""
    return saved(figure, "png", dpi=DPI)


def saved(figure: Any, kind: str, **options: Any) -> bytes:
    """A figure of matplotlib as the bytes of a file of this `kind`, such as "png". `options` are those of `savefig`."""
    content = BytesIO()
    with boxes_for_missing_glyphs(), rc_context(FONT_OPTIONS | NO_LAYOUT), laid_out(figure):
        figure.savefig(content, format=kind, **options)
    return content.getvalue()


@contextmanager
def laid_out(figure: Any) -> Iterator[None]:
    """A block in which the layout of a figure is already computed, so savefig does not draw it once more to compute it.

    The layout engine is put back after the block.
    """
    engine = figure.get_layout_engine()
    if engine is None:
        yield
        return
    engine.execute(figure)
    figure.set_layout_engine(None)  # "none" would leave an engine behind color bars, and savefig draws twice for any
    try:
        yield
    finally:
        figure.set_layout_engine(engine)


@contextmanager
def boxes_for_missing_glyphs() -> Iterator[None]:
    """A character that no font has becomes a box, and that is no reason for a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")
        yield


@cache
def _installed() -> frozenset[str]:
    """The names of the installed fonts."""
    return frozenset(font.name for font in fontManager.ttflist)


def fonts() -> list[str]:
    """The fonts of a label, in the order in which a character is looked up."""
    return [*rcParams["font.family"], *(name for name in FONTS if name in _installed())]
