"""Checks the texts of a saved run: a damaged or edited one is refused in words, before a page asks for it."""

from __future__ import annotations

import base64
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor

from regard.base.errors import RegardError
from regard.maps import AttentionMap
from regard.maps.scored_map import ScoredMap
from regard.stats.roles import MEANINGS
from regard.viewer.page import embed
from regard.viewer.sheet import OFFSETS, base_level

TEXT, WHOLE, NUMBER, TRUTH = "a text", "a whole number", "a finite number", "true or false"
NUMBER_OR_TEXT, ROLE_KIND = "a finite number or a text", f"one of {', '.join(MEANINGS)}"
#: The largest number, and the most characters of a reason in an error.
LARGEST, PART = 1e300, 80


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


PREDICATES = {
    TEXT: lambda value: isinstance(value, str),
    WHOLE: lambda value: isinstance(value, int) and not isinstance(value, bool),
    NUMBER: _is_number,
    TRUTH: lambda value: isinstance(value, bool),
    NUMBER_OR_TEXT: lambda value: isinstance(value, str) or _is_number(value),
    ROLE_KIND: lambda value: isinstance(value, str) and value in MEANINGS,
}


@dataclass(frozen=True)
class Around:
    """What says more of a form."""

    form: Any


class Maybe(Around):
    """A value of `form`, or null."""


class Named(Around):
    """An object with any names, whose values have this form."""


class Optional(Around):
    """A part of an object that older runs do not have."""


# A form is a name from above, [form] for a list, (form, form) for a list of that length, or {name: form} for an object
# with these names. Other names are not checked.
HEAD = {
    "values": Named(NUMBER),
    "strongest": (WHOLE, WHOLE, NUMBER),
    "thumbnail": TEXT,
    "roles": [{"kind": ROLE_KIND, "offset": Maybe(WHOLE), "score": NUMBER, "null": NUMBER, "chance": NUMBER}],
    "offsets": (NUMBER,) * (2 * OFFSETS + 1),
    "received": [NUMBER],
}
LAYER = {
    "name": TEXT,
    "number": WHOLE,
    "note": Optional(TEXT),
    "small": (WHOLE, WHOLE),
    "similarity": [[NUMBER]],
    "heads": [HEAD],
}
SERIES = {"name": TEXT, "points": [(NUMBER_OR_TEXT, NUMBER)]}
SENTENCE = [(TEXT, TEXT)]
LEAD = {
    **dict.fromkeys(("layer", "head", "query", "key"), WHOLE),
    "weight": NUMBER,
    "links": [(WHOLE, NUMBER)],
    "sentence": SENTENCE,
}
LEADS = {**LEAD, "other": Optional(Maybe(LEAD)), "heading": Optional([(SENTENCE, WHOLE)]), "left_out": Optional(TEXT)}
CARD = {
    **dict.fromkeys(("kind", "title", "note"), TEXT),
    "sentence": SENTENCE,
    "state": Named(NUMBER_OR_TEXT),
    "heads": Maybe([(WHOLE, WHOLE)]),
    "bars": Maybe([NUMBER]),
    "at": WHOLE,
}
PANEL = {
    **dict.fromkeys(("rows", "columns", "width", "height", "start"), WHOLE),
    "image": TEXT,
    "tokens": Optional([WHOLE]),
}
EFFECT = {
    **dict.fromkeys(("of", "kind", "sentence"), TEXT),
    "edits": [(TEXT, TEXT)],
    "probabilities": [(TEXT, NUMBER, NUMBER)],
    "moved": [(TEXT, NUMBER)],
}
ABOUT = {
    "title": TEXT,
    "model": Optional(TEXT),
    "written": Optional(TEXT),
    "effect": Optional(EFFECT),
    "attribution": Optional({**dict.fromkeys(("of", "method", "sentence"), TEXT), "test": [TEXT]}),
    "generation": Optional({"prompt": WHOLE, "labels": [TEXT]}),
    "lead": Optional(Maybe(LEADS)),
    "cards": Optional([CARD]),
    "warnings": Optional(Named(TEXT)),
    "picture": Optional(Maybe({"kind": TEXT, "panels": [PANEL], "seconds": Optional(NUMBER)})),
    "tokens": [TEXT],
    "queries": Maybe([TEXT]),
    "special": [WHOLE],
    "start": {"layer": WHOLE, "head": WHOLE, "query": WHOLE},
    "layers": [LAYER],
    "places": Maybe([(NUMBER, NUMBER)]),
    "findings": [{"kind": TEXT, "layer": WHOLE, "heads": [WHOLE], "number": NUMBER, "sentence": TEXT}],
    "has_roles": TRUTH,
    "why_no_roles": Optional(TEXT),
    "role_note": Optional(TEXT),
    "gold": [(WHOLE, WHOLE, TRUTH)],
    "aligned": TEXT,
    "charts": [{"title": TEXT, "x": TEXT, "y": TEXT, "series": [SERIES], "band": Optional([(NUMBER,) * 3])}],
}


