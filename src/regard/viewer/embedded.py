"""Maps inside a page: queries and keys if the page can compute the weights, otherwise weights or pooled cells."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.maps import AttentionMap
from regard.maps.reductions import Pyramid
from regard.maps.scored_map import is_dot, scaled
from regard.viewer.sheet import Sheet, encode, quantize

#: The most bytes of the maps of all texts of a page, as base64.
MAP_BYTES = 13_800_000
#: The fewest cells per side of a map that is embedded in cells.
FEWEST = 48


def embedded(sheets: list[Sheet], budget: int = MAP_BYTES) -> list[list[dict[str, Any]]]:
    """The maps of every layer of every text. Short texts take the bytes they need; long texts share the rest."""
    maps: dict[int, list[dict[str, Any]]] = {}
    by_size = sorted(range(len(sheets)), key=lambda number: math.prod(sheets[number].maps[0].shape))
    for rank, number in enumerate(by_size):
        share = budget // (len(sheets) - rank) * 3 // 4
        maps[number] = _maps(sheets[number].maps, share)
        budget -= sum(len(text) for layer in maps[number] for text in layer.values() if isinstance(text, str))
    return [maps[number] for number in range(len(sheets))]


def _maps(maps: list[AttentionMap], max_bytes: int) -> list[dict[str, Any]]:
    """All layers in the most exact form that takes at most `max_bytes`."""
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
    if not is_dot(weights):
        return {"form": "weights", "weights": encode(weights.dense()[0].float())}
    query, key, row_statistic = scaled(weights)
    parts = {"form": "dot", "half": dtype == torch.float16, "width": query.shape[-1], "keyHeads": len(key)}
    parts |= {"query": encode(query.to(dtype)), "key": encode(key.to(dtype)), "row_statistic": encode(row_statistic)}
    mask = weights.attention.mask
    return parts if mask is None else parts | {"mask": _bits(mask.allowed(weights.grid), weights.shape)}


def _bits(allowed: Tensor, shape: tuple[int, int, int, int]) -> str:
    plane = allowed[:1, :1].expand(1, 1, *shape[2:])[0, 0].cpu().numpy()
    return encode(torch.from_numpy(np.packbits(plane, axis=None, bitorder="little")))


def _pooled(weights: AttentionMap, max_bytes: int) -> dict[str, Any]:
    """Pooled cells whose side is a power of two; about `max_bytes` per head, but at least 48 cells per side."""
    level, longest = 0, max(weights.shape[2:])
    while -(-longest // (1 << level)) > max(math.isqrt(max_bytes), FEWEST):
        level += 1
    (mean, _) = weights.summarize(Pyramid(level))[0]
    return {"form": "cells", "level": level, "cells": encode(quantize(mean[0]))}
