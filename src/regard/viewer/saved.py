"""Saves texts with their maps in a folder, a saved run, and loads it. The files can be read without this package.

manifest.json                 {"format": "regard run", "version": 1, "texts": [{"folder", "title", "layers"}]}
text-0/tokens.json            {"title", "tokens", "queries" (null: the tokens), "special"}
text-0/statistics.json        the statistics, roles and findings that the page shows
text-0/layer-00.safetensors   q, k and r, with the pieces in the header (regard.maps.stored)
text-0/cells-00.safetensors   only for long texts: the mean and the greatest weight of each cell
story.json                    only with a story: {"title", "steps": [{"link", "sentence"}]}
index.html                    the page as one file

A damaged or edited text is refused in words, before a page asks for it.
"""

from __future__ import annotations

import base64
import os
import reprlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.base.texts.text_files import read_json
from regard.base.whole_files import write_json, write_whole
from regard.maps import AttentionMap
from regard.maps.scored_map import ScoredMap
from regard.maps.stored import load_map, save_map
from regard.stats.roles import MEANINGS
from regard.stats.text_reading import TextReading
from regard.viewer.page import embed, write_page
from regard.viewer.sheet import OFFSETS, Sheet, base_level, sheets_of
from regard.viewer.story import Story, story_of

#: The names of values, as errors say them; `PREDICATES` checks them.
TEXT, WHOLE, NUMBER, TRUTH = "a text", "a whole number", "a finite number", "true or false"
NUMBER_OR_TEXT, ROLE_KIND = "a finite number or a text", f"one of {', '.join(MEANINGS)}"
#: The largest number, and the most characters of a reason in an error.
LARGEST, PART = 1e300, 80


