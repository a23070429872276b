"""Answers the requests of an open page, for the server and for the notebook.

| path | answer |
|---|---|
| `texts` | JSON: the titles of the texts, and what is the same for all texts |
| `read` | POST a `live_request`, if there is a live model: JSON: numbers and titles of its sheets, or why not |
| `text/T` | JSON: everything about text T, without its maps |
| `tile/T/L/H/LEVEL/R/C/POOL` | up to 128 x 128 cells of 2^LEVEL squared weights, `mean` or `max`; float16 or float32 |
| `rows/T/L/I`, `columns/T/L/J` | float32 (H, J): the weights of query I; (H, I): the weights on key J |
| `window/T/L/I/J/ROWS/COLS` | float32 (H, ROWS, COLS): the weights of queries I, I + 1, ... on keys J, J + 1, ... |
| `pair/T/L/H/I/J` | float32 (2, D): c q_i and k_j, if scores are dot products |
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from regard.base.errors import RegardError
from regard.maps import AttentionMap
from regard.maps.reductions import averaged, cells, coarser
from regard.maps.scored_map import dot_tensors, is_dot
from regard.viewer.live_model import Check, LiveModel, Stopped
from regard.viewer.live_request import TypedTexts, live_request
from regard.viewer.page import embed
from regard.viewer.sheet import COMMON, QUICK, Sheet, base_level, raw
from regard.viewer.story import Story

#: Cells per side of a tile, and the number of cached tiles: at most 64 MiB.
TILE, CACHED = 128, 1024
#: The most queries or keys of a window.
WINDOW = 64
#: The most weights that are computed at once for a tile of cells: 16 MiB in float32.
STRIP = 1 << 22


class NoAnswer(Exception):
    """The page asked for something that does not exist."""


class Answers:
    """Answers the paths above with bytes, for the texts of `sheets` and those that a reader types for `model`.

    `story` is the tour that the page plays, or None. Typed texts have the numbers after those of `sheets`. Parts of a
    path are texts, which `number` checks.
    """

    def __init__(self, sheets: list[Sheet], model: LiveModel | None = None, story: Story | None = None) -> None:
        self.sheets, self.model, self.story, self.typed = sheets, model, story, TypedTexts(len(sheets))
        self.tile = lru_cache(CACHED)(self._tile)

    @torch.inference_mode()
    def answer(self, path: str) -> bytes:
        """The bytes of an answer. Raises `NoAnswer` with the reason if there is none."""
        match path.split("/"):
            case ["texts"]:
                return embed(self._common()).encode()
            case ["text", text]:
                return embed(self._sheet(text).about).encode()
            case ["tile", text, layer, head, level, row, col, ("mean" | "max") as pool]:
                return self.tile(text, layer, head, level, row, col, pool)
            case ["rows", text, layer, query]:
                weights, _ = self._layer(text, layer)
                return raw(weights[0, :, number(query, weights.shape[2], "query")].float())
            case ["columns", text, layer, key]:
                weights, _ = self._layer(text, layer)
                return raw(weights[0, :, :, number(key, weights.shape[3], "key")].float())
            case ["window", text, layer, query, key, rows, cols]:
                return self._window(text, layer, (query, key), (rows, cols))
            case ["pair", text, layer, head, query, key]:
                return self._pair(text, layer, head, query, key)
        raise NoAnswer(f"there is no {path[:60]!r}")

    def read(self, body: bytes, check: Check) -> bytes:
        """Read a typed text with the live model, and keep it. `check` may raise `Stopped` while the model runs.

        A text that the model cannot take, such as a long one, is answered with the reason, not with an error of HTTP.
        """
        if self.model is None:
            raise RegardError(
                "Answers.read: these answers have no model, so they read no typed text. Give one: "
                "Answers(sheets, model=live_model)."
            )
        request = live_request(body, self.model.questions)
        try:
            numbers = self.typed.find(request) or self.typed.add(request, self.model.answer(request, check))
        except Stopped:
            raise
        except RegardError as reason:
            return embed({"refused": str(reason)}).encode()
        return embed({"texts": [[n, sheet.about["title"]] for n in numbers if (sheet := self.typed.get(n))]}).encode()

    def _common(self) -> dict[str, Any]:
        """What is the same for all texts, and the titles; those of typed texts with their numbers."""
        common = COMMON | {"titles": [sheet.about["title"] for sheet in self.sheets]}
        common |= {} if self.story is None else {"story": self.story.about}
        return common if self.model is None else common | {"typed": self.typed.titles(), "live_model": self.model.about}

    def _tile(self, text: str, layer: str, head: str, level: str, row: str, col: str, pool: str) -> bytes:
        """The mean or the largest weight of each cell of a tile, as bytes: float32 at level 0, where cells are weights.

        The arguments are parts of the request, which are numbers as text; `pool` says which of the two is asked for.

        From level `base_level` on, cells come from those that the sheet of a long text has (`Sheet.ready`); below it,
        and for short texts, from the weights. Without such cells the levels above `QUICK` would need too many weights.
        """
        weights, ready = self._layer(text, layer)
        _, H, I, J = weights.shape
        h, n = number(head, H, "head"), number(level, levels(I, J), "level")
        size, base = 1 << n, base_level(I, J)
        r = number(row, -(-I // (size * TILE)), "row of tiles")
        c = number(col, -(-J // (size * TILE)), "column of tiles")
        if ready is not None and n >= base:
            side = TILE << (n - base)
            part = (h, slice(r * side, (r + 1) * side), slice(c * side, (c + 1) * side))
            mean, greatest = coarser((ready[0][part].float(), ready[1][part].float()), n - base, base, I, r * side)
        elif ready is None and base and n > QUICK:
            raise NoAnswer(f"this text has no cells of level {n}; Sheet.of computes them")
        else:
            sums, greatest = cells_of_tile(weights, h, (r, c), size)
            mean = averaged(sums, size, I, r * TILE)
        values = greatest if pool == "max" else mean
        return raw(values.half() if n else values)

    def _window(self, text: str, layer: str, corner: tuple[str, str], size: tuple[str, str]) -> bytes:
        """The weights of a part of all maps of a layer, as bytes. `corner` is (query, key), `size` (rows, columns).

        `text` and `layer` are their numbers, as texts.
        """
        weights, _ = self._layer(text, layer)
        i, j = (
            number(part, n, name) for part, n, name in zip(corner, weights.shape[2:], ("query", "key"), strict=True)
        )
        rows, cols = (number(part, WINDOW + 1, "size of a window") for part in size)
        return raw(weights.tile(0, rows=slice(i, i + rows), cols=slice(j, j + cols))[0].float())

    def _pair(self, text: str, layer: str, head: str, query: str, key: str) -> bytes:
        """The scaled query c q_i and the key k_j of one pair, as bytes. Query heads may share a key head."""
        weights, _ = self._layer(text, layer)
        if not is_dot(weights):
            raise NoAnswer("the scores of this attention are not plain dot products")
        _, H, I, J = weights.shape
        h = number(head, H, "head")
        q, k, _ = dot_tensors(weights)
        key_head = h // (H // len(k))
        return raw(torch.stack([q[h, number(query, I, "query")], k[key_head, number(key, J, "key")]]))

    def _sheet(self, text: str) -> Sheet:
        """The sheet of a text by its number; typed texts are kept for a time only."""
        typed = number(text, 10**9, "text")
        if self.typed.dropped(typed):
            raise NoAnswer("this text is not kept any more. Type it again.")
        return self.typed.get(typed) or self.sheets[number(text, len(self.sheets), "text")]

    def _layer(self, text: str, layer: str) -> tuple[AttentionMap, tuple[Tensor, Tensor] | None]:
        """The map of a layer, and its precomputed cells (mean, largest); None for a text without them."""
        sheet = self._sheet(text)
        index = number(layer, len(sheet.maps), "layer")
        return sheet.maps[index], sheet.ready[index] if index < len(sheet.ready) else None


def cells_of_tile(weights: AttentionMap, head: int, place: tuple[int, int], size: int) -> tuple[Tensor, Tensor]:
    """The sums and the largest weights of the cells of a tile, at most 128 x 128, from strips of at most `STRIP`
    weights.

    `head` is the number of the head, `place` is the (row, column) of the tile, `size` the number of weights per side of
    a cell.
    """
    side = TILE * size
    first, last = place[0] * side, min((place[0] + 1) * side, weights.shape[2])
    cols, step = slice(place[1] * side, (place[1] + 1) * side), max(1, STRIP // (side * size)) * size
    # `step` is a multiple of `size`, so no cell is in two strips
    strips = (slice(start, min(start + step, last)) for start in range(first, last, step))
    parts = [cells(weights.tile(0, head, rows, cols)[0, 0].float(), size) for rows in strips]
    sums, greatest = (torch.cat(part) for part in zip(*parts, strict=True))
    return sums, greatest


def levels(I: int, J: int) -> int:
    """The number of zoom levels of a map; at the last one, one cell holds all weights.

    >>> levels(1, 1), levels(16, 16), levels(16, 17)
    (1, 5, 6)
    """
    return (max(I, J) - 1).bit_length() + 1


def number(part: str, size: int, name: str) -> int:
    """The number that a part of a path gives; it must be below `size`."""
    if not (part.isascii() and part.isdigit() and len(part) < 10 and int(part) < size):
        raise NoAnswer(f"there is no {name} {part[:20]!r}; there are {size}, numbered from 0")
    return int(part)
