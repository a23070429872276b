"""The page in a notebook: short texts travel with it, tiles of long ones are computed when it asks for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from regard.errors import RegardError
from regard.maps import AttentionMap
from regard.stats import Reading
from regard.viewer.answers import Answers, NoAnswer
from regard.viewer.page import bundle, embed, payload
from regard.viewer.sheet import Sheet, page_folds, sheets_of

if TYPE_CHECKING:
    from regard.hf.capture.model_maps import Watched

#: Bytes of maps that travel with the page.
TRAVELLING = 4 << 20
#: Parts of a model, in the order of their tabs.
TITLES = {"encoder": "Encoder", "decoder": "Decoder", "cross": "Decoder to encoder"}


@cache
def widget_class() -> type[Any]:
    """The widget; made at the first use, for anywidget is optional."""
    try:
        import anywidget
        import traitlets
    except ImportError as error:
        raise RegardError(f"show: {error.name} is missing. Install it: pip install 'regard[view]'.") from None

    class Regard(anywidget.AnyWidget):
        """Every head of some texts, to be looked at."""

        _esm = bundle("page.js")
        _css = bundle("page.css")
        data = traitlets.Unicode().tag(sync=True)

        def __init__(self, sheets: list[Sheet]) -> None:
            self.answers = Answers(sheets)
            size = sum(math.prod(weights.shape) for sheet in sheets for weights in sheet.maps)
            super().__init__(data=embed({"live": True} if size * 4 > TRAVELLING else payload(sheets)))
            self.on_msg(self._asked)

        def _asked(self, _: Any, content: Any, buffers: Any) -> None:
            """A message {id, path} is answered by {id} and one buffer, or by {id, error}."""
            try:
                self.send({"id": content["id"]}, [self.answers.answer(str(content["path"]))])
            except (NoAnswer, RegardError) as reason:
                self.send({"id": content["id"], "error": str(reason)})

    return Regard


def show_texts(texts: Sequence[Reading | Sheet]) -> Any:
    """A widget of some readings."""
    if not texts:
        raise RegardError("show: there is no text to show.")
    return widget_class()(sheets_of(texts))


def show_map(weights: AttentionMap, tokens: Sequence[str] | None, queries: Sequence[str] | None, batch: int) -> Any:
    """A widget of one map."""
    return show_texts([_reading("Attention", {"attention": weights}, tokens, queries, batch)])


def show_watched(seen: Watched, tokens: Sequence[str] | None, targets: Sequence[str] | None, batch: int) -> Any:
    """A widget of a model: a text for each part, the encoder on `tokens`, the decoder on `targets`.

    Of several calls, as generation makes them, the last one with exactly these tokens is shown.
    """
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
        readings.append(_reading(title, maps, keys, queries, batch))
    known = {name for part in TITLES for name in getattr(seen, part)}
    others = {name: seen[name] for name in seen if name not in known}
    if others:
        readings.insert(0, _reading("Model", others, tokens, None, batch))
    return show_texts(readings)


def _call_that_read(view: Watched, tokens: Sequence[str] | None) -> tuple[int, Sequence[str] | None]:
    """The last call with these tokens, numbered from the end, and its tokens: the last generated one was never read."""
    if not view or tokens is None:
        return -1, tokens
    sizes = [weights.shape[3] for weights in view.calls(0)]
    for number in range(-1, -len(sizes) - 1, -1):
        if sizes[number] == len(tokens):
            return number, tokens
    return -1, tokens[:-1] if len(sizes) > 1 and sizes[-1] == len(tokens) - 1 else tokens


def _reading(title: str, maps: dict[str, AttentionMap], tokens: Any, queries: Any, batch: int) -> Reading:
    return Reading.of(title, maps, tokens, queries=queries, batch=batch, also=page_folds)
