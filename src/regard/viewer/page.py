"""One self-contained page: every head of every layer, for one or more texts."""

from __future__ import annotations

import base64
import json
import math
import os
import re
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.maps import AttentionMap, Links, Pool
from regard.stats import CAVEAT, STATISTICS, LayerProfile, Reading, RoleTable
from regard.stats.roles import KINDS, QUERIES, ROLE_CAVEAT

#: Bytes of the page that maps and links may take, as base64.
MAP_BYTES = 10_000_000
LINK_BYTES = 3_000_000
#: Cells a side of a map that is too large to show weight by weight.
POOLED = 256
#: Cells a side of a thumbnail; maps up to half as large again are their own.
THUMBNAIL = 32
#: Kind of role -> the letter that stands for it on a small map.
LETTERS = {
    "previous": "P",
    "next": "N",
    "positional": "O",
    "first": "F",
    "special": "S",
    "broad": "B",
    "punctuation": "M",
    "duplicate": "D",
    "induction": "I",
}
#: Of an unsigned 16-bit number: the largest weight, and the key that is none.
WHOLE = 65535


def write_page(path: str | os.PathLike[str], texts: Sequence[Reading]) -> Path:
    """Write the page of some readings to `path`, whole or not at all; its folders are made.

    Maps are shown weight by weight where they fit in the page, else in cells that hold the weight
    summed over keys and averaged over queries; the strongest links of every query are exact.
    """
    path = Path(path)
    if not texts:
        raise RegardError("write_page: there is no text to show. Give at least one Reading.")
    page = render(texts)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(path, page)
    except OSError as error:
        raise RegardError(f"write_page: {path} cannot be written: {error.strerror or error}.") from error
    return path


