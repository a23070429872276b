"""The page as a notebook widget. It contains the maps of short texts; for long texts it requests tiles."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from regard.errors import MissingPackage, RegardError
from regard.maps import AttentionMap
from regard.stats import TextReading
from regard.viewer.answers import Answers, NoAnswer
from regard.viewer.figures import static_picture
from regard.viewer.page import bundle, embed, payload
from regard.viewer.picture_sheets import picture_sheets
from regard.viewer.sheet import Sheet, page_folds, sheets_of

if TYPE_CHECKING:
    from regard.hf.capture.model_maps import WatchedAttention

#: The most bytes of maps inside the widget.
EMBEDDED_BYTES = 4 << 20
#: The parts of a model, in the order of their tabs.
TITLES = {"encoder": "Encoder", "decoder": "Decoder", "cross": "Decoder to encoder"}


@cache
def widget_class() -> type[Any]:
    """The class of the widget. It is made at the first use, because anywidget is optional."""
    try:
        import anywidget
        import traitlets
    except ModuleNotFoundError as error:
        raise MissingPackage("show", error.name or "", "view") from None

    class Regard(anywidget.AnyWidget):
        """Shows every head of some texts."""

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

    return Regard


def show_texts(texts: Sequence[TextReading | Sheet]) -> Any:
    """The widget of readings."""
    if not texts:
        raise RegardError("show: there is no text to show.")
    return widget_class()(sheets_of(texts))


def show_map(weights: AttentionMap, tokens: Sequence[str] | None, queries: Sequence[str] | None, batch: int) -> Any:
    """The widget of one map."""
    return show_texts([_reading("Attention", {"attention": weights}, tokens, queries, batch)])


def show_watched(
    seen: WatchedAttention,
    tokens: Sequence[str] | None,
    targets: Sequence[str] | None,
    batch: int,
    image: Any = None,
    grid: Any = None,
) -> Any:
    """The widget of a watched model: one text per part. The encoder reads `tokens`, the decoder reads `targets`.

    A model that read an image, a video or a sound is shown with it (`picture_sheets`).

    If a module was called several times, as in generation, the last call with exactly these tokens is shown.
    """
    if seen.inputs.is_pictured or image is not None or grid is not None:
        return show_texts(picture_sheets(seen, tokens, targets, batch, image, grid))
    step, decoded = _call_that_read(seen.decoder, tokens if targets is None else targets)
    readings = []
    for part, title in TITLES.items():
        view, keys, queries = getattr(seen, part), tokens, None
        if not view:
            continue
        if part == "encoder":
            call, keys = _call_that_read(view, tokens)
        else:
            call = step
            keys = decoded if part == "decoder" else tokens
        maps = {name: view.calls(name)[call] for name in view}
        if part == "cross" and targets is not None and decoded is not None:
            queries = decoded[-next(iter(maps.values())).shape[2] :]
        readings.append(_reading(title, maps, keys, queries, batch, seen))
    known = {name for part in TITLES for name in getattr(seen, part)}
    others = {name: seen[name] for name in seen if name not in known}
    if others:
        readings.insert(0, _reading("Model", others, tokens, None, batch, seen))
    return show_texts(readings)


def _call_that_read(view: WatchedAttention, tokens: Sequence[str] | None) -> tuple[int, Sequence[str] | None]:
    """The number, from the end, of the last call with these tokens, and the tokens that it read.

    In generation the model never reads the last token it generated.
    """
    if not view or tokens is None:
        return -1, tokens
    sizes = [weights.shape[3] for weights in view.calls(0)]
    for number in range(-1, -len(sizes) - 1, -1):
        if sizes[number] == len(tokens):
            return number, tokens
    return -1, tokens[:-1] if len(sizes) > 1 and sizes[-1] == len(tokens) - 1 else tokens


def _reading(
    title: str,
    maps: dict[str, AttentionMap],
    tokens: Any,
    queries: Any,
    batch: int,
    seen: WatchedAttention | None = None,
) -> TextReading:
    options = {"queries": queries, "batch": batch, "also": page_folds}
    options |= {} if seen is None else {"model": seen.model, "kinds": seen.kinds}
    return TextReading.of(title, maps, tokens, **options)
