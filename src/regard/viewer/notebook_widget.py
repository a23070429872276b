"""The class of the widget. This file imports anywidget, which is optional."""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from regard.base.errors import RegardError
from regard.drawing.color import colormap
from regard.drawing.paper_figure import figure
from regard.drawing.picture import canvas
from regard.stats.numbering import head_name, layer_numbers
from regard.viewer.answers import Answers, NoAnswer
from regard.viewer.findings import joined
from regard.viewer.page import bundle, embed, payload
from regard.viewer.pictures import places_of
from regard.viewer.saved import save_texts
from regard.viewer.sheet import Sheet

#: The most bytes of maps inside the widget.
EMBEDDED_BYTES = 4 << 20
#: The most weights of a text with a static picture: a second or two of work.
PICTURED = 1 << 26


class Regard(anywidget.AnyWidget):
    """The widget: a page that shows every head of some texts.

    `data` is the JSON of the page: all maps, or for long texts {"live": true}, with which the page asks for parts of
    them. Its questions are the paths of `Answers`.
    """

    _esm = bundle("page.js")
    _css = bundle("page.css")
    data = traitlets.Unicode().tag(sync=True)

    def __init__(self, sheets: list[Sheet]) -> None:
        self.answers = Answers(sheets)
        size = sum(math.prod(weights.shape) for sheet in sheets for weights in sheet.maps)
        super().__init__(data=embed({"live": True} if size * 4 > EMBEDDED_BYTES else payload(sheets)))
        self.on_msg(self._asked)

    def __repr__(self) -> str:
        return f"Regard({len(self.answers.sheets)} text{'s' * (len(self.answers.sheets) != 1)})"

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the page to one file, "attention.html"; a path without .html is a folder for `regard view`."""
        return save_texts(path, self.answers.sheets)

    def _repr_mimebundle_(self, **options: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The page, and a picture for places that run no widget: a notebook on GitHub, or one opened later."""
        bundle = super()._repr_mimebundle_(**options)
        if bundle is None or self.picture is None:
            return bundle
        return bundle[0] | {"image/png": self.picture}, bundle[1]

    @cached_property
    def picture(self) -> str | None:
        """A PNG as base64, drawn at the first display; None if there is none."""
        png = static_picture(self.answers.sheets)
        return None if png is None else b64encode(png).decode()

    def _asked(self, _: Any, content: Any, buffers: Any) -> None:
        """Answers a message {id, path} with {id} and one buffer, or with {id, error}."""
        try:
            self.send({"id": content["id"]}, [self.answers.answer(str(content["path"]))])
        except (NoAnswer, RegardError) as reason:
            self.send({"id": content["id"], "error": str(reason)})


def static_picture(sheets: Sequence[Sheet]) -> bytes | None:
    """A PNG of the first text, or of the first with cross-attention, for places where no page can run.

    It shows the words of the link that the page opens with, and all heads; of patches their image and weights over it.
    None without matplotlib, and for long texts, whose weights take too long to pool.
    """
    sheet = next((sheet for sheet in sheets if sheet.about["queries"]), sheets[0])
    about, maps = sheet.about, sheet.maps
    if find_spec("matplotlib") is None or sum(math.prod(weights.shape) for weights in maps) > PICTURED:
        return None
    if about["picture"]:
        return canvas("show").png(image_figure(sheet))
    names = [layer["name"] for layer in about["layers"]]
    tokens = about["queries"] or about["tokens"], about["tokens"]
    panels = ["words", "map", "heads"] if sum(weights.shape[1] for weights in maps) > 1 else ["words", "map"]
    start = about["start"]
    place = {"layer": layer_numbers(names)[start["layer"]], "head": start["head"], "query": start["query"]}
    drawn = figure(dict(zip(names, maps, strict=True)), tokens, panels, width=17, caption=_sentence(about), **place)
    return canvas("show").png(drawn)


def image_figure(sheet: Sheet) -> Any:
    """An image, and beside it the weights of the query and head that the page opens with, at its patches.

    Of several images, or frames of a video, it is the one with the most weight. The spectrogram of a sound has one row
    of patches, and both pictures are drawn half as high as wide. Dark is the largest weight; colors show square roots.
    """
    from matplotlib.image import imread

    about, start = sheet.about, sheet.about["start"]
    row = sheet.maps[start["layer"]].tile(rows=[start["query"]])[0, start["head"], 0].float().cpu()
    panel = max(about["picture"]["panels"], key=lambda panel: float(row[places_of(panel)].sum()))
    weights, I, J = row[places_of(panel)], panel["rows"], panel["columns"]
    drawn = canvas("show").new_figure(17 / 2.54, 8.5 / 2.54)
    image, patches = drawn.subplots(1, 2)
    kind, _, data = panel["image"].partition(",")
    pixels = imread(BytesIO(b64decode(data)), format="png" if "png" in kind else "jpeg")
    image.imshow(pixels, extent=(0, J, I, 0), aspect="auto")
    patches.imshow(weights.view(I, J).sqrt().numpy(), cmap=colormap(), vmin=0, extent=(0, J, I, 0), aspect="auto")
    query = (about["queries"] or about["tokens"])[start["query"]]
    head = head_name(layer_numbers([layer["name"] for layer in about["layers"]])[start["layer"]], start["head"])
    patches.set_title(f"{head}: what “{query}” attends to, at most {float(weights.max()):.2g}", fontsize=8)
    for axes in (image, patches):
        axes.set(xticks=[], yticks=[])
        axes.set_box_aspect(panel["height"] / panel["width"] if I > 1 else 0.5)
    drawn.supxlabel(_sentence(about), fontsize=7, wrap=True)
    return drawn


def _sentence(about: dict[str, Any]) -> str:
    """What the page says first about a text."""
    names = ", ".join(name for name in (about["model"], f"“{about['title']}”" if about["title"] else "") if name)
    lead = joined(about["lead"]["sentence"]) if about["lead"] else ""
    return f"{names}. {lead}".lstrip(". ")
