"""What the page asks for while it is looked at: one answer for the server and the notebook alike.

| path | answer |
|---|---|
| `texts` | JSON: what the page says of all texts, their titles and sizes |
| `text/T` | JSON: all that is said about text T |
| `tile/T/L/H/LEVEL/R/C/POOL` | 128 x 128 cells or fewer of 2^LEVEL weights, `mean` or `max`; float16, level 0 float32 |
| `rows/T/L/I`, `columns/T/L/J` | float32 (H, J): what a query looks at; (H, I): what looks at a key |
| `pair/T/L/H/I/J` | float32 (2, D): c q_i and k_j, where scores are dot products |
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from regard.maps import AttentionMap
from regard.maps.dot import is_dot, scaled
from regard.maps.pyramid import averaged, cells, coarser
from regard.viewer.page import embed
from regard.viewer.sheet import COMMON, Sheet, base_level, raw

#: Cells a side of a tile, levels that there may be, and tiles that are kept: 64 MiB at most.
TILE, LEVELS, KEPT = 128, 24, 1024


class NoAnswer(Exception):
    """The page asked for what there is not."""


class Answers:
    """Answers the paths above with bytes."""

    def __init__(self, sheets: list[Sheet]) -> None:
        self.sheets = sheets
        self.tile = lru_cache(KEPT)(self._tile)

    @torch.inference_mode()
    def answer(self, path: str) -> bytes:
        """The bytes of an answer; `NoAnswer` says why there is none."""
        match path.split("/"):
            case ["texts"]:
                return embed(COMMON | {"titles": [sheet.about["title"] for sheet in self.sheets]}).encode()
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
            case ["pair", text, layer, head, query, key]:
                return self._pair(text, layer, head, query, key)
        raise NoAnswer(f"there is no {path[:60]!r}")

    def _tile(self, text: str, layer: str, head: str, level: str, row: str, col: str, pool: str) -> bytes:
        weights, ready = self._layer(text, layer)
        _, H, I, J = weights.shape
        h, n = number(head, H, "head"), number(level, LEVELS, "level")
        size, base = 1 << n, base_level(I, J)
        r = number(row, -(-I // (size * TILE)), "row of tiles")
        c = number(col, -(-J // (size * TILE)), "column of tiles")
        if ready is not None and n >= base:
            wide = TILE << (n - base)
            part = (h, slice(r * wide, (r + 1) * wide), slice(c * wide, (c + 1) * wide))
            mean, most = coarser((ready[0][part].float(), ready[1][part].float()), n - base, base, I, r * wide)
        else:
            rows, cols = (slice(at * TILE * size, (at + 1) * TILE * size) for at in (r, c))
            sums, most = cells(weights.tile(0, h, rows, cols)[0, 0].float(), size)
            mean = averaged(sums, size, I, r * TILE)
        found = most if pool == "max" else mean
        return raw(found.half() if n else found)

    def _pair(self, text: str, layer: str, head: str, query: str, key: str) -> bytes:
        weights, _ = self._layer(text, layer)
        if not is_dot(weights):
            raise NoAnswer("the scores of this attention are no plain dot products")
        _, H, I, J = weights.shape
        h = number(head, H, "head")
        q, k, _ = scaled(weights)
        key_head = h // (H // len(k))
        return raw(torch.stack([q[h, number(query, I, "query")], k[key_head, number(key, J, "key")]]))

    def _sheet(self, text: str) -> Sheet:
        return self.sheets[number(text, len(self.sheets), "text")]

    def _layer(self, text: str, layer: str) -> tuple[AttentionMap, tuple[Tensor, Tensor] | None]:
        sheet = self._sheet(text)
        at = number(layer, len(sheet.maps), "layer")
        return sheet.maps[at], sheet.ready[at] if at < len(sheet.ready) else None


def number(part: str, size: int, what: str) -> int:
    """A number below `size` out of a path."""
    if not (part.isascii() and part.isdigit() and len(part) < 10 and int(part) < size):
        raise NoAnswer(f"there is no {what} {part[:20]!r}; there are {size}, numbered from 0")
    return int(part)
