"""Figures of matplotlib that a notebook shows and that no global state holds. This file alone imports matplotlib."""

from __future__ import annotations

import warnings
from io import BytesIO
from typing import Any

from matplotlib import rcParams
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager

#: Fonts for the scripts that matplotlib's own font lacks, as systems name them. The installed ones are used.
FONTS = (
    *("Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Sans SC", "Noto Sans JP", "Noto Sans KR", "WenQuanYi Zen Hei"),
    *("Hiragino Sans", "PingFang SC", "Microsoft YaHei", "Malgun Gothic", "Arial Unicode MS"),
    *("Noto Sans Arabic", "Noto Naskh Arabic", "Noto Sans Hebrew", "Noto Sans Devanagari", "Noto Sans Thai"),
    *("Noto Sans Symbols", "Noto Sans Symbols2", "Noto Emoji", "Segoe UI Emoji"),
)
DPI = 110


class NotebookFigure(Figure):
    """A figure that shows itself as the result of a notebook's cell. pyplot does not know it."""

    def _repr_png_(self) -> bytes:
        return png(self)


def new_figure(width: float, height: float) -> NotebookFigure:
    """An empty figure of a size in inches."""
    figure = NotebookFigure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Any) -> bytes:
    """The figure as a PNG. A character that no font has becomes a box, and that is no reason for a warning."""
    content = BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")
        figure.savefig(content, format="png", dpi=DPI)
    return content.getvalue()


def fonts() -> list[str]:
    """The fonts of a label, in the order in which a character is looked up."""
    installed = {font.name for font in fontManager.ttflist}
    return [*rcParams["font.family"], *(name for name in FONTS if name in installed)]
