"""A map of weights in characters."""

from __future__ import annotations

import torch
from rich.text import Text
from torch import Tensor

from regard.maps import AttentionMap

#: From nothing to the strongest weight of the picture.
SHADES = " ░▒▓█"
#: A pair that the mask forbids.
FORBIDDEN = "·"
#: Most rows and columns drawn; two characters wide, a cell is about square.
LARGEST = 32


def draw(weights: AttentionMap, batch: int = 0, head: int = 0) -> Text:
    """One head as shaded cells: darker is more, a dot may not be attended to."""
    size = min(weights.shape[2], LARGEST), min(weights.shape[3], LARGEST)
    tile = weights.tile(batch, head, slice(0, size[0]), slice(0, size[1]))[0, 0]
    allowed = _allowed(weights, batch, head, size)
    strongest = float(tile.max()) or 1.0
    picture = Text(no_wrap=True)
    for row, may in zip(tile.tolist(), allowed.tolist(), strict=True):
        cells = [_shade(weight / strongest) if ok else FORBIDDEN + " " for weight, ok in zip(row, may, strict=True)]
        picture.append("".join(cells).rstrip(" ") + "\n")
    picture.append(f"█ {strongest:.2f}   {SHADES[1]} {strongest / 25:.2f}   {FORBIDDEN} may not be attended to", "dim")
    return picture


def _shade(share: float) -> str:
    """Shades by the square root, so that weak links still show."""
    return SHADES[min(4, round(4 * max(share, 0.0) ** 0.5))] * 2


def _allowed(weights: AttentionMap, batch: int, head: int, size: tuple[int, int]) -> Tensor:
    mask = weights.attention.mask
    if mask is None:
        return torch.ones(size, dtype=torch.bool)
    one = weights.select(torch.tensor([batch]), torch.tensor([head]))
    grid = one.grid.tile(slice(0, size[0]), slice(0, size[1]))
    return mask.allowed(grid).expand(1, 1, *size)[0, 0]
