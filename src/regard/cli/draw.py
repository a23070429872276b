"""Draws a map of weights as characters."""

from __future__ import annotations

import torch
from rich.text import Text
from torch import Tensor

from regard.maps import AttentionMap

#: Characters from weight 0 to the strongest weight.
SHADES = " ░▒▓█"
#: The character of a pair that the mask forbids.
FORBIDDEN = "·"
#: The most rows and columns. A cell is two characters wide, so it is about square.
LARGEST = 32


def drawn_size(weights: AttentionMap, columns: int) -> tuple[int, int]:
    """Numbers of rows and columns of weights that `columns` characters have room for."""
    largest = max(1, min(LARGEST, columns // 2))
    return min(weights.shape[2], largest), min(weights.shape[3], largest)


def draw(weights: AttentionMap, columns: int = 2 * LARGEST, batch: int = 0, head: int = 0) -> Text:
    """The first rows and columns of one head as shaded cells. A darker cell is a larger weight; a dot is forbidden."""
    size = drawn_size(weights, columns)
    tile = weights.tile(batch, head, slice(0, size[0]), slice(0, size[1]))[0, 0]
    allowed = _allowed(weights, batch, head, size)
    strongest = float(tile.max()) or 1.0
    picture = Text(no_wrap=True)
    for row, allowed_row in zip(tile.tolist(), allowed.tolist(), strict=True):
        pairs = zip(row, allowed_row, strict=True)
        cells = [_shade(weight / strongest) if is_allowed else FORBIDDEN + " " for weight, is_allowed in pairs]
        picture.append("".join(cells).rstrip(" ") + "\n")
    picture.append(f"█ {strongest:.2f}   {SHADES[1]} {strongest / 25:.2f}   {FORBIDDEN} masked", "dim")
    return picture


def _shade(share: float) -> str:
    """The shade of the square root of a share, so that small weights are visible."""
    return SHADES[min(4, round(4 * max(share, 0.0) ** 0.5))] * 2


def _allowed(weights: AttentionMap, batch: int, head: int, size: tuple[int, int]) -> Tensor:
    mask = weights.attention.mask
    if mask is None:
        return torch.ones(size, dtype=torch.bool)
    head_map = weights.select(torch.tensor([batch]), torch.tensor([head]))
    grid = head_map.grid.tile(slice(0, size[0]), slice(0, size[1]))
    return mask.allowed(grid).expand(1, 1, *size)[0, 0]