def check_text(
    where: object, about: dict[str, Any], maps: Sequence[AttentionMap], ready: Sequence[tuple[Tensor, Tensor] | None]
) -> None:
    """Raise an error that names the folder `where` and the part that is wrong."""
    checks = (_wrong_form(about, ABOUT, ""), _unsendable(about), _wrong_maps(maps), _wrong_sizes(about, maps))
    wrong = next(chain(*checks, _wrong_cells(maps, ready)), None)
    if wrong:
        raise RegardError(f"view: {where} is damaged or was edited: {wrong}. Save the text again.")


def _wrong_form(value: Any, form: Any, name: str) -> Iterator[str]:
    """The parts of a value that have another form, in words."""
    if isinstance(form, str):
        if not PREDICATES[form](value):
            yield f"{name} must be {form}, got {reprlib.repr(value)}"
    elif isinstance(form, Optional):
        yield from _wrong_form(value, form.form, name)
    elif isinstance(form, Maybe):
        if value is not None:
            yield from _wrong_form(value, form.form, name)
    elif isinstance(form, dict | Named):
        yield from _wrong_object(value, form, name)
    else:
        yield from _wrong_list(value, form, name)


def _wrong_object(value: Any, form: dict[str, Any] | Named, name: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{name} must be an object, got {reprlib.repr(value)}"
        return
    forms = form if isinstance(form, dict) else dict.fromkeys(value, form.form)
    for part, each in forms.items():
        if part not in value and not isinstance(each, Optional):
            yield f"{name}.{part} is missing".removeprefix(".")
        elif part in value:
            yield from _wrong_form(value[part], each, f"{name}.{part}".removeprefix("."))


def _wrong_list(value: Any, form: list[Any] | tuple[Any, ...], name: str) -> Iterator[str]:
    if not isinstance(value, list):
        yield f"{name} must be a list, got {reprlib.repr(value)}"
        return
    if isinstance(form, tuple) and len(value) != len(form):
        yield f"{name} must have {len(form)} parts, got {len(value)}"
        return
    for at, each in enumerate(value):
        yield from _wrong_form(each, form[at if isinstance(form, tuple) else 0], f"{name}[{at}]")


def _unsendable(about: dict[str, Any]) -> Iterator[str]:
    """NaN and lone surrogates, which are no JSON of a page."""
    try:
        embed(about).encode()
    except (ValueError, RecursionError) as error:
        yield f"it cannot be sent to a page ({error})"


def _wrong_sizes(about: dict[str, Any], maps: Sequence[AttentionMap]) -> Iterator[str]:
    """Lists that do not fit the maps, and numbers of tokens, layers and heads that do not exist."""
    _, _, I, J = maps[0].shape
    layers, queries = about["layers"], about["tokens"] if about["queries"] is None else about["queries"]
    heads = [weights.shape[1] for weights in maps]
    yield from _differing("tokens", len(about["tokens"]), J)
    yield from _differing("queries", len(queries), I)
    yield from _differing("layers", len(layers), len(maps))
    yield from _outside("special", about["special"], J)
    yield from _outside("gold", [link[0] for link in about["gold"]], I)
    yield from _outside("gold", [link[1] for link in about["gold"]], J)
    start = about["start"]
    yield from _outside("start.layer", [start["layer"]], len(layers))
    yield from _outside("start.head", [start["head"]], heads[start["layer"]])
    yield from _outside("start.query", [start["query"]], I)
    yield from _wrong_links(about, heads, I, J)
    yield from _wrong_panels(about.get("picture"), J)
    yield from _differing("places", len(about["places"] or range(sum(heads))), sum(heads))
    names = set(layers[0]["heads"][0]["values"]) if layers[0]["heads"] else set()
    for at, (layer, weights) in enumerate(zip(layers, maps, strict=True)):
        yield from _wrong_layer(f"layers[{at}]", layer, weights.shape, names)


def _wrong_panels(shown: dict[str, Any] | None, num_keys: int) -> Iterator[str]:
    """Panels of a picture whose patches are no keys, or whose image is not embedded."""
    for at, panel in enumerate(shown["panels"] if shown else []):
        where, size = f"picture.panels[{at}]", panel["rows"] * panel["columns"]
        if min(panel[name] for name in ("rows", "columns", "width", "height")) < 1:
            yield f"{where} has rows, columns, width or height below 1"
        if "tokens" in panel:
            yield from _differing(f"{where}.tokens", len(panel["tokens"]), size)
            yield from _outside(f"{where}.tokens", panel["tokens"], num_keys)
        else:
            yield from _outside(f"{where}.start", [panel["start"], panel["start"] + size - 1], num_keys)
        if not panel["image"].startswith(("data:image/png;base64,", "data:image/jpeg;base64,")):
            yield f"{where}.image must be a data URL of a PNG or JPEG"


def _wrong_links(about: dict[str, Any], heads: Sequence[int], I: int, J: int) -> Iterator[str]:
    """The links that lead, and the heads of the cards."""
    first = about.get("lead") or {}
    for lead in [link for link in (first, first.get("other")) if link]:
        yield from _outside("lead.layer", [lead["layer"]], len(heads))
        yield from _outside("lead.head", [lead["head"]], heads[lead["layer"]])
        yield from _outside("lead.query", [lead["query"]], I)
        yield from _outside("lead.key", [lead["key"], *(key for key, _ in lead["links"])], J)
    for layer, head in (place for card in about.get("cards", []) for place in card["heads"] or []):
        yield from _outside("cards.heads", [layer], len(heads))
        yield from _outside("cards.heads", [head], heads[layer])


def _wrong_layer(name: str, layer: dict[str, Any], shape: tuple[int, ...], names: set[str]) -> Iterator[str]:
    _, H, I, J = shape
    yield from _differing(f"{name}.heads", len(layer["heads"]), H)
    yield from _differing(f"{name}.similarity", len(layer["similarity"]), H)
    for row in layer["similarity"]:
        yield from _differing(f"{name}.similarity", len(row), H)
    for at, head in enumerate(layer["heads"]):
        where, (query, key, _) = f"{name}.heads[{at}]", head["strongest"]
        if set(head["values"]) != names:
            yield f"{where}.values must have the names of the other heads"
        if not (0 <= query < I and -1 <= key < J):
            yield f"{where}.strongest must be a query and a key of the text"
        if not 1 <= len(head["received"]) <= J:
            yield f"{where}.received must have at most {J} numbers"
        yield from _wrong_picture(where, head["thumbnail"], layer["small"])


def _wrong_picture(where: str, thumbnail: str, size: list[int]) -> Iterator[str]:
    try:
        cells = len(base64.b64decode(thumbnail, validate=True))
    except ValueError:
        cells = -1
    if min(size) < 1 or cells != size[0] * size[1]:
        yield f"{where}.thumbnail must be {size[0]} x {size[1]} bytes in base64"


def _wrong_maps(maps: Sequence[AttentionMap]) -> Iterator[str]:
    """Maps of other sizes than the first, or whose weights cannot be computed."""
    for at, weights in enumerate(maps):
        try:
            fits = weights.shape[2:] == maps[0].shape[2:] and _has_weights(weights)
        except Exception as error:  # whatever a piece with other fields than its own raises
            yield f"the weights of layer {at} cannot be computed ({type(error).__name__}: {str(error)[:PART]})"
        else:
            if not fits:
                yield f"the map of layer {at} has tensors of other sizes"


def _has_weights(weights: AttentionMap) -> bool:
    """Whether a map has one text, and the last row of the first and last head can be computed."""
    B, H, I, J = weights.shape
    tiles = [weights.tile(0, head, slice(I - 1, I), slice(0, J)) for head in (0, H - 1)]
    if isinstance(weights, ScoredMap) and weights.row_statistic[0].shape != (1, H, I):
        return False
    return B == 1 and all(t.shape == (1, 1, 1, J) for t in tiles)


def _wrong_cells(maps: Sequence[AttentionMap], ready: Sequence[tuple[Tensor, Tensor] | None]) -> Iterator[str]:
    """A long text without its cells: a level above them would be computed from all weights."""
    for at, (weights, cells) in enumerate(zip(maps, ready, strict=True)):
        _, H, I, J = weights.shape
        level = base_level(I, J)
        sides = (-(-n // (1 << level)) for n in (I, J))
        wanted = (H, *sides) if level else None
        if (cells and tuple(cells[0].shape), cells and tuple(cells[1].shape)) != (wanted, wanted):
            yield f"the cells of layer {at} are missing or have another size"


def _differing(name: str, size: int, wanted: int) -> Iterator[str]:
    if size != wanted:
        yield f"{name} has {size} entries, and the maps {wanted}"


def _outside(name: str, numbers: Sequence[int], size: int) -> Iterator[str]:
    wrong = [number for number in numbers if not 0 <= number < size]
    if wrong:
        yield f"{name} names {wrong[0]}, and there are {size}, numbered from 0"
