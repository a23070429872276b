"""The page as a notebook widget. It contains the maps of short texts; for long texts it requests tiles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from regard.base.errors import MissingPackage, RegardError, errors_named
from regard.maps import AttentionMap
from regard.stats.text_reading import TextReading
from regard.viewer.pictures import picture_sheets
from regard.viewer.saved import save_texts as save_texts  # lower layers reach it here
from regard.viewer.sheet import Sheet, page_reductions, sheets_of

if TYPE_CHECKING:
    from regard.attribution.result import Attribution
    from regard.hf.capture.model_maps import WatchedAttention

#: The parts of a model, in the order of their tabs.
TITLES = {"encoder": "Encoder", "decoder": "Decoder", "cross": "Decoder to encoder"}


def widget_class() -> type[Any]:
    """The class of the widget. It is imported at the first use, because anywidget is optional."""
    try:
        from regard.viewer.notebook_widget import Regard
    except ModuleNotFoundError as error:
        raise MissingPackage("show", error.name or "", "view") from None
    return Regard


def show_texts(texts: Sequence[TextReading | Sheet]) -> Any:
    """The widget of readings."""
    if not texts:
        raise RegardError("show: there is no text to show.")
    return widget_class()(sheets_of(texts))


def show_maps(
    maps: Sequence[AttentionMap], tokens: Sequence[str] | None, queries: Sequence[str] | None, batch: int
) -> Any:
    """The widget of the maps of some layers: `rg.show`. `tokens` are those of the keys, `queries` of the queries."""
    named = {"attention" if len(maps) == 1 else f"layers.{n}": weights for n, weights in enumerate(maps)}
    return show_texts([_reading("Attention", named, tokens, queries, batch)])


def show_attribution(
    found: Attribution, tokens: Sequence[str] | None, targets: Sequence[str] | None, batch: int
) -> Any:
    """The widget of an attribution: one text per part of the model, with a map for each layer."""
    is_pair = "cross" in found.parts.values()
    readings = []
    for part, title in TITLES.items():
        maps = {name: weights for name, weights in found.items() if found.parts.get(name) == part}
        if maps:
            keys = targets if is_pair and part == "decoder" else tokens
            queries = targets if part == "cross" else None
            name = f"{title}: {found.method} of {found.target}" if is_pair else f"{found.method} of {found.target}"
            readings.append(_reading(name, maps, keys, queries, batch))
    return show_texts(readings)


def watched_texts(
    seen: WatchedAttention,
    tokens: Sequence[str] | None,
    targets: Sequence[str] | None,
    batch: int,
    image: Any = None,
    grid: Any = None,
) -> Sequence[TextReading | Sheet]:
    """The texts of a watched model, one for each part.

    A model that read an image, a video or a sound has it beside its text (`picture_sheets`).

    If a module was called several times, as in generation, the last call with as many keys as tokens is shown.
    """
    for given in (tokens, targets):
        _check_tokens(given)
    if seen.inputs.is_pictured or image is not None or grid is not None:
        return picture_sheets(seen, tokens, targets, batch, image, grid)
    # the decoder and its cross-attention ran together: the same call of both
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
        maps = {name: view.calls(name)[call] for name in view.names}
        if part == "cross" and targets is not None and decoded is not None:
            queries = decoded[-next(iter(maps.values())).shape[2] :]
        readings.append(_reading(title, maps, keys, queries, batch, seen))
    known = {name for part in TITLES for name in getattr(seen, part).names}
    others = {name: seen[name] for name in seen.names if name not in known}
    if others:
        readings.insert(0, _reading("Model", others, tokens, None, batch, seen))
    return readings


def _check_tokens(tokens: Any) -> None:
    """Refuse ids, a whole text and a tokenizer in the place of the tokens of a text."""
    is_listed = isinstance(tokens, Iterable) and not isinstance(tokens, str)
    if tokens is None or (is_listed and all(isinstance(token, str) for token in tokens)):
        return
    raise RegardError(
        f"seen: tokens are a list of texts, one for each token, got {type(tokens).__name__}. Of ids these are "
        "tokenizer.convert_ids_to_tokens(ids[0]); with watch(model, tokenizer) none need be given."
    )


def _call_that_read(view: WatchedAttention, tokens: Sequence[str] | None) -> tuple[int, Sequence[str] | None]:
    """The number, from the end, of the last call with as many keys as these tokens, and the tokens that it read.

    If no call has so many keys, it is -1, the last call. In generation the model never reads the last token that it
    generated, so the last call may have one key less: then the last token is left out.
    """
    if not view or tokens is None:
        return -1, tokens
    sizes = [weights.shape[3] for weights in view.calls(view.names[0])]
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
    """The reading of some maps, with what the page needs of them. Errors name the function that the user called.

    `tokens` are those of the keys and `queries` those of the queries, None where they are not known; `batch` is the
    entry that is shown. `seen` knows the name of the model and the kinds of its layers; None for maps without a model.
    """
    caller = "show" if seen is None else "seen"
    options = {"queries": queries, "batch": batch, "also": page_reductions}
    options |= {} if seen is None else {"model": seen.model, "kinds": seen.kinds}
    with errors_named("profile", caller):
        return TextReading.of(title, maps, tokens, **options)