def _is_number(value: Any) -> bool:
    """Whether a value of parsed JSON is a number of a size that a page can draw; infinity and NaN are not."""
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
    """A form inside another one: its subclasses say what they change."""

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
    "examples": Optional(
        [{"weight": NUMBER, "tokens": [TEXT], **dict.fromkeys(("query", "key", "left_out", "document"), WHOLE)}]
    ),
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
WHY = {**dict.fromkeys(("of", "method", "sentence"), TEXT), "test": [TEXT], "relevance": Optional([NUMBER])}
ABOUT = {
    "title": TEXT,
    "model": Optional(TEXT),
    "documents": Optional(WHOLE),
    "written": Optional(TEXT),
    "effect": Optional(EFFECT),
    "attribution": Optional(WHY),
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
    """Raise an error that names the folder `where` and the first part that is wrong.

    `about` is what tokens.json and statistics.json hold, `maps` are those of the layers, and `ready` has the cells of
    each layer, or None.

    The order matters: `_wrong_sizes` reads parts of the forms that `_wrong_form` has checked. The checks are iterators,
    of which nothing runs after the first wrong part.
    """
    checks = (_wrong_form(about, ABOUT, ""), _unsendable(about), _wrong_maps(maps), _wrong_sizes(about, maps))
    wrong = next(chain(*checks, _wrong_cells(maps, ready)), None)
    if wrong:
        raise RegardError(f"view: {where} is damaged or was edited: {wrong}. Save the text again.")


def _wrong_form(value: Any, form: Any, name: str) -> Iterator[str]:
    """The parts of a value that have another form, in words. `name` is the path of the value, as "layers[0].heads"."""
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
    """The parts of a JSON object that are missing or have another form, in words."""
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
    """The entries of a JSON list that have another form, in words. A tuple of forms gives its length, too."""
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
    """Lists that do not fit the maps, and numbers of tokens, layers and heads that do not exist.

    A number may be used as an index after it was checked: the caller stops at the first wrong part.
    """
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
    """Panels of a picture (or None) whose patches are no keys, or whose image is not embedded."""
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
    """The links that lead, and the heads of the cards, where they are not there. `heads` are their numbers by layer."""
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
    """Parts of a layer that do not fit its map (B, H, I, J).

    `names` are the statistics of the first head, which every head must have. A strongest link with key -1 is none.
    """
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
        for example in head.get("examples", []):
            yield from _outside(f"{where}.examples", [example["query"], example["key"]], len(example["tokens"]))
        yield from _wrong_picture(where, head["thumbnail"], layer["small"])


def _wrong_picture(where: str, thumbnail: str, size: list[int]) -> Iterator[str]:
    """The error of a thumbnail that is not `size` (rows, columns) bytes in base64; none if it is.

    `where` is its place in the file.
    """
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
    """An error if a list does not have the wanted length."""
    if size != wanted:
        yield f"{name} has {size} entries, and the maps {wanted}"


def _outside(name: str, numbers: Sequence[int], size: int) -> Iterator[str]:
    """An error for the first of the numbers that is no index of `size` things."""
    wrong = [number for number in numbers if not 0 <= number < size]
    if wrong:
        yield f"{name} names {wrong[0]}, and there are {size}, numbered from 0"


MANIFEST, STORY, FORMAT, VERSION = "manifest.json", "story.json", "regard run", 1
#: Endings of pictures. A page cannot be saved as a picture.
PICTURES = (".png", ".pdf", ".svg", ".jpg", ".jpeg")
#: Endings of other files. A folder of one of these names is a mistake.
FILES = (".txt", ".md", ".csv", ".json", ".pt", ".npy", ".npz", ".safetensors")
#: The most layers of a text.
MOST_LAYERS = 10_000
#: The fields of a text in tokens.json. The other fields are in statistics.json.
TOKENS = ("title", "tokens", "queries", "special")


def save_texts(path: str | os.PathLike[str], texts: Sequence[TextReading | Sheet]) -> Path:
    """Write the page of readings to one file, or to a folder for `regard view`."""
    if not texts:
        raise RegardError("save: there is no text to save.")
    kind = Path(path).suffix.lower()
    if kind in PICTURES:
        raise RegardError(
            f"save({str(path)!r}): a page is one .html file, or a folder. To save a picture of a head, call "
            f"rg.heatmap(weights, tokens).savefig({Path(path).name!r}), or seen.heatmap(layer=0, head=0).savefig(...)."
        )
    if kind in FILES:
        name = Path(path).stem
        raise RegardError(f"save({str(path)!r}): a page is one file, {name}.html, or a folder, {name}.")
    sheets = sheets_of(texts)
    return write_page(path, sheets) if kind in (".html", ".htm") else save_run(path, sheets)


@checked
def save_run(
    folder: str | os.PathLike[str],
    sheets: list[Sheet],
    progress: Callable[[str], None] = lambda _: None,
    story: Story | None = None,
) -> Path:
    """Write a run, and the story of its page if it has one. `progress` is called with a message for each step.

    The manifest is written last, so an incomplete folder is not a run.

    >>> import tempfile, torch, regard as rg
    >>> from pathlib import Path
    >>> x = torch.zeros(1, 1, 3, 4)
    >>> reading = rg.types.TextReading.of("zeros", {"layers.0": rg.Attention()(x, x, x).weights}, ["a", "b", "c"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = rg.viewer.save_run(Path(folder) / "seen", [rg.viewer.Sheet.of(reading)])
    ...     [sheet.about["title"] for sheet in rg.viewer.load_run(run)]
    ['zeros']
    """
    folder = Path(folder)
    story = story_of(story, sheets)
    try:
        for name in (MANIFEST, STORY):
            (folder / name).unlink(missing_ok=True)
        for number, sheet in enumerate(sheets):
            _save(folder / f"text-{number}", sheet, progress)
        if story is not None:
            write_json(folder / STORY, story.about, allow_nan=False)
        texts = [
            {"folder": f"text-{number}", "title": sheet.about["title"], "layers": len(sheet.maps)}
            for number, sheet in enumerate(sheets)
        ]
        write_json(folder / MANIFEST, {"format": FORMAT, "version": VERSION, "texts": texts}, allow_nan=False)
    except OSError as error:
        raise RegardError(f"save_run: {folder} cannot be written: {error.strerror or error}.") from error
    return folder


def _save(folder: Path, sheet: Sheet, progress: Callable[[str], None]) -> None:
    """Write one text. Only long texts have cells.

    Files of a text that was saved here before are removed, if this one does not have them.
    """
    from safetensors.torch import save

    write_json(folder / "tokens.json", {name: sheet.about[name] for name in TOKENS}, allow_nan=False)
    write_json(
        folder / "statistics.json",
        {name: part for name, part in sheet.about.items() if name not in TOKENS},
        allow_nan=False,
    )
    written = set()
    for number, (weights, ready) in enumerate(zip(sheet.maps, sheet.ready, strict=True)):
        progress(f"Saving {sheet.about['title']}: layer {number + 1} of {len(sheet.maps)}")
        save_map(path := folder / f"layer-{number:02d}.safetensors", weights)
        written.add(path)
        if ready is not None:
            content = save({"mean": ready[0].contiguous(), "max": ready[1].contiguous()})
            write_whole(path := folder / f"cells-{number:02d}.safetensors", content)
            written.add(path)
    for old in {*folder.glob("layer-*.safetensors"), *folder.glob("cells-*.safetensors")} - written:
        old.unlink()  # of a text that was saved here before, with more layers or longer


@checked
def load_run(folder: str | os.PathLike[str]) -> list[Sheet]:
    """The texts of a saved run, with the maps of all layers; weights are computed from them on demand.

    >>> import tempfile, torch, regard as rg
    >>> from pathlib import Path
    >>> x = torch.zeros(1, 1, 3, 4)
    >>> reading = rg.types.TextReading.of("zeros", {"layers.0": rg.Attention()(x, x, x).weights}, ["a", "b", "c"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rg.viewer.load_run(rg.viewer.save_run(folder, [rg.viewer.Sheet.of(reading)]))[0].maps
    [AttentionMap(1 x 1 heads x 3 queries x 3 keys)]
    """
    folder = Path(folder)
    manifest = read_json(folder / MANIFEST)
    if manifest.get("format") != FORMAT or type(manifest.get("version")) is not int:
        raise RegardError(f"view: {folder} is not a saved run. `regard analyze TEXT --save DIR` writes a run.")
    if manifest["version"] > VERSION:
        raise RegardError(
            f"view: {folder} has format version {manifest['version']}; this version of regard reads up to {VERSION}."
        )
    texts = manifest.get("texts")
    if not isinstance(texts, list) or not all(map(_is_named, texts)):
        raise RegardError(
            f"view: {folder / MANIFEST} is damaged or was edited: texts must be a list of "
            '{"folder": a name in this folder, "layers": a number}.'
        )
    if not texts:
        raise RegardError(f"view: {folder} has no text. `regard analyze TEXT --save DIR` writes a run.")
    return list(_sheets(folder, texts))


def _is_named(text: Any) -> bool:
    """Whether an entry of the manifest names a folder directly below it, and a number of layers."""
    name, layers = (text.get("folder"), text.get("layers")) if isinstance(text, dict) else (None, None)
    is_inside = (
        isinstance(name, str) and "\0" not in name and "\\" not in name and Path(name).name == name not in ("", "..")
    )
    return is_inside and type(layers) is int and 1 <= layers <= MOST_LAYERS


def _sheets(folder: Path, texts: list[dict[str, Any]]) -> Iterator[Sheet]:
    """The checked sheets of the texts of a manifest, one after the other."""
    for text in texts:
        text_folder = folder / text["folder"]
        about = read_json(text_folder / "tokens.json") | read_json(text_folder / "statistics.json")
        numbers = range(text["layers"])
        maps = [load_map(text_folder / f"layer-{number:02d}.safetensors") for number in numbers]
        ready = [_cells(text_folder / f"cells-{number:02d}.safetensors") for number in numbers]
        check_text(text_folder, about, maps, ready)
        yield Sheet(about, maps, ready)


def _cells(path: Path) -> Any:
    """The mean and the greatest weights of the cells in a file; None for a short text, which has no file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.exists():
        return None
    try:
        cells = load_file(path)
        return cells["mean"], cells["max"]
    except (OSError, SafetensorError, KeyError) as error:
        raise RegardError(f"view: {path} cannot be read: {error}.") from None
