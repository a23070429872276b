"""From weights to colors: the ramp of colors, and the scales of the page (linear, square root, logarithmic).

The figures, the catalog and the page (frontend/src/ramp.json) have the same ramp. Its lightness (CIELAB L*) falls
evenly from 97 to 12, so it can be read in gray and with color blindness. On a dark background the page
reverses it, so larger weights are lighter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

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
    return "black" if luminance > 0.179 else "white"  # where both have the same contrast, as WCAG defines it


#: The scales of `WeightScale`.
ScaleName = Literal["linear", "sqrt", "log"]


@dataclass(frozen=True)
class WeightScale:
    """Places weights between 0 and 1. The logarithmic scale ends at a tenth of a uniform weight, or lower.

    `name` is that of the scale, and a uniform weight is 1 / `num_keys`.

    >>> WeightScale("sqrt", 14).place(np.array([0.0, 0.25, 1.0])).tolist()
    [0.0, 0.5, 1.0]
    """

    name: ScaleName
    num_keys: int

    @property
    def decades(self) -> int:
        """The powers of ten of the logarithmic scale, at least 2: down to a tenth of the weight 1 / `num_keys`, rounded
        down.
        """
        return max(2, math.ceil(math.log10(max(self.num_keys, 2))) + 1)

    def place(self, weights: NDArray[np.floating]) -> NDArray[np.floating]:
        """Places from 0 to 1 for weights, which are cut to 0 to 1.

        Only the weight 0 has the place 0: on the logarithmic scale every smaller weight has 1e-6, so that it is not
        blank.
        """
        weights = np.clip(weights, 0, 1)
        if self.name == "linear":
            return weights
        if self.name == "sqrt":
            return np.sqrt(weights)
        logarithms = np.log10(weights, out=np.full_like(weights, -np.inf), where=weights > 0)
        return np.where(weights > 0, np.maximum(1 + logarithms / self.decades, 1e-6), 0)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Where the ticks of a legend are, and what they say."""
        values = [0, 0.25, 0.5, 0.75, 1] if self.name == "linear" else [0, 0.01, 0.1, 0.25, 0.5, 1]
        if self.name == "log":
            values = [10.0**-n for n in range(self.decades, -1, -1)]
        places = self.place(np.array(values, dtype=float)).tolist()
        return [(place, f"{value:g}") for place, value in zip(places, values, strict=True)]

    @property
    def said(self) -> str:
        """The scale in a sentence."""
        return {"linear": "a linear scale", "sqrt": "a square-root scale", "log": "a logarithmic scale"}[self.name]

    @property
    def label(self) -> str:
        """The scale in a legend."""
        return {"linear": "linear", "sqrt": "square root", "log": "logarithmic"}[self.name]
