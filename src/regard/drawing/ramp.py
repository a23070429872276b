"""The ramp of colors for weights: the figures, the catalog and the page (frontend/src/ramp.json) have the same.

Its lightness (CIELAB L*) falls evenly from 97 to 12, so it can be read in gray and with color blindness. On a dark
ground the page turns it: more is lighter.
"""

from __future__ import annotations

from typing import Any

#: From the least weight to the largest; colors between two of them are interpolated in sRGB.
RAMP = ("#f1f8fa", "#bddded", "#8bc2e3", "#5ea5d7", "#3d87c5", "#2a6aac", "#234e8b", "#1e3563", "#151e3a")


def colormap() -> Any:
    """The ramp as a colormap of matplotlib."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("regard", RAMP)


def text_color(rgb: tuple[float, ...]) -> str:
    """Black or white, whichever is easier to read on a color: the contrast is at least 4.58 on every color.

    >>> text_color((1.0, 1.0, 1.0)), text_color((0.1, 0.2, 0.5))
    ('black', 'white')
    """
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in rgb[:3]]
    luminance = sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "black" if luminance > 0.179 else "white"
