"""`Sheet`: the data of one text for the page. JSON for its statistics, and its attention maps."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.base.errors import RegardError
from regard.base.whole_files import short_number
from regard.maps import AttentionMap, Pool, Reduction
from regard.maps.reductions import Pyramid, coarser
from regard.stats import CAVEAT, STATISTICS, Offsets, head_map, sample_rows
from regard.stats.head_distances import head_divergence
from regard.stats.layer_kinds import layer_note
from regard.stats.profile import LayerProfile, ModelProfile
from regard.stats.roles import CONTENT, MEANINGS, QUERIES, ROLE_CAVEAT, RoleTable
from regard.stats.strongest_links import strongest_links
from regard.stats.text_reading import NEARBY, TextReading, nearby_shares
from regard.stats.warnings import warning_lines
from regard.viewer.findings import cards_of, lead_of

#: Cells per side of a thumbnail; for long texts at most 2 to the power SMALL_LEVELS.
THUMBNAIL, SMALL_LEVELS = 48, 6
#: The relative offsets shown on each side, and the number of parts of a long text for the weight received.
OFFSETS, INTERVALS = 8, 512
#: The number of weights that compare two heads, so that a long text takes no longer than a short text.
COMPARED = 1 << 15
#: Cells per side of the finest precomputed level, and the last level whose tiles are computed on request.
READY, QUICK = 1024, 4
#: The least positive number in half precision.
LEAST_HALF = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps
#: Letters of roles on a small map, where the initial is already in use.
LETTERS = {"positional": "O", "punctuation": "M", "left": "←", "right": "→", "above": "↑", "below": "↓"}
LETTERS |= {"monotonic": "↘", "retrieval": "E", "subject": "U", "object": "J", "pronoun": "H"}
#: The data that is the same for all texts.
COMMON = {
    "statistics": {statistic.name: statistic.meaning for statistic in STATISTICS}
    | {"importance": "|d loss / d gate|: how much the loss depends on the head"},
    "labels": {statistic.name: statistic.label or statistic.name for statistic in STATISTICS}
    | {"importance": "effect on the loss (importance)"},
    "kinds": {
        kind: {"letter": LETTERS.get(kind, kind[0].upper()), "meaning": meaning, "byPosition": kind not in CONTENT}
        for kind, meaning in MEANINGS.items()
    },
    "queries": QUERIES,
    "caveat": CAVEAT,
    "roleCaveat": ROLE_CAVEAT,
    "offsets": OFFSETS,
    "thumbnail": THUMBNAIL,
}

#: The mean and the greatest weight of each cell of a layer, (H, i, j) each.
Cells = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Sheet:
    """A text of the page: its data as JSON (`about`), a map per layer, and precomputed cells (`ready`) of long texts.

    Each map has one batch entry. In `about`, `gold` are reference links (query, key, sure), `aligned` says at which
    step the attention is read ("output" or "input"), `charts` are curves of a run, and `picture` is the image under the
    weights (`picture_sheets`).

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 1, 3, 4)
    >>> reading = rg.types.TextReading.of("zeros", {"layers.0": rg.Attention()(x, x, x).weights}, ["a", "b", "c"])
    >>> sheet = rg.viewer.Sheet.of(reading)
    >>> sheet.about["title"], sheet.maps, sheet.ready
    ('zeros', [AttentionMap(1 x 1 heads x 3 queries x 3 keys)], [None])
    """

    about: dict[str, Any]
    maps: list[AttentionMap]
    ready: list[Cells | None] = field(default_factory=list)

    @staticmethod
    @torch.no_grad()
    def of(
        reading: TextReading,
        gold: Sequence[tuple[int, int, bool]] = (),
        aligned: str = "",
        charts: Sequence[Mapping[str, Any]] = (),
    ) -> Sheet:
        """The sheet of a reading. A reading made with `also=page_reductions` needs no further pass over its maps.

        `gold` and `aligned` are as in `about` (`Sheet`). A chart is `{"title", "x", "y", "series": [{"name", "points":
        [[x, y], ...]}]}`, and may have a "band", [[x, low, high], ...].
        """
        maps = list(reading.maps.values())
        measured = [
            layer.also or weights.summarize(*page_reductions(weights))
            for layer, weights in zip(reading.profile.layers, maps, strict=True)
        ]
        pooled = [_pooled(weights, results[0]) for weights, results in zip(maps, measured, strict=True)]
        offsets = [results[1][0].cpu() / weights.shape[2] for weights, results in zip(maps, measured, strict=True)]
        layers, shares = zip(reading.profile.layers, pooled, offsets, strict=True), _nearby(reading)
        about = _about(reading) | {
            "layers": [_layer(layer, small, near, reading, shares) for layer, (small, _), near in layers],
            "places": _places(maps),
            "gold": [list(link) for link in gold],
            "aligned": aligned,
            "charts": list(charts),
            "picture": None,
        }
        return Sheet(about, maps, [ready for _, ready in pooled])


def _about(reading: TextReading) -> dict[str, Any]:
    """The words of the text, what the page opens with, and what was found."""
    profile, lead = reading.profile, lead_of(reading)
    return {
        "title": reading.title,
        "model": reading.model,
        "tokens": profile.tokens,
        "queries": None if profile.query_tokens == profile.tokens else profile.query_tokens,
        "special": profile.special,
        "start": _start(profile, lead),
        "lead": lead,
        "cards": cards_of(reading, lead),
        "findings": [vars(finding) for finding in reading.findings],
        "warnings": warning_lines(reading.findings, sum(layer.num_heads for layer in profile.layers)),
        "has_roles": reading.roles is not None,
        "why_no_roles": reading.why_no_roles,
        "role_note": "" if reading.roles is None else reading.roles.note,
    }


def sheets_of(texts: Sequence[TextReading | Sheet]) -> list[Sheet]:
    """The sheets of readings; sheets among them stay as they are."""
    wrong = (
        next((text for text in texts if not isinstance(text, TextReading | Sheet)), None)
        if _is_listed(texts)
        else texts
    )
    if wrong is not None:
        raise RegardError(
            f"page: texts must be a list of TextReading or Sheet, got {type(wrong).__name__}. For the maps of "
            "rg.watch: [TextReading.of(title, seen.maps, tokens)], with TextReading from regard.stats."
        )
    return [text if isinstance(text, Sheet) else Sheet.of(text) for text in texts]


def _is_listed(texts: object) -> bool:
    """Whether these are several texts, in a list or another iterable."""
    return isinstance(texts, Iterable) and not isinstance(texts, str | Mapping)


def base_level(I: int, J: int) -> int:
    """The finest precomputed zoom level of a map: a cell of level n holds 2^n x 2^n weights.

    It has at most READY cells per side, and is above QUICK, the last level whose tiles are computed on request. 0 for
    small maps, whose tiles are all computed on request in milliseconds.

    >>> base_level(512, 512), base_level(4096, 4096), base_level(65_536, 100)
    (0, 5, 6)
    """
    level = 0 if max(I, J) <= READY else QUICK + 1
    while max(I, J) > READY << level:
        level += 1
    return level


def page_reductions(weights: AttentionMap) -> tuple[Reduction, Reduction]:
    """The reductions that the page needs besides the profile of a map: cells, and the weight by relative offset.

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 1, 3, 4)
    >>> cells, offsets = rg.viewer.page_reductions(rg.Attention()(x, x, x).weights)
    >>> cells
    Pool(rows=3, cols=3)
    """
    _, _, I, J = weights.shape
    level = base_level(I, J)
    pooled = Pyramid(level) if level else Pool(min(THUMBNAIL, I), min(THUMBNAIL, J))
    return pooled, Offsets(-OFFSETS, OFFSETS)


def _pooled(weights: AttentionMap, pooled: Any) -> tuple[Tensor, Cells | None]:
    """The thumbnails of all heads (H, i, j), and the cells of a long map in half precision; None for a short map.

    `pooled` is the result of the first of `page_reductions`.
    """
    _, _, I, J = weights.shape
    level = base_level(I, J)
    if not level:
        return pooled[0].cpu(), None
    mean, greatest = (part[0].cpu() for part in pooled)
    # from the level of the finest cells to the level with at most 2^SMALL_LEVELS cells per side
    steps = max(0, (max(I, J) - 1).bit_length() - level - SMALL_LEVELS)
    return coarser((mean, greatest), steps, level, I)[0], (_half(mean), _half(greatest))


def _half(weights: Tensor) -> Tensor:
    """Weights in half precision, in which 0 is exactly 0: a smaller positive weight is the least positive number."""
    halves = weights.half()
    return torch.where((halves == 0) & (weights > 0), LEAST_HALF, halves)


def _layer(
    layer: LayerProfile,
    small: Tensor,
    offsets: Tensor,
    reading: TextReading,
    nearby: Mapping[tuple[str, int, int], float],
) -> dict[str, Any]:
    """A layer as JSON, with a part for each head.

    `small` are the thumbnails (H, i, j), `offsets` the shares of weight by offset (H, 2 OFFSETS + 1). `nearby` replaces
    statistics of some heads by those of `_nearby`.
    """
    received = layer.received
    if received.shape[-1] > INTERVALS:
        received = torch.nn.functional.adaptive_avg_pool1d(received[None], INTERVALS)[0]
    heads = []
    for head, strongest in enumerate(strongest_links(reading.profile, layer)):
        values = {
            name: short_number(nearby.get((name, layer.number, head), of[head])) for name, of in layer.values.items()
        }
        heads.append(
            {
                "values": values,
                "strongest": [strongest.query, strongest.key, short_number(strongest.weight)],
                "thumbnail": encode(quantize(small[head])),
                "roles": _roles(reading.roles, layer.number, head),
                "offsets": [short_number(value) for value in offsets[head]],
                "received": [short_number(value) for value in received[head]],
            }
        )
    similarity = [[round(float(value), 3) for value in row] for row in layer.similarity]
    shape = list(small.shape[-2:])
    about = {"name": layer.name, "number": layer.number, "note": layer_note(layer), "small": shape}
    return about | {"similarity": similarity, "heads": heads}


def _nearby(reading: TextReading) -> dict[tuple[str, int, int], float]:
    """The weight on nearby tokens by statistic, layer and head, averaged as in the cards: the first token is no target.

    So a head has one such number on the whole page. Empty for cross-attention and for weights with signs.
    """
    profile, known = reading.profile, reading.profile.layers[0].values
    is_one = profile.query_tokens == profile.tokens and len(profile.tokens) > 2
    names = [name for name in NEARBY if name in known] if is_one and profile.layers[0].negative is None else []
    return {(name, share.layer, share.head): share.value for name in names for share in nearby_shares(reading, name)}


def _roles(roles: RoleTable | None, layer: int, head: int) -> list[dict[str, Any]]:
    """The roles of a head, the highest score first."""
    named = [] if roles is None else [role for role in roles.head(layer, head) if role.label]
    return [
        {"kind": role.kind, "offset": role.offset, "score": round(role.score, 4), "null": round(role.null, 4)}
        | {"chance": round(role.chance, 4)}
        for role in sorted(named, key=lambda role: -role.score)
    ]


def _places(maps: Sequence[AttentionMap]) -> list[list[float]] | None:
    """A point for each head on a plane, in the order of layers and heads: near points are similar maps.

    None if the heads cannot be compared.
    """
    _, _, I, J = maps[0].shape
    try:
        distance = head_divergence(maps, sample_rows(I, max(8, min(64, COMPARED // J))))
    except RegardError:
        return None
    return [[short_number(value) for value in point] for point in head_map(distance.sqrt())]


def _start(profile: ModelProfile, lead: dict[str, Any] | None) -> dict[str, int]:
    """The first view of the page: the link that leads, or a token in the middle."""
    if lead is not None:
        return {name: lead[name] for name in ("layer", "head", "query")}
    ordinary = profile.ordinary or [0]
    return {"layer": 0, "head": 0, "query": ordinary[len(ordinary) // 2]}


def quantize(weights: Tensor) -> Tensor:
    """Weights as bytes: 0 is exactly 0, 1 to 255 are the square root, so that small weights stay visible."""
    steps = 1 + (254 * weights.float().clamp(0, 1).sqrt()).round()
    return torch.where(weights > 0, steps, 0.0).to(torch.uint8).cpu()


def encode(numbers: Tensor) -> str:
    """The bytes of a tensor, little-endian, as base64."""
    return base64.b64encode(raw(numbers)).decode("ascii")


def raw(numbers: Tensor) -> bytes:
    """The bytes of a tensor, little-endian."""
    array = numbers.detach().cpu().contiguous().numpy()
    return array.astype(array.dtype.newbyteorder("<")).tobytes()