def _write_whole(path: Path, content: str) -> None:
    """To a file beside it, then renamed: whoever interrupts finds the old file or the new one."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".regard-") as folder:
        draft = Path(folder) / path.name
        draft.write_text(content, encoding="utf-8")
        os.replace(draft, path)


def render(texts: Sequence[Reading]) -> str:
    """The page as a string of HTML."""
    parts = {
        "style": _template("page.css"),
        "script": _template("page.js"),
        "data": embed(payload(texts)),
    }
    return re.sub(r"<!--(style|script|data)-->", lambda found: parts[found[1]], _template("page.html"))


def embed(data: Any) -> str:
    """JSON that cannot end the element it stands in, whatever the text holds."""
    escapes = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).translate(escapes)


def payload(texts: Sequence[Reading]) -> dict[str, Any]:
    """What the page's script reads: short texts take the room they need, long ones share what is left."""
    shown: dict[int, dict[str, Any]] = {}
    maps, links = MAP_BYTES, LINK_BYTES
    by_size = sorted(range(len(texts)), key=lambda index: _size(texts[index]))
    for rank, index in enumerate(by_size):
        share = len(texts) - rank
        shown[index] = _text(texts[index], maps // share, links // share)
        maps -= sum(len(head["map"]) for layer in shown[index]["layers"] for head in layer["heads"])
        links -= sum(len(head["keys"]) * 2 for layer in shown[index]["layers"] for head in layer["heads"])
    return {
        "texts": [shown[index] for index in range(len(texts))],
        "statistics": {statistic.name: statistic.meaning for statistic in STATISTICS},
        "kinds": {kind: {"letter": LETTERS[kind], "meaning": meaning} for kind, meaning in KINDS.items()},
        "queries": QUERIES,
        "caveat": CAVEAT,
        "roleCaveat": ROLE_CAVEAT,
    }


def _size(reading: Reading) -> int:
    return len(reading.profile.tokens) * len(reading.profile.query_tokens) * _num_heads(reading)


def _num_heads(reading: Reading) -> int:
    return sum(layer.num_heads for layer in reading.profile.layers)


def _text(reading: Reading, map_bytes: int, link_bytes: int) -> dict[str, Any]:
    profile, heads = reading.profile, _num_heads(reading)
    size = max(len(profile.tokens), len(profile.query_tokens))
    fits = max(1, math.isqrt(map_bytes * 3 // 4 // heads))
    side = size if size <= fits else min(fits, POOLED)
    num_links = link_bytes * 3 // 4 // (4 * heads * len(profile.query_tokens))
    start = _start(reading)
    return {
        "title": reading.title,
        "tokens": profile.tokens,
        "queries": None if profile.query_tokens == profile.tokens else profile.query_tokens,
        "special": profile.special,
        "rows": min(side, len(profile.query_tokens)),
        "cols": min(side, len(profile.tokens)),
        "thumbnail": THUMBNAIL if side > THUMBNAIL * 3 // 2 else 0,
        "start": dict(zip(("layer", "head", "query"), start, strict=True)),
        "layers": [
            _layer(reading, weights, layer, side, num_links)
            for weights, layer in zip(reading.maps.values(), profile.layers, strict=True)
        ],
        "findings": [vars(finding) for finding in reading.findings],
        "told": reading.roles is not None,
    }


def _start(reading: Reading) -> tuple[int, int, int]:
    """What the page opens with: a pronoun where there is one, in the head that looks hardest past its neighbours."""
    ordinary = reading.profile.ordinary or [0]
    query = reading.find("it")
    query = ordinary[len(ordinary) // 2] if query is None else query
    best = reading.notable(query, 1)
    numbers = [layer.number for layer in reading.profile.layers]
    return (numbers.index(best[0].layer), best[0].head, query) if best else (0, 0, query)


def _layer(reading: Reading, weights: AttentionMap, layer: LayerProfile, side: int, num_links: int) -> dict[str, Any]:
    pooled, small = weights.summarize(Pool(side, side), Pool(THUMBNAIL, THUMBNAIL))
    heads, batch, ordinary = [], reading.batch, reading.profile.ordinary
    for head in range(layer.num_heads):
        strongest = layer.strongest(head, ordinary)
        heads.append(
            {
                "values": {name: round(float(values[head]), 4) for name, values in layer.values.items()},
                "strongest": [strongest.query, strongest.key, round(strongest.weight, 4)],
                "map": encode(quantise(pooled[batch, head])),
                "thumbnail": encode(quantise(small[batch, head])) if side > THUMBNAIL * 3 // 2 else "",
                "roles": _roles(reading.roles, layer.number, head),
                **_links(layer.links, head, num_links),
            }
        )
    return {"name": layer.name, "number": layer.number, "heads": heads}


def _roles(found: RoleTable | None, layer: int, head: int) -> list[dict[str, Any]]:
    """The roles that a head earned, the highest score first."""
    named = [] if found is None else [role for role in found.head(layer, head) if role.label]
    return [
        {"kind": role.kind, "offset": role.offset, "score": round(role.score, 4), "null": round(role.null, 4)}
        | {"chance": round(role.chance, 4)}
        for role in sorted(named, key=lambda role: -role.score)
    ]


def _links(links: Links, head: int, num_links: int) -> dict[str, Any]:
    """The strongest links of every query of a head: keys and weights, `num_links` at most for each."""
    keys, weights = links.keys[head, :, :num_links], links.weights[head, :, :num_links]
    coded = keys.masked_fill((keys < 0) | (keys >= WHOLE), WHOLE)
    return {
        "links": keys.shape[-1],
        "keys": encode(coded.to(torch.uint16)),
        "weights": encode((weights.clamp(0, 1) * WHOLE).round().to(torch.uint16)),
    }


def quantise(weights: Tensor) -> Tensor:
    """Weights as bytes: 0 is exactly nothing, 1 to 255 go by the square root, so that weak links still show."""
    steps = 1 + (254 * weights.clamp(0, 1).sqrt()).round()
    return torch.where(weights > 0, steps, 0.0).to(torch.uint8).cpu()


def encode(numbers: Tensor) -> str:
    """Bytes of a tensor, little-endian, as base64."""
    array = numbers.contiguous().numpy()
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode("ascii")


def _template(name: str) -> str:
    return files("regard.viewer").joinpath(name).read_text(encoding="utf-8")
