"""The page as one file that contains the maps of its texts and opens without a network.

A map is inside as queries and keys if the page can compute the weights, otherwise as weights or pooled cells.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.base.whole_files import write_whole
from regard.maps import AttentionMap
from regard.maps.reductions import Pyramid
from regard.maps.scored_map import dot_tensors, is_dot
from regard.stats.text_reading import TextReading
from regard.viewer.sheet import COMMON, Sheet, encode, quantize, sheets_of
from regard.viewer.story import Story, story_of

#: Only the script with this hash runs. Styles are inline. The page makes images to be saved.
POLICY = (
    "default-src 'none'; script-src 'sha256-{hash}'; style-src 'unsafe-inline'; img-src data: blob:; "
    "connect-src {from_}; base-uri 'none'; form-action 'none'"
)


@checked
def write_page(
    path: str | os.PathLike[str],
    texts: Sequence[TextReading | Sheet],
    story: Story | str | os.PathLike[str] | None = None,
) -> Path:
    """Write the page of some texts to `path`, completely or not at all. Missing folders are created.

    `story` is a `Story` or a JSON file that the page saved: the page then plays it.

    Weights are exact if queries and keys fit into the page, at most 15 MB in all. Maps of longer texts are shown in
    cells: the weight summed over keys and averaged over queries.

    >>> import tempfile, torch, regard as rg
    >>> from pathlib import Path
    >>> x = torch.zeros(1, 1, 3, 4)
    >>> reading = rg.types.TextReading.of("zeros", {"layers.0": rg.Attention()(x, x, x).weights}, ["a", "b", "c"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = rg.viewer.write_page(Path(folder) / "page.html", [reading])
    ...     page.name, page.read_text().startswith("<!doctype html>")
    ('page.html', True)
    """
    if not isinstance(path, str | os.PathLike):
        raise RegardError(
            f"write_page: the first argument must be the path of the file, got {type(path).__name__}. "
            "Example: write_page('page.html', [reading]); TextReading.of(title, maps, tokens) makes a reading."
        )
    path = Path(path)
    sheets = sheets_of(texts)
    if not sheets:
        raise RegardError("write_page: there is no text to show. Give at least one TextReading.")
    write_whole(path, render(sheets, story_of(story, sheets)))
    return path


def render(sheets: list[Sheet], story: Story | None = None) -> str:
    """The page of texts as HTML."""
    return html(embed(payload(sheets, story)))


def payload(sheets: list[Sheet], story: Story | None = None) -> dict[str, Any]:
    """The data of the page: everything about each text, and its maps; the story, if it has one."""
    texts = [sheet.about | {"maps": maps} for sheet, maps in zip(sheets, embedded(sheets), strict=True)]
    return COMMON | {"texts": texts} | ({} if story is None else {"story": story.about})


def html(data: str, from_: str = "'none'", program: str = "page.js") -> str:
    """The page as HTML, with its data as JSON.

    `from_` is the source that it may request more data from (connect-src), `program` the script of `static/` that runs.
    """
    script = bundle(program)
    digest = hashlib.sha256(script.encode()).digest()
    policy = POLICY.format(hash=base64.b64encode(digest).decode(), from_=from_)
    parts = {"policy": policy, "style": bundle("page.css"), "script": script, "data": data}
    return re.sub(r"<!--(policy|style|script|data)-->", lambda match: parts[match[1]], bundle("page.html"))


def embed(data: Any) -> str:
    """JSON that may stand in a page.

    Characters that could end the HTML element around it are escaped. NaN raises a ValueError.
    """
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return re.sub("[<>&\u2028\u2029]", lambda found: f"\\u{ord(found[0]):04x}", text)


@cache
def bundle(name: str) -> str:
    """A file that `make page` built from `frontend/`."""
    return files("regard.viewer").joinpath("static", name).read_text(encoding="utf-8")


#: The most bytes of the maps of all texts of a page, as base64.
MAP_BYTES = 13_800_000
#: A map may always have this many cells per side, even if its share of the bytes is smaller.
FEWEST = 48


def embedded(sheets: list[Sheet], budget: int = MAP_BYTES) -> list[list[dict[str, Any]]]:
    """The maps of every layer of every text, as JSON.

    Short texts take the bytes they need; long texts share what is left of the `budget`.
    """
    maps: dict[int, list[dict[str, Any]]] = {}
    by_size = sorted(range(len(sheets)), key=lambda number: math.prod(sheets[number].maps[0].shape))
    for rank, number in enumerate(by_size):
        # an equal share for each text that follows; base64 writes 3 bytes as 4
        share = budget // (len(sheets) - rank) * 3 // 4
        maps[number] = _maps(sheets[number].maps, share)
        budget -= sum(len(text) for layer in maps[number] for text in layer.values() if isinstance(text, str))
    return [maps[number] for number in range(len(sheets))]


def _maps(maps: list[AttentionMap], max_bytes: int) -> list[dict[str, Any]]:
    """The maps of all layers, as JSON, in the most exact form that takes at most `max_bytes`."""
    for dtype in (torch.float32, torch.float16):
        if sum(exact_bytes(weights, dtype) for weights in maps) <= max_bytes:
            return [_exact(weights, dtype) for weights in maps]
    num_heads = sum(weights.shape[1] for weights in maps)
    return [_pooled(weights, max_bytes // num_heads) for weights in maps]


def exact_bytes(weights: AttentionMap, dtype: torch.dtype = torch.float32) -> int:
    """The bytes of queries, keys, row statistics and mask of a map, or of its weights if it has no dot products."""
    _, H, I, J = weights.shape
    if not is_dot(weights):
        return H * I * J * 4
    prepared, bits = weights._prepared, I * J // 8 if weights.attention.mask is not None else 0
    return (prepared.query.numel() + prepared.key.numel()) * dtype.itemsize + H * I * 4 + bits


def _exact(weights: AttentionMap, dtype: torch.dtype) -> dict[str, Any]:
    """A map as JSON from which the page computes every weight: queries, keys and row statistics, or all weights."""
    if not is_dot(weights):
        return {"form": "weights", "weights": encode(weights.dense()[0].float())}
    query, key, row_statistic = dot_tensors(weights)
    parts = {"form": "dot", "half": dtype == torch.float16, "width": query.shape[-1], "keyHeads": len(key)}
    parts |= {"query": encode(query.to(dtype)), "key": encode(key.to(dtype)), "row_statistic": encode(row_statistic)}
    mask = weights.attention.mask
    return parts if mask is None else parts | {"mask": _bits(mask.allowed(weights.grid), weights.shape)}


def _bits(allowed: Tensor, shape: tuple[int, int, int, int]) -> str:
    """The mask of the first text and head, a bit for each pair of `shape`, row by row, as base64."""
    plane = allowed[:1, :1].expand(1, 1, *shape[2:])[0, 0].cpu().numpy()
    return encode(torch.from_numpy(np.packbits(plane, axis=None, bitorder="little")))


def _pooled(weights: AttentionMap, max_bytes: int) -> dict[str, Any]:
    """The smallest cells (2^level tokens a side) of which a head has at most isqrt(`max_bytes`) per side, or FEWEST.

    A cell is one byte (`quantize`), so a head takes about `max_bytes`.
    """
    level, longest = 0, max(weights.shape[2:])
    while -(-longest // (1 << level)) > max(math.isqrt(max_bytes), FEWEST):
        level += 1
    (mean, _) = weights.summarize(Pyramid(level))[0]  # sums over keys averaged over queries; maxima are left out
    return {"form": "cells", "level": level, "cells": encode(quantize(mean[0]))}
