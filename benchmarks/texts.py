"""Texts for benchmarks of the page: the maps are random, and statistics that would take minutes are made up."""

from __future__ import annotations

import base64
import random
from typing import Any

import torch

import regard as rg
from regard.stats import STATISTICS
from regard.types import TextReading
from regard.viewer import Sheet
from regard.viewer.sheet import OFFSETS, READY, THUMBNAIL

LENGTH, HEADS, LAYERS, WIDTH = 32_768, 12, 2, 64


def long_text() -> Sheet:
    """A causal text of 32,768 tokens with random queries and keys; of its cells only the size matters."""
    torch.manual_seed(0)
    maps = []
    for _ in range(LAYERS):
        q, k, v = (torch.randn(1, HEADS, LENGTH, WIDTH) for _ in range(3))
        maps.append(rg.Attention(mask=rg.causal())(q, k, v).weights)
    ready = [tuple(torch.rand(HEADS, READY, READY).half() for _ in range(2)) for _ in maps]
    return Sheet(made_up("A long text", LENGTH, LAYERS, HEADS), maps, ready)


def many_heads(num_layers: int = 144, num_heads: int = 24, length: int = 24) -> Sheet:
    """A short text in a model of many heads."""
    maps = list(maps_of(length, num_layers, num_heads, 4).values())
    return Sheet(made_up("Many heads", length, num_layers, num_heads), maps, [None] * num_layers)


def page_of_words(length: int = 2_000) -> Sheet:
    """A text of some pages."""
    return Sheet.of(TextReading.of("Some pages", maps_of(length, 2, HEADS, 32), words(length)))


def words(count: int) -> list[str]:
    return [f"word{n}" for n in range(count)]


def maps_of(length: int, num_layers: int, num_heads: int, width: int) -> dict[str, Any]:
    torch.manual_seed(0)
    maps = {}
    for layer in range(num_layers):
        q, k, v = (torch.randn(1, num_heads, length, width) for _ in range(3))
        maps[f"layer.{layer}"] = rg.Attention(mask=rg.causal())(2 * q, k, v).weights
    return maps


def made_up(title: str, length: int, num_layers: int, num_heads: int) -> dict[str, Any]:
    """Everything about a text besides its maps."""
    drawn = random.Random(0)
    heads = [[_made_up_head(drawn, length) for _ in range(num_heads)] for _ in range(num_layers)]
    similarity = [[round(drawn.random(), 3) for _ in range(num_heads)] for _ in range(num_heads)]
    layers = [
        {
            "name": f"layer.{n}",
            "number": n,
            "small": [THUMBNAIL, THUMBNAIL],
            "similarity": similarity,
            "heads": of_layer,
        }
        for n, of_layer in enumerate(heads)
    ]
    about = {"title": title, "tokens": words(length), "queries": None, "special": [], "layers": layers}
    about |= {"start": {"layer": 0, "head": 0, "query": length // 2}, "findings": [], "has_roles": False}
    places = [[drawn.random(), drawn.random()] for _ in range(num_layers * num_heads)]
    return about | {"why_no_roles": "", "places": places, "gold": [], "aligned": "", "charts": []}


def _made_up_head(drawn: random.Random, length: int) -> dict[str, Any]:
    query = drawn.randrange(length)
    return {
        "values": {statistic.name: drawn.random() for statistic in STATISTICS},
        "strongest": [query, drawn.randrange(query + 1), drawn.random()],
        "thumbnail": base64.b64encode(drawn.randbytes(THUMBNAIL**2)).decode(),
        "roles": [],
        "offsets": [drawn.random() / 10 for _ in range(2 * OFFSETS + 1)],
        "received": [drawn.random() for _ in range(min(length, 512))],
    }
