"""One text as the page shows it: what is said about it, and its maps."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.maps import AttentionMap, Pool
from regard.stats import (
    CAVEAT,
    STATISTICS,
    LayerProfile,
    Reading,
    RoleTable,
    divergence,
    head_map,
    profile,
    sample_rows,
)
from regard.stats.roles import KINDS, QUERIES, ROLE_CAVEAT
from regard.stats.statistics import Offset
from regard.viewer.pyramid import Pyramid, base_level, coarser

#: Cells a side of a thumbnail; of long texts 2 to this power, at most.
THUMBNAIL, SMALL_LEVELS = 48, 6
#: Relative offsets shown on each side, and stretches of the text that weight received is summed over.
OFFSETS, STRETCHES = 8, 512
#: Weights that heads are compared on, so that a long text takes no longer than a short one.
COMPARED = 1 << 15
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
#: What the page says of all texts alike.
COMMON = {
    "statistics": {statistic.name: statistic.meaning for statistic in STATISTICS}
    | {"importance": "|d loss / d gate|: how much the loss hangs on the head"},
    "kinds": {kind: {"letter": LETTERS[kind], "meaning": meaning} for kind, meaning in KINDS.items()},
    "queries": QUERIES,
    "caveat": CAVEAT,
    "roleCaveat": ROLE_CAVEAT,
    "offsets": OFFSETS,
    "thumbnail": THUMBNAIL,
}

#: Means and strongest weights of a layer in cells, (H, i, j) each.
Cells = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Sheet:
    """A text of the page: `about` is JSON, `maps` are of one batch entry each, `ready` are cells of long texts.

    `gold` in `about` are reference links (query, key, sure), `aligned` says where attention was read
    ("output" or "input"), `charts` are curves of a run.
    """

    about: dict[str, Any]
    maps: list[AttentionMap]
    ready: list[Cells | None] = field(default_factory=list)

    @staticmethod
    def of(
        reading: Reading,
        gold: Sequence[tuple[int, int, bool]] = (),
        aligned: str = "",
        charts: Sequence[Mapping[str, Any]] = (),
    ) -> Sheet:
        """Everything the page tells of a reading, in one pass over each map.

        A chart is `{"title", "x", "y", "series": [{"name", "points": [[x, y], ...]}]}`.
        """
        maps = [one_text(weights, reading.batch) for weights in reading.maps.values()]
        measured = [_measure(weights) for weights in maps]
        profile = reading.profile
        about = {
            "title": reading.title,
            "tokens": profile.tokens,
            "queries": None if profile.query_tokens == profile.tokens else profile.query_tokens,
            "special": profile.special,
            "start": _start(reading),
            "layers": [_layer(layer, found, reading) for layer, found in zip(profile.layers, measured, strict=True)],
            "places": _places(maps),
            "findings": [vars(finding) for finding in reading.findings],
            "told": reading.roles is not None,
            "gold": [list(link) for link in gold],
            "aligned": aligned,
            "charts": list(charts),
        }
        return Sheet(about, maps, [found["ready"] for found in measured])


def sheets_of(texts: Sequence[Reading | Sheet]) -> list[Sheet]:
    """Readings as sheets."""
    return [text if isinstance(text, Sheet) else Sheet.of(text) for text in texts]


def reading_of(
    title: str,
    maps: dict[str, AttentionMap],
    tokens: Sequence[str] | None,
    queries: Sequence[str] | None = None,
    batch: int = 0,
) -> Reading:
    """A reading of maps of one size; without tokens, positions are their names."""
    _, _, I, J = next(iter(maps.values())).shape
    keys = [str(j) for j in range(J)] if tokens is None else list(tokens)
    if queries is None:
        queries = keys[J - I :] if I <= J else [str(i) for i in range(I)]
    return Reading(title, maps, profile(maps, keys, query_tokens=queries, batch=batch), batch)


def one_text(weights: AttentionMap, batch: int) -> AttentionMap:
    """The map of one batch entry."""
    if weights.shape[0] == 1:
        return weights
    everyone = torch.arange(weights.shape[1], device=weights.device)
    return weights.select(torch.tensor([batch], device=weights.device), everyone)


def _measure(weights: AttentionMap) -> dict[str, Any]:
    """Thumbnails, offsets, and the cells of long maps, by one pass."""
    _, _, I, J = weights.shape
    level = base_level(I, J)
    offsets = (Offset(by) for by in range(-OFFSETS, OFFSETS + 1))
    pooled, *rest = weights.summarize(Pyramid(level) if level else Pool(min(THUMBNAIL, I), min(THUMBNAIL, J)), *offsets)
    found = {"small": pooled, "offsets": torch.stack([each[0].mean(-1) for each in rest], -1).cpu(), "ready": None}
    if level:
        found["ready"] = tuple(part[0].half().cpu() for part in pooled)
        steps = max(0, (max(I, J) - 1).bit_length() - level - SMALL_LEVELS)
        found["small"] = coarser((pooled[0].cpu(), pooled[1].cpu()), steps, level, I)[0]
    return found | {"small": found["small"][0].cpu()}


def _layer(layer: LayerProfile, found: dict[str, Any], reading: Reading) -> dict[str, Any]:
    received = layer.received
    if received.shape[-1] > STRETCHES:
        received = torch.nn.functional.adaptive_avg_pool1d(received[None], STRETCHES)[0]
    heads = []
    for head in range(layer.num_heads):
        strongest = layer.strongest(head, reading.profile.ordinary)
        heads.append(
            {
                "values": {name: _short(values[head]) for name, values in layer.values.items()},
                "strongest": [strongest.query, strongest.key, _short(strongest.weight)],
                "thumbnail": encode(quantise(found["small"][head])),
                "roles": _roles(reading.roles, layer.number, head),
                "offsets": [_short(value) for value in found["offsets"][head]],
                "received": [_short(value) for value in received[head]],
            }
        )
    similarity = [[round(float(value), 3) for value in row] for row in layer.similarity]
    rows, cols = found["small"].shape[-2:]
    return {"name": layer.name, "number": layer.number, "small": [rows, cols], "similarity": similarity, "heads": heads}


def _short(value: Tensor | float) -> float:
    return float(f"{float(value):.4g}")


def _roles(found: RoleTable | None, layer: int, head: int) -> list[dict[str, Any]]:
    """The roles that a head earned, the highest score first."""
    named = [] if found is None else [role for role in found.head(layer, head) if role.label]
    return [
        {"kind": role.kind, "offset": role.offset, "score": round(role.score, 4), "null": round(role.null, 4)}
        | {"chance": round(role.chance, 4)}
        for role in sorted(named, key=lambda role: -role.score)
    ]


def _places(maps: Sequence[AttentionMap]) -> list[list[float]] | None:
    """Where heads stand on a plane on which heads that look alike are near; None where they cannot be compared."""
    _, _, I, J = maps[0].shape
    try:
        distance = divergence(maps, sample_rows(I, max(8, min(64, COMPARED // J))))
    except RegardError:
        return None
    return [[_short(value) for value in place] for place in head_map(distance.sqrt())]


def _start(reading: Reading) -> dict[str, int]:
    """What the page opens with: a pronoun where there is one, in the head that looks hardest past its neighbours."""
    ordinary = reading.profile.ordinary or [0]
    query = reading.find("it")
    query = ordinary[len(ordinary) // 2] if query is None else query
    best = reading.notable(query, 1)
    numbers = [layer.number for layer in reading.profile.layers]
    layer, head = (numbers.index(best[0].layer), best[0].head) if best else (0, 0)
    return {"layer": layer, "head": head, "query": query}


def quantise(weights: Tensor) -> Tensor:
    """Weights as bytes: 0 is exactly nothing, 1 to 255 go by the square root, so that weak links still show."""
    steps = 1 + (254 * weights.float().clamp(0, 1).sqrt()).round()
    return torch.where(weights > 0, steps, 0.0).to(torch.uint8).cpu()


def encode(numbers: Tensor) -> str:
    """Bytes of a tensor, little-endian, as base64."""
    return base64.b64encode(raw(numbers)).decode("ascii")


def raw(numbers: Tensor) -> bytes:
    """Bytes of a tensor, little-endian."""
    array = numbers.detach().cpu().contiguous().numpy()
    return array.astype(array.dtype.newbyteorder("<")).tobytes()
