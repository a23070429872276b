"""What the page asks for while it is looked at: one answer for the server and the notebook alike.

| path | answer |
|---|---|
| `texts` | JSON: what the page says of all texts, their titles and sizes |
| `text/T` | JSON: all that is said about text T |
| `tile/T/L/H/LEVEL/R/C/POOL` | float32: up to 128 x 128 cells of 2^LEVEL weights, `mean` or `max` |
| `rows/T/L/I`, `columns/T/L/J` | float32 (H, J): what a query looks at; (H, I): what looks at a key |
| `pair/T/L/H/I/J` | float32 (2, D): c q_i and k_j, where scores are dot products |
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

import torch
from torch import Tensor

from regard.maps import AttentionMap
from regard.viewer.embedded import is_dot, scaled
from regard.viewer.pyramid import TILE, averaged, base_level, cells, coarser
from regard.viewer.sheet import COMMON, Sheet, raw

#: Bytes of answers that are kept.
CACHE = 64 << 20
LEVELS = 24


class NoAnswer(Exception):
    """The page asked for what there is not."""


class Answers:
    """Answers the paths above with bytes."""

    def __init__(self, sheets: list[Sheet]) -> None:
        self.sheets = sheets
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._lock = Lock()
        self._size = 0

    def answer(self, path: str) -> bytes:
        """The bytes of an answer; `NoAnswer` says why there is none."""
        with self._lock:
            if path in self._kept:
                self._kept.move_to_end(path)
                return self._kept[path]
        kind, *parts = path.split("/")
        ask: Callable[..., bytes] | None = {
            "texts": self._texts, "text": self._text, "tile": self._tile, "rows": self._rows, "columns": self._columns,
            "pair": self._pair,
        }.get(kind)  # fmt: skip
        wanted = {"texts": 0, "text": 1, "tile": 7, "rows": 3, "columns": 3, "pair": 5}.get(kind)
        if ask is None or len(parts) != wanted:
            raise NoAnswer(f"there is no {path[:60]!r}")
        with torch.inference_mode():
            found = ask(*parts)
        self._keep(path, found)
        return found

    def _keep(self, path: str, found: bytes) -> None:
        with self._lock:
            if path not in self._kept:
                self._kept[path] = found
                self._size += len(found)
            while self._size > CACHE and len(self._kept) > 1:
                self._size -= len(self._kept.popitem(last=False)[1])

    def _texts(self) -> bytes:
        return as_json(COMMON | {"titles": [sheet.about["title"] for sheet in self.sheets]})

    def _text(self, text: str) -> bytes:
        return as_json(self._sheet(text).about)

    def _tile(self, text: str, layer: str, head: str, level: str, row: str, col: str, pool: str) -> bytes:
        weights, ready = self._layer(text, layer)
        _, H, I, J = weights.shape
        h, n = number(head, H, "head"), number(level, LEVELS, "level")
        if pool not in ("mean", "max"):
            raise NoAnswer(f"there is no pooling {pool[:20]!r}; mean and max are known")
        size = 1 << n
        r = number(row, -(-I // (size * TILE)), "row of tiles")
        c = number(col, -(-J // (size * TILE)), "column of tiles")
        base = base_level(I, J)
        if ready is not None and n >= base:
            wide = TILE << (n - base)
            part = (h, slice(r * wide, (r + 1) * wide), slice(c * wide, (c + 1) * wide))
            found = coarser((ready[0][part].float(), ready[1][part].float()), n - base, base, I, r * wide)[
                pool == "max"
            ]
        else:
            rows, cols = (slice(at * TILE * size, (at + 1) * TILE * size) for at in (r, c))
            sums, greatest = cells(weights.tile(0, h, rows, cols)[0, 0].float(), size)
            found = greatest if pool == "max" else averaged(sums, size, I, r * TILE)
        return raw(found.float())

    def _rows(self, text: str, layer: str, query: str) -> bytes:
        weights, _ = self._layer(text, layer)
        return raw(weights[0, :, number(query, weights.shape[2], "query")].float())

    def _columns(self, text: str, layer: str, key: str) -> bytes:
        weights, _ = self._layer(text, layer)
        return raw(weights[0, :, :, number(key, weights.shape[3], "key")].float())

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


def as_json(data: object) -> bytes:
    """JSON as bytes."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
