"""Colors by their definitions: the ramp by linear interpolation, luminance and contrast of WCAG, CIELAB, and color
blindness by the matrices of Machado, Oliveira and Fernandes (2009), severity 1. The oracle of the page's colors."""

from __future__ import annotations

import json
import re
from math import ceil, log10
from pathlib import Path

import numpy as np

SOURCES = Path(__file__).parents[2] / "frontend" / "src"
STEPS = 254
BLINDNESS = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]


def rgb(color):
    """Three numbers from 0 to 255, of "#1d2329", "rgb(1, 2, 3)" or "rgba(...)"."""
    if color.startswith("#"):
        return np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)], float)
    return np.array([float(part) for part in re.findall(r"[\d.]+", color)[:3]])


def stops():
    return np.array([rgb(color) for color in json.loads((SOURCES / "ramp.json").read_text())])


def variables(is_dark=False):
    """The colors that the style sheets name, in one theme."""
    text = (SOURCES / "style.css").read_text() + (SOURCES / "color.css").read_text()
    blocks = re.findall(r'\.regard(\[data-theme="dark"\])? \{([^{}]*?)(?=[{}&])', text)
    given = " ".join(block for dark, block in blocks if is_dark or not dark)
    return {name: rgb(color) for name, color in re.findall(r"--([a-z]+): (#\w{6});", given)}


def shares(weights, kind, length):
    """The place of weights on the ramp: from 0 to 1."""
    weights = np.clip(np.asarray(weights, float), 0, 1)
    if kind == "log":
        decades = max(2, ceil(log10(max(length, 2))) + 1)
        return np.maximum(1e-6, 1 + np.log10(np.maximum(weights, 1e-300)) / decades)
    return weights if kind == "linear" else np.sqrt(weights)


def ramp(places, is_dark=False):
    """The colors of some shares of the ramp."""
    colors = stops()[::-1] if is_dark else stops()
    places = np.round(np.asarray(places) * STEPS) / STEPS * (len(colors) - 1)
    return np.stack([np.interp(places, np.arange(len(colors)), colors[:, part]) for part in range(3)], -1)


def colors_of(weights, kind, length, is_dark=False):
    """The colors of weights; a weight of exactly 0 has the color --none."""
    weights = np.asarray(weights, float)
    drawn = ramp(shares(weights, kind, length), is_dark)
    return np.where(weights[..., None] > 0, drawn, variables(is_dark)["none"])


def linear(color):
    part = np.asarray(color, float) / 255
    return np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)


def luminance(color):
    return linear(color) @ np.array([0.2126, 0.7152, 0.0722])


def contrast(one, other):
    low, high = np.sort([luminance(one), luminance(other)], axis=0)
    return (high + 0.05) / (low + 0.05)


def lab(color):
    """CIELAB of a linear or an sRGB color, with the white of D65."""
    xyz = linear(color) @ np.array(XYZ).T / np.array([0.95047, 1.0, 1.08883])
    root = np.where(xyz > 216 / 24389, np.cbrt(np.maximum(xyz, 0)), (24389 / 27 * xyz + 16) / 116)
    x, y, z = np.moveaxis(root, -1, 0)
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], -1)


def seen_with(kind, color):
    """A color as somebody with a color blindness sees it."""
    light = np.clip(linear(color) @ np.array(BLINDNESS[kind]).T, 0, 1)
    return 255 * np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)
