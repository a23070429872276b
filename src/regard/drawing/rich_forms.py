"""Pictures that a notebook shows for maps and masks: SVG with its own ground, so that they can be read on any page.

They need no matplotlib and no script. A long map shows its first tokens, and the picture says so.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.base.errors import RegardError
from regard.base.html_table import NOT_XML
from regard.base.positions import Positions
from regard.base.shapes import Sizes, spread_indices
from regard.drawing.color import RAMP
from regard.maps import AttentionMap
from regard.masks import Mask
from regard.pieces.grid import Grid

#: The most tokens, layers and heads of a picture, and the most characters of its caption.
TOKENS, LAYERS, HEADS, CHARACTERS = 64, 12, 16, 400
#: The lengths at which a mask is tried, and the most numbers of its data that suggest others.
LENGTHS, SUGGESTED = (16, 64, 256, 1024), 12
#: The greatest length that is tried: the positions of a length take memory.
LONGEST = 1 << 20
#: Pixels: the side of a map where there are many, the side where there are at most FEW, and the space between two.
SIDE, LARGE, FEW, GAP = 72, 144, 4, 6
#: The first bytes of every PNG file.
PNG = b"\x89PNG\r\n\x1a\n"


class Panel(NamedTuple):
    """One picture of cells: their places (rows, columns) on the scale, from 0 to 1, and where it stands in the grid of
    panels.
    """

    places: Tensor
    row: int
    column: int


@torch.no_grad()
def maps_svg(maps: Mapping[str, AttentionMap], title: str) -> str | None:
    """The heads of some maps, a row for each map; None where a map cannot be computed."""
    shown = list(maps.items())[:LAYERS]
    try:
        panels = [panel for row, (_, weights) in enumerate(shown) for panel in _panels(weights, row)]
    except Exception:  # scores may be a user's code; without a picture the notebook prints the text
        return None
    if not panels:
        return None
    said = [title, *_left_out(maps), "dark: a large weight, square-root scale"]
    return _svg(panels, [name for name, _ in shown], "; ".join(said))


def _panels(weights: AttentionMap, row: int) -> list[Panel]:
    """A panel for each head of one map, in one row: the first text, the first heads and tokens.

    Places are square roots, as on the page. Weights with signs are |weight|, relative to the largest of the head.
    """
    B, H, I, J = weights.shape
    if 0 in (B, H, I, J):
        return []
    heads = list(range(min(H, HEADS)))
    part = weights[0, heads, : min(I, TOKENS), : min(J, TOKENS)].detach().float().cpu().nan_to_num().abs()
    part = part / part.amax((1, 2), keepdim=True).clamp_min(1e-12) if weights.is_signed else part.clamp(0, 1)
    return [Panel(cells.sqrt(), row, head) for head, cells in enumerate(part)]


def _left_out(maps: Mapping[str, AttentionMap]) -> list[str]:
    """What the picture of some maps does not show, as parts of its caption."""
    shapes = [weights.shape for weights in list(maps.values())[:LAYERS]]
    B, H, I, J = (max(sizes) for sizes in zip(*shapes, strict=True))
    counts = ((len(maps), LAYERS, "layers"), (B, 1, "texts"), (H, HEADS, "heads"))
    said = [f"the first {shown} of {count} {name}" for count, shown, name in counts if count > shown]
    return said + [f"the first {TOKENS} of {max(I, J)} tokens"] * (max(I, J) > TOKENS)


@torch.no_grad()
def mask_svg(mask: Mask) -> str | None:
    """The pairs that a mask allows, for the first length at which it is more than causal; None if it has no pairs."""
    try:
        shown, name = _best_sample(mask), repr(mask)
    except Exception:  # a predicate is a user's code
        return None
    if shown is None:
        return None
    cells, I, J = shown
    said = f"{name} for {_counted(I, J)}; dark: the query (down) may attend to the key"
    return _svg([Panel(cells, 0, 0)], [""], said)


def _best_sample(mask: Mask) -> tuple[Tensor, int, int] | None:
    """The pairs (at most 64 x 64), the number of queries and of keys for which a mask is shown.

    These are the first lengths that show more than `causal`, else the first that the mask accepts; None if there are
    none.
    """
    first = None
    for I, J in _lengths(mask):
        cells = _allowed(mask, I, J)
        if cells is None:
            continue
        if _says_more(cells, I, J):
            return cells, I, J
        first = first or (cells, I, J)
    return first


def _lengths(mask: Mask) -> Iterator[tuple[int, int]]:
    """Numbers of queries and keys that a mask may be for, the most likely first, some of them twice.

    In this order: the greatest length that the mask accepts, if its data have it; the usual lengths; other lengths of
    its data; two different ones. Sums of two sizes are tried too, because a mask may hold the sizes of two parts.
    """
    sizes = sorted(n for n in _sizes(mask) if 0 < n <= LONGEST)[-SUGGESTED:]
    own = sorted({n for n in (*sizes, *map(sum, combinations(sizes, 2))) if n <= LONGEST}, reverse=True)
    yield from ((n, n) for n in own if not _accepts(mask, n + 1, n + 1))
    yield from ((n, n) for n in (*LENGTHS, *own))
    yield from combinations(sizes, 2)


def _sizes(value: object) -> set[int]:
    """Lengths that the data of a mask suggest: the axes of its tensors, the sum and the product of its numbers."""
    if isinstance(value, Tensor):
        return set(value.shape[-2:])
    if isinstance(value, Mask):
        return set().union(*map(_sizes, vars(value).values()))
    if isinstance(value, int):
        return {int(value)}
    if not isinstance(value, tuple | list):
        return set()
    if all(isinstance(part, int) for part in value):
        return {len(value), sum(value), math.prod(value)}
    return set().union(*map(_sizes, value))


def _allowed(mask: Mask, I: int, J: int) -> Tensor | None:
    """Pairs of queries and keys as 0 and 1, spread evenly, of the first text and head.

    None if the mask is for other lengths. Fewer queries than keys are the last ones.
    """
    if not _accepts(mask, I, J):
        return None
    positions, (B, H) = Positions.aligned_to_end(I, J), mask.own_sizes()
    whole = Grid.whole(positions, B or 1, H or 1, I)
    grid = replace(whole, head=whole.head[:1]).entries(slice(0, 1))
    rows, columns = _sample(I, J)
    return mask.allowed(grid.tile(rows, columns)).expand(1, 1, len(rows), len(columns))[0, 0].cpu().float()


def _accepts(mask: Mask, I: int, J: int) -> bool:
    """Whether a mask may be used for I queries and J keys, and as many batch entries and heads as it has itself."""
    B, H = mask.own_sizes()
    try:
        mask.check(Sizes(B or 1, H or 1, H or 1, I, J, 1, 1), Positions.aligned_to_end(I, J))
    except RegardError:
        return False
    return True


def _says_more(cells: Tensor, I: int, J: int) -> bool:
    """Whether the shown pairs are neither all pairs nor those of a causal mask."""
    rows, columns = _sample(I, J)
    is_causal = bool(((rows[:, None] + J - I >= columns) == cells.bool()).all())
    return not (is_causal or bool(cells.all()))


def _sample(I: int, J: int) -> tuple[Tensor, Tensor]:
    """The queries and keys that are shown, as indices."""
    return spread_indices(I, TOKENS), spread_indices(J, TOKENS)


def _counted(I: int, J: int) -> str:
    """The lengths in words, and which of the tokens are shown."""
    said = f"{I} tokens" if I == J else f"{I} queries and {J} keys"
    return f"{said}, of which {TOKENS} at equal distances are shown" if max(I, J) > TOKENS else said


def _svg(panels: Sequence[Panel], names: Sequence[str], said: str) -> str:
    """The panels on a light ground, with the names of the rows, the numbers of the columns and a caption, `said`.

    Characters of the caption that XML forbids become "?". A letter is taken to be 6 pixels wide, because nothing
    measures text here.
    """
    left = 8 + 6 * max(len(name) for name in names)
    rows, columns = (1 + max(getattr(panel, name) for panel in panels) for name in ("row", "column"))
    side = LARGE if len(panels) <= FEW else SIDE
    top = 18 if columns > 1 else 8
    width, height = left + columns * (side + GAP), top + rows * (side + GAP)
    said = NOT_XML.sub("?", said if len(said) <= CHARACTERS else f"{said[:CHARACTERS]}…")
    lines = _lines(said, max(width, 320) // 6)
    width, height = max(width, 320), height + 14 * len(lines) + 6
    parts = [f'<rect width="{width}" height="{height}" fill="#ffffff"/>']
    parts += [_write(name, 4, top + row * (side + GAP) + side / 2) for row, name in enumerate(names) if name]
    if columns > 1:
        parts += [_write(str(n), left + n * (side + GAP) + side / 2, 12, "middle") for n in range(columns)]
    for places, row, column in panels:
        x, y = left + column * (side + GAP), top + row * (side + GAP)
        parts.append(
            f'<image x="{x}" y="{y}" width="{side}" height="{side}" preserveAspectRatio="none" '
            f'style="image-rendering:pixelated" href="{_png_url(places)}"/>'
            f'<rect x="{x}" y="{y}" width="{side}" height="{side}" fill="none" stroke="#c9c9c4"/>'
        )
    parts += [_write(line, 4, height - 14 * (len(lines) - n) + 6) for n, line in enumerate(lines)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" font-family="sans-serif" font-size="10" fill="#111418">'
        f"<title>{escape(said)}</title>{''.join(parts)}</svg>"
    )


def _write(text: str, x: float, y: float, anchor: str = "start") -> str:
    """A text of an SVG."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def _lines(text: str, room: int) -> list[str]:
    """A text as lines of at most `room` characters; a longer word is a line of its own."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > room:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _png_url(places: Tensor) -> str:
    """Cells (rows, columns) from 0 to 1 as a PNG with a palette, as a URL of its data.

    A pixel is a byte, and a cell 2 x 2 pixels or more, so that no program blurs them.
    """
    palette = _palette()
    cells = (places.clamp(0, 1) * (len(palette) - 1)).round().numpy().astype(np.uint8)
    times = max(1, SIDE * 2 // max(cells.shape))
    cells = np.kron(cells, np.ones((times, times), np.uint8))
    rows = np.pad(cells, ((0, 0), (1, 0)))  # a byte before each row: no filter
    header = struct.pack(">IIBBBBB", cells.shape[1], cells.shape[0], 8, 3, 0, 0, 0)
    chunks = (
        (b"IHDR", header),
        (b"PLTE", palette.tobytes()),
        (b"IDAT", zlib.compress(rows.tobytes(), 9)),
        (b"IEND", b""),
    )
    content = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return f"data:image/png;base64,{base64.b64encode(PNG + content).decode()}"


def _palette() -> NDArray[np.uint8]:
    """White, and 63 colors of the ramp."""
    stops = np.array([[int(color[at : at + 2], 16) for at in (1, 3, 5)] for color in RAMP])
    at = np.linspace(0, len(stops) - 1, 63)
    colors = [np.interp(at, np.arange(len(stops)), stops[:, part]) for part in range(3)]
    return np.vstack([[255, 255, 255], np.stack(colors, 1).round()]).astype(np.uint8)
