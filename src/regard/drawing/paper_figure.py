"""`figure`: words with arcs, maps, heads, alignment and statistics at the size that they have in a paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from torch import Tensor

from regard.base.checks import Count, checked
from regard.base.errors import RegardError, nearest
from regard.drawing.color import ScaleName, WeightScale
from regard.drawing.panels import label, token_lists
from regard.drawing.panels import panels as chosen_panels
from regard.drawing.paper import NORMAL, PAGE, PANELS, SHORTEST, TALLEST, Content, Drawn, Layer, Paper
from regard.maps import AttentionMap
from regard.maps.changed_map import ShareMap
from regard.stats.numbering import layer_numbers
from regard.stats.text_reading import TextReading

if TYPE_CHECKING:
    from regard.drawing.canvas import PaperFigure
    from regard.drawing.panels import Tokens
    from regard.hf import WatchedAttention

#: The first line of a table of numbers.
HEADER = ("panel", "layer", "head", "quantity", "query", "query token", "key", "key token", "value")
#: Centimeters: the widths of one and of two columns of a paper, and what is accepted.
NARROWEST, LARGEST = 4.0, 60.0
#: The word whose row is drawn by default.
PRONOUN = "it"


@checked
def figure(
    source: TextReading | WatchedAttention | AttentionMap | Tensor | Any,
    tokens: Tokens = None,
    panels: Sequence[str] = ("map",),
    *,
    layer: Count | None = None,
    head: Count | Literal["mean"] | None = None,
    query: Count | str | None = None,
    width: float = 8.5,
    scale: ScaleName = "sqrt",
    statistic: str = "entropy",
    gold: Sequence[tuple[int, int, bool]] = (),
    caption: str | None = None,
) -> PaperFigure:
    """A figure for a paper, `width` cm wide (8.5 and 17 are one and two columns), with 7 and 8 pt letters.

    `source` is a `TextReading`, the result of `rg.watch`, an `AttentionMap`, or weights (I, J), (H, I, J) or
    (1, H, I, J). `tokens` are one list, or a pair (query tokens, key tokens); a reading has its own. The panels are:

    - "words": the tokens, and an arc from `query` (a word or a position) to each key, thicker for larger weights;
    - "map": the weights of `head` of `layer`, a row for each query;
    - "heads": a small map of each head, a row for each layer;
    - "alignment": the mean of the heads of each layer, with `gold` links (query, key, sure) outlined;
    - "statistics": one `statistic` of each head.

    `layer` is the number of the layer in the model. Without `query` it is the token "it", or one in the middle.
    Without `head`, the head with the largest weight from the query to a token that is neither first nor a neighbor.
    A figure is at most 24.7 cm high, as on a page of A4: its panels get smaller, an alignment shows its first layers.
    Weights have colors by a "linear", "sqrt" or "log" `scale`. Without a `caption`, the caption names the text, layer
    and head, and says what the panels show; `caption=""` leaves it out. `scale`, letters, colors and caption are those
    of the figure sheet of the page.

    The result is a figure of matplotlib. `figure.save(path)` writes a .pdf or .svg with text as text, a .png with 300
    dots to an inch, or a .csv of the weights shown; `save(path, transparent=True)` has no white ground. `figure.rows`
    are the lines of the .csv. Raises a `RegardError` for unknown panels, layers, heads and words.

    >>> import torch, regard as rg
    >>> weights = torch.tensor([[0.9, 0.1], [0.3, 0.7]])
    >>> figure = rg.figure(weights, ["hello", "world"], panels=["words", "map"], query="world")
    >>> f"{2.54 * figure.get_figwidth():.1f} cm", figure.caption[:27]
    ('8.5 cm', 'Layer 0, head 0. (a) What “')
    >>> figure.rows[1]
    ('words', 0, 0, 'weight', 1, 'world', 0, 'hello', 0.30000001192092896)
    """
    names = _panels(panels)
    if not NARROWEST <= width <= LARGEST:
        raise RegardError(
            f"figure(width={width:g}): the width is in cm, between {NARROWEST:g} and {LARGEST:g}. One column of a "
            "paper is 8.5 cm wide, two are 17 cm."
        )
    shown = _content(source, tokens, layer, head, query, statistic, gold)
    tallest = TALLEST
    # a figure that is too high is drawn again with smaller panels, until it fits a page or they are at their least
    # height
    while (paper := _paper(shown, names, width, scale, caption, tallest)).y > PAGE and tallest > SHORTEST:
        tallest *= min(0.85, PAGE / paper.y)
    return paper.finish()


def _paper(
    shown: Content, names: Sequence[str], width: float, scale: ScaleName, caption: str | None, tallest: float
) -> Paper:
    """The panels, `width` cm wide and none taller than `tallest` points, their legend and the caption.

    `names` are the panels to draw. Without a `caption` one is written.
    """
    paper = Paper(width / 2.54 * 72, WeightScale(scale, len(shown.keys)), tallest)
    drawn = _draw(paper, shown, names)
    if any(panel.has_weights for panel in drawn):
        quantity = "share of |weight|" if shown.chosen.is_share else "weight"
        paper.ramp(paper.scale.ticks, f"{quantity}, {paper.scale.label}")
    made = paper.figure
    made.caption = _caption(shown, drawn, paper.scale) if caption is None else caption
    made.rows = [HEADER, *(row for panel in drawn for row in panel.rows)]
    if made.caption:
        paper.y += 4
        paper.paragraph(made.caption)
    return paper


def _panels(names: Any) -> list[str]:
    """The names of the panels as a list, each once; unknown ones are refused."""
    names = [names] if isinstance(names, str) else list(names)
    if not names:
        raise RegardError(f"figure: the list of panels is empty. {nearest('', PANELS)}")
    for name in names:
        if name not in PANELS:
            raise RegardError(f"figure: there is no panel {name!r}. {nearest(str(name), PANELS)}")
    return list(dict.fromkeys(names))


#: Titles of panels that do not depend on what is shown; `_title` has the others.
TITLES = {"heads": "All heads", "alignment": "Alignment"}


def _draw(paper: Paper, shown: Content, names: Sequence[str]) -> list[Drawn]:
    """The panels under their titles, side by side where there is room.

    A panel does not know its place: it is drawn at the left edge from the top, and then moved. `top` is that of the row
    of panels, `below` the lowest end of all panels, `left` where the next one of this row begins; all in points.
    """
    drawn, top, below, left = [], paper.y, paper.y, 0.0
    for at, name in enumerate(names):
        title = f"{'abcde'[at]}  {_title(shown, name)}" if len(names) > 1 else _title(shown, name)
        before = set(paper.axes.get_children())
        paper.write(title, 0, 5, NORMAL, weight="bold")
        paper.y = 14
        drawn.append(PANELS[name](paper, shown))
        width = max(drawn[-1].width, paper.text_width(title, NORMAL, bold=True))
        if left and left + width > paper.width:  # no room: a new row
            top, left = below, 0.0
        paper.move([artist for artist in paper.axes.get_children() if artist not in before], left, top)
        below, left = max(below, top + paper.y + 10), left + width + 20
    paper.y = below
    return drawn


def _title(shown: Content, name: str) -> str:
    """The title of a panel."""
    titles = {"words": f"What “{shown.queries[shown.query]}” attends to", "map": f"Map of {shown.head_label}"}
    titles["statistics"] = f"{shown.statistic[:1].upper()}{shown.statistic[1:]} of every head"
    return titles.get(name, TITLES.get(name, name))


def _caption(shown: Content, drawn: Sequence[Drawn], scale: WeightScale) -> str:
    """The caption: the model and the text, the head if a panel shows one, what each panel says, and the scale."""
    said = [f"({'abcde'[at]}) {panel.said}" if len(drawn) > 1 else panel.said for at, panel in enumerate(drawn)]
    if any(panel.has_weights for panel in drawn):
        shares = "Weights have signs; shares of |weight|" if shown.chosen.is_share else "Weights"
        said.append(f"{shares} are shown on {scale.said}.")
    end = "" if shown.title.endswith((".", "!", "?", "…")) else "."
    about = f"“{shown.title}”{end} " if shown.title else ""
    about = f"{shown.model}, {about}" if shown.model and about else f"{shown.model}. " if shown.model else about
    if any(panel.is_of_head for panel in drawn):
        about += f"{shown.head_label[:1].upper()}{shown.head_label[1:]}. "
    return about + " ".join(said)


def _content(
    source: Any,
    tokens: Any,
    layer: int | None,
    head: int | Literal["mean"] | None,
    query: int | str | None,
    statistic: str,
    gold: Sequence[tuple[int, int, bool]],
) -> Content:
    """What is to be drawn: the layers of the source, and the chosen layer, head and query.

    `is_cross` is True unless the queries are the last keys. In self-attention the first token is not notable.
    """
    of = _material(source, tokens)
    keys, queries = of.keys, of.queries
    is_cross = len(keys) < len(queries) or list(keys[len(keys) - len(queries) :]) != list(queries)
    at = _query(query, queries, of.ordinary)
    chosen, of_head = _head(of.layers, layer, head, at, {*of.special, *(() if is_cross else (0,))}, is_cross)
    labels = [label(token) for token in queries], [label(token) for token in keys]
    return Content(
        of.title, of.model, of.layers, (queries, keys), *labels, is_cross, chosen, of_head, at, statistic, gold
    )


class Material(NamedTuple):
    """What a source holds: its layers, the tokens, and the indices of special keys and of ordinary queries.

    Without `ordinary` all queries are. The names of the text and of the model are empty where they are not known.
    """

    layers: Sequence[Layer]
    queries: Sequence[str]
    keys: Sequence[str]
    title: str = ""
    model: str = ""
    special: frozenset[int] = frozenset()
    ordinary: Sequence[int] = ()


def _material(source: Any, tokens: Any) -> Material:
    """What the source of `figure` holds: a `TextReading`, one map, several maps by layer, or an array of weights.

    Weights without shares (with signs, or rows that do not sum to 1) are shown as shares of |weight|.
    """
    if isinstance(source, TextReading):
        if tokens is not None:
            raise RegardError("figure: a TextReading has its own tokens. Leave out tokens=.")
        profile, special = source.profile, frozenset(source.profile.special)
        numbers = [layer.number for layer in profile.layers]
        layers = _layers(source.maps, numbers, lambda: source)
        about = source.title, source.model, special, profile.ordinary
        return Material(layers, profile.query_tokens, profile.tokens, *about)
    maps = {"layers.0": source} if isinstance(source, AttentionMap) else getattr(source, "maps", source)
    if not isinstance(maps, Mapping):
        return _dense_layer(source, tokens)
    if not maps:
        raise RegardError("figure: there are no maps. Call the model inside of `with rg.watch(model) as seen:`.")
    B, _, I, J = next(iter(maps.values())).shape
    if B != 1:
        raise RegardError(
            f"figure: the maps have {B} texts, and a figure shows one. Choose it: "
            "rg.figure(rg.types.TextReading.of(title, seen.maps, tokens, batch=0))."
        )
    maps = {name: weights if weights.has_shares else weights.shares() for name, weights in maps.items()}
    named = chosen_panels("figure", next(iter(maps.values())), tokens, 0, 0, 1).queries  # checks the tokens
    queries, keys = _sides(tokens, named, I, J)
    # computed once, and only if a panel shows statistics
    reading = cache(lambda: TextReading.of("", dict(maps), keys, queries=queries))
    return Material(_layers(maps, layer_numbers(maps), reading), queries, keys)


def _layers(
    maps: Mapping[str, AttentionMap], numbers: Sequence[int], reading: Callable[[], TextReading]
) -> list[Layer]:
    """A layer for each map; the profile of `reading` is asked for statistics only."""

    def layer(at: int, weights: AttentionMap) -> Layer:
        """The layer at an index; its weights are computed when a panel asks for them."""
        return Layer(
            numbers[at],
            weights.shape[1],
            lambda head, query: _numpy(weights[0, head, query]),
            lambda head, largest: _cells(weights, head, largest),
            lambda: {name: values.tolist() for name, values in reading().profile.layers[at].values.items()},
            isinstance(weights, ShareMap) and weights.source.is_signed,
        )

    return [layer(at, weights) for at, weights in enumerate(maps.values())]


def _sides(tokens: Any, named: Any, I: int, J: int) -> tuple[list[str], list[str]]:
    """The tokens of queries and keys, as texts; their positions without tokens.

    `named` is None without tokens. Fewer queries than keys are the last ones, as after a cache.
    """
    if named is None:
        return [str(i + max(J - I, 0)) for i in range(I)], [str(j) for j in range(J)]
    sides = token_lists(tokens)
    return [str(token) for token in sides[0]], [str(token) for token in sides[-1]]


def _dense_layer(source: Any, tokens: Any) -> Material:
    """The one layer of an array of weights. It has no statistics, because they need a map."""
    shown = chosen_panels("figure", source, tokens, None, 0)
    queries, keys = _sides(tokens, shown.queries, *shown.shape)
    layer = Layer(
        0,
        len(shown.cells),
        lambda head, query: _numpy(shown.cells[head, query]),
        lambda head, largest: _cells(shown.cells, head, largest),
    )
    return Material([layer], queries, keys)


def _cells(weights: AttentionMap | Tensor, head: int | str, largest: int) -> np.ndarray[Any, Any]:
    """The weights of one head, or of the "mean", pooled to at most `largest` cells per side."""
    of_head: Any = "mean" if head == "mean" else int(head)
    return _numpy(chosen_panels("figure", weights, None, of_head, 0, largest).cells[0])


def _numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().float().cpu().numpy()


def _query(query: int | str | None, tokens: Sequence[str], ordinary: Sequence[int]) -> int:
    """The position of the query whose row is drawn: a number or a word that is checked, by default "it".

    Words are compared without the marks of tokenizers. Without "it" the middle one of the ordinary tokens is taken.
    """
    words = [token.removeprefix("##").lstrip("Ġ▁").strip() for token in tokens]
    if isinstance(query, int):
        if query >= len(tokens):
            raise RegardError(f"figure(query={query}): there are {len(tokens)} queries, 0 to {len(tokens) - 1}.")
        return query
    if query is None:
        ordinary = ordinary or range(len(tokens))
        return words.index(PRONOUN) if PRONOUN in words else ordinary[len(ordinary) // 2]
    found = [at for at, word in enumerate(words) if word.lower() == query.strip().lower() or tokens[at] == query]
    if not found:
        raise RegardError(f"figure(query={query!r}): there is no such token. {nearest(query, set(words))}")
    return found[0]


def _head(
    layers: Sequence[Layer], number: int | None, head: Any, query: int, aside: set[int], is_cross: bool
) -> tuple[int, int | str]:
    """The index of the layer, and the head: those with the largest weight from the query to a notable key.

    `number` and `head` fix one of them or both. Not notable are the keys in `aside`, and, unless `is_cross`, the word
    itself and its neighbors, which many heads attend to in any text.
    """
    numbers = [layer.number for layer in layers]
    if number is not None and number not in numbers:
        raise RegardError(f"figure(layer={number}): the layers are {', '.join(map(str, numbers))}.")
    candidates = [numbers.index(number)] if number is not None else range(len(layers))
    if isinstance(head, int):
        most = max(layers[at].num_heads for at in candidates)
        if head >= most:
            raise RegardError(f"figure(head={head}): there are {most} heads, 0 to {most - 1}.")
    if head == "mean":
        return candidates[0], "mean"
    best = (-1.0, candidates[0], 0)
    for at in candidates:
        for each in range(layers[at].num_heads) if head is None else [head] if head < layers[at].num_heads else []:
            row = layers[at].row(each, query)
            near = () if is_cross else (query - 1, query, query + 1)
            notable = [float(w) for j, w in enumerate(row) if j not in aside and j not in near]
            best = max(best, (max(notable, default=0.0), at, each), key=lambda one: one[0])
    return best[1], best[2]
