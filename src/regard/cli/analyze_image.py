"""`regard analyze --image` reads an image with a vision or image-text model, and saves the page with the picture."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from regard.base.errors import MissingPackage, RegardError
from regard.cli.analyze import save_page
from regard.cli.options import AnalyzeOptions
from regard.cli.outputs import check_folder, shown_steps
from regard.hf.image_reader import ImageReader
from regard.stats.numbering import head_name
from regard.stats.roles import Role
from regard.viewer import Sheet, picture_sheets
from regard.viewer.pictures import places_of

#: Lines about roles and about strongest links.
NUM_LINES = 6
#: The options of `regard analyze` that say nothing about an image, by their fields.
OF_TEXTS = {"words": "--word", "verify_all": "--verify-all", "all_figures": "--all-figures"} | {
    name: f"--{name}" for name in ("layers", "length", "figures", "probe", "table", "importance", "story")
}


def run(options: AnalyzeOptions) -> None:
    """Read the image, print what the heads attend to, and write the page of --save."""
    _check(options)
    assert options.image is not None
    picture, errors = _open(options.image), Console(stderr=True)
    with shown_steps(errors, f"Reading with {options.model}"):
        reader = ImageReader.load(options.model)
        result = reader.read(picture, options.texts[0] if options.texts else None)
        sheets = picture_sheets(result.seen, result.tokens, image=result.image, null=result.null)
    if options.as_json:
        print(json.dumps([_as_data(sheet) for sheet in sheets if sheet.about["picture"]], ensure_ascii=False, indent=1))
    else:
        for sheet in sheets:
            _print(Console(), options.image.name, sheet)
    save_page(options, lambda: sheets, errors)


def _check(options: AnalyzeOptions) -> None:
    """Refuse options that say nothing about an image, and several texts."""
    check_folder("analyze", "--save", options.save)
    given = [option for name, option in OF_TEXTS.items() if getattr(options, name)]
    if given:
        raise RegardError(f"analyze: {given[0]} is about texts. With --image give --model DIR, --save DIR or --json.")
    if len(options.texts) > 1:
        raise RegardError(f"analyze: one image and at most one text can be read, got {len(options.texts)} texts.")


def _open(path: Path) -> Any:
    """The image of a file, as one of pillow in RGB."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise MissingPackage("analyze --image", "pillow", "view") from None
    try:
        return Image.open(path).convert("RGB")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not an image that pillow can read"
        raise RegardError(f"analyze: --image {path} cannot be read: {reason}.") from error


def _print(console: Console, name: str, sheet: Sheet) -> None:
    """Print sizes, roles and strongest links of one text of the page; nothing if it has no picture."""
    if sheet.about["picture"] is None:
        return
    grids = {(panel["rows"], panel["columns"]) for panel in sheet.about["picture"]["panels"]}
    heads = [len(layer["heads"]) for layer in sheet.about["layers"]]
    sizes = " and ".join(f"{rows} x {columns}" for rows, columns in sorted(grids))
    console.print(Text.assemble((f"{name}  ", "bold"), f"{sheet.about['title']}: {sizes} patches"))
    console.print(Text(f"{len(heads)} layers of {max(heads)} heads, {len(sheet.about['tokens'])} tokens", style="dim"))
    for line in [*role_lines(sheet), *link_lines(sheet)]:
        console.print(Text(line))


def role_lines(sheet: Sheet) -> Iterator[str]:
    """The roles with the highest scores, a sentence each."""
    roles = [
        Role(role["kind"], layer["number"], head, role["score"], role["null"], True, role["chance"])
        for layer in sheet.about["layers"]
        for head, about in enumerate(layer["heads"])
        for role in about["roles"]
    ]
    for role in sorted(roles, key=lambda role: -role.score)[:NUM_LINES]:
        yield role.sentence.replace("shuffled text", "shuffled patches")
    if sheet.about["has_roles"] and not roles:
        yield "No head has a role on the grid (same row, same column, a neighbor)."


def link_lines(sheet: Sheet) -> Iterator[str]:
    """What the first token that is shown attends to most, in each of the last layers."""
    tokens, query = sheet.about["tokens"], sheet.about["start"]["query"]
    places = [place for panel in sheet.about["picture"]["panels"] for place in places_of(panel)]
    name = (sheet.about["queries"] or tokens)[query]
    found = []
    for layer, weights in zip(sheet.about["layers"], sheet.maps, strict=True):
        rows = weights[0, :, query][:, places]
        head, patch = divmod(int(rows.argmax()), len(places))
        found.append((float(rows[head, patch]), head_name(layer["number"], head), tokens[places[patch]]))
    for weight, head, patch in sorted(found, reverse=True)[:NUM_LINES]:
        yield f"{name} attends most to {patch} ({head}, {weight:.2f})."


def _as_data(sheet: Sheet) -> dict[str, Any]:
    """The tokens, the patches and the roles of a sheet with a picture, as plain data."""
    panels = [
        {name: panel[name] for name in ("rows", "columns", "start")} for panel in sheet.about["picture"]["panels"]
    ]
    roles = [
        {"layer": layer["number"], "head": head, **role}
        for layer in sheet.about["layers"]
        for head, about in enumerate(layer["heads"])
        for role in about["roles"]
    ]
    return {"title": sheet.about["title"], "tokens": sheet.about["tokens"], "panels": panels, "roles": roles}
