"""Saves texts with their maps in a folder, a saved run, and loads it. The files can be read without this package.

manifest.json                 {"format": "regard run", "version": 1, "texts": [{"folder", "title", "layers"}]}
text-0/tokens.json            {"title", "tokens", "queries" (null: the tokens), "special"}
text-0/statistics.json        the statistics, roles and findings that the page shows
text-0/layer-00.safetensors   q, k and r, with the pieces in the header (regard.maps.stored)
text-0/cells-00.safetensors   only for long texts: the mean and the greatest weight of each cell
story.json                    only with a story: {"title", "steps": [{"link", "sentence"}]}
index.html                    the page as one file
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.base.texts.files import read_json
from regard.base.whole_files import write_whole
from regard.maps.stored import load_map, save_map
from regard.stats.text_reading import TextReading
from regard.viewer.page import write_page
from regard.viewer.saved_checks import check_text
from regard.viewer.sheet import Sheet, sheets_of
from regard.viewer.story import Story, story_of

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
            _write(folder / STORY, story.about)
        texts = [
            {"folder": f"text-{number}", "title": sheet.about["title"], "layers": len(sheet.maps)}
            for number, sheet in enumerate(sheets)
        ]
        _write(folder / MANIFEST, {"format": FORMAT, "version": VERSION, "texts": texts})
    except OSError as error:
        raise RegardError(f"save_run: {folder} cannot be written: {error.strerror or error}.") from error
    return folder


def _save(folder: Path, sheet: Sheet, progress: Callable[[str], None]) -> None:
    from safetensors.torch import save

    _write(folder / "tokens.json", {name: sheet.about[name] for name in TOKENS})
    _write(folder / "statistics.json", {name: part for name, part in sheet.about.items() if name not in TOKENS})
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
    for text in texts:
        text_folder = folder / text["folder"]
        about = read_json(text_folder / "tokens.json") | read_json(text_folder / "statistics.json")
        numbers = range(text["layers"])
        maps = [load_map(text_folder / f"layer-{number:02d}.safetensors") for number in numbers]
        ready = [_cells(text_folder / f"cells-{number:02d}.safetensors") for number in numbers]
        check_text(text_folder, about, maps, ready)
        yield Sheet(about, maps, ready)


def _cells(path: Path) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.exists():
        return None
    try:
        cells = load_file(path)
        return cells["mean"], cells["max"]
    except (OSError, SafetensorError, KeyError) as error:
        raise RegardError(f"view: {path} cannot be read: {error}.") from None


def _write(path: Path, data: dict[str, Any]) -> None:
    write_whole(path, json.dumps(data, ensure_ascii=False, indent=1, allow_nan=False) + "\n")
