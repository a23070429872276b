"""Figures of weights and statistics, made with matplotlib.

All have one sequential color scale (dark is more). Its lightness changes evenly, so it can be read in gray and with
color blindness. Weights are shown by their square root, so that small weights are visible.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from regard.base.errors import RegardError
from regard.base.whole_files import write_whole
from regard.drawing.cell_colors import write_numbers
from regard.drawing.color import colormap
from regard.drawing.panels import label
from regard.drawing.paper_figure import figure
from regard.drawing.picture import LARGEST, canvas, heatmap, name_tokens
from regard.maps import AttentionMap
from regard.stats import Offsets
from regard.stats.numbering import head_name
from regard.stats.profile import LayerProfile, ModelProfile
from regard.stats.roles import KINDS, Role, RoleTable
from regard.stats.statistics import Allowed, AtOffsets
from regard.stats.text_reading import TextReading

#: Colors of roles: light enough for black numbers, and distinct with color blindness (Okabe and Ito, lightened).
COLORS = {
    "previous": "#7fb8dd",
    "next": "#b9def5",
    "positional": "#c9c3e6",
    "first": "#d9d9d9",
    "special": "#bdbdbd",
    "broad": "#f3eec0",
    "punctuation": "#e9c2da",
    "duplicate": "#f6cf85",
    "induction": "#eba07a",
}
#: The most heads of a similarity matrix with a number in each cell, and the most tokens of a chart with their names.
NUMBERED, NAMED = 20, 64
#: What a figure for a paper is saved as.
KINDS_OF_FILE = ("pdf", "svg", "png", "csv")

#: Draws a figure. Figures are drawn one after another while they are saved, so that only one is in memory.
Make = Callable[[], Any]


def role_map(reading: TextReading) -> Any:
    """The role of every head in its color, with its score and its score on shuffled words: a row per layer.

    A head with several roles shows the role with the highest score. A head without a role is blank.
    """
    if reading.roles is None:
        raise RegardError(f"role_map: this reading has no roles. {reading.why_no_roles}")
    layers, best_roles = reading.profile.layers, _best_roles(reading.roles)
    cols, kinds = max(layer.num_heads for layer in layers), {role.kind for role in best_roles.values()}
    figure, axes = _figure(3.4 + 0.62 * cols, 1.5 + 0.46 * len(layers))
    axes.set(xlim=(-0.5, cols - 0.5), ylim=(len(layers) - 0.5, -0.5), xticks=range(cols), xlabel="head", ylabel="layer")
    axes.set_yticks(range(len(layers)), [str(layer.number) for layer in layers])
    axes.set_title(
        f"{reading.title}\nroles: the score, and below it the score on shuffled words", fontsize=9, parse_math=False
    )
    axes.tick_params(length=0)
    for row, layer in enumerate(layers):
        for head in range(layer.num_heads):
            _role_cell(axes, head, row, best_roles.get((layer.number, head)))
    handles = [_patch((0, 0), COLORS[kind], label=f"{kind}: {KINDS[kind]}") for kind in KINDS if kind in kinds]
    if handles:
        figure.legend(handles=handles, loc="outside lower left", fontsize=7, frameon=False, ncols=2)
    return figure


def _best_roles(roles: RoleTable) -> dict[tuple[int, int], Role]:
    """(layer, head) -> the role with the highest score."""
    # of equal keys the last one stays: the highest score
    return {(role.layer, role.head): role for role in sorted(roles.labeled, key=lambda role: role.score)}


def _role_cell(axes: Any, head: int, row: int, role: Role | None) -> None:
    """The cell of a head: the color of its role, and the scores on this text and on shuffled words. Blank without a
    role.
    """
    axes.add_patch(_patch((head - 0.46, row - 0.44), "none" if role is None else COLORS[role.kind]))
    if role is not None:
        axes.text(head, row, f"{role.score:.2f}\n{role.null:.2f}", ha="center", va="center", fontsize=6.5)


def _patch(corner: tuple[float, float], color: str, label: str = "") -> Any:
    """A rectangle of matplotlib, a little smaller than a cell of side 1; `corner` (x, y) is in cells."""
    from matplotlib.patches import Rectangle

    return Rectangle(corner, 0.92, 0.88, facecolor=color, edgecolor="0.8", linewidth=0.6, label=label)


def similarity_matrix(layer: LayerProfile) -> Any:
    """The cosine between the maps of every two heads of a layer. A dark square off the diagonal is a near copy."""
    H = layer.num_heads
    figure, axes = _figure(2.5 + 0.35 * H, 2 + 0.35 * H)
    image = axes.imshow(layer.similarity.numpy(), cmap=colormap(), vmin=0, vmax=1)
    if H <= NUMBERED:
        write_numbers(axes, image, layer.similarity, 6)
    axes.set(
        xticks=range(H), yticks=range(H), xlabel="head", ylabel="head", title=f"cosine of maps, layer {layer.number}"
    )
    _colorbar(figure, image, axes, "cosine")
    return figure


def received_bars(profile: ModelProfile, layer_index: int) -> Any:
    """The weight that every token receives: the sum over queries, the mean over the heads of a layer.

    `layer_index` is the place in `profile.layers`.
    """
    layer = profile.layers[layer_index]
    received = layer.received.mean(0)
    figure, axes = _figure(min(3 + 0.25 * len(received), 14), 3)
    axes.bar(range(len(received)), received.numpy(), width=0.8)
    if len(received) <= NAMED:
        name_tokens(axes.xaxis, [label(token) for token in profile.tokens], 8)
    axes.set(ylabel="weight received", title=f"layer {layer.number}: weight that each token receives")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def offset_bars(weights: AttentionMap, title: str = "", batch: int = 0) -> Any:
    """The share of each head's weight by offset, from 8 tokens before to 8 after: one small chart per head.

    `batch` is the index of the text.
    """
    offset_sums, allowed = weights.summarize(Offsets(), Allowed(weights))
    shares = AtOffsets().per_head(offset_sums, allowed)[batch].cpu()
    H, width = shares.shape
    cols = min(H, 6)
    rows = -(-H // cols)
    figure, axes = _figure(1.7 * cols, 0.8 + 1.1 * rows, rows, cols, squeeze=False, sharex=True, sharey=True)
    offsets = range(-(width // 2), width // 2 + 1)
    for head, cell in enumerate(axes.flat):
        if head >= H:
            cell.set_axis_off()
            continue
        cell.bar(offsets, shares[head].numpy(), width=0.8)
        cell.set_title(f"head {head}", fontsize=8)
        cell.tick_params(labelsize=7)
        cell.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title or "share of the weight by offset (key minus query)", fontsize=9)
    return figure


def save_figures(
    folder: str | os.PathLike[str],
    reading: TextReading,
    link: Mapping[str, Any] | None,
    heads: Sequence[tuple[int, int]],
    tell: Callable[[int, int], None] = lambda done, total: None,
    *,
    every_head: bool = False,
) -> list[Path]:
    """Write the figures of a reading into `folder`, each completely or not at all.

    Figures for papers are .pdf, .svg, .png and .csv files: the whole `figure` at the width of a page, and each panel at
    the width of a column. They show the layer (its index), head and query of `link`; None: the first ones.

    Other figures are .png files: roles, the entropy of all heads, and the map of each of `heads`, (index of the layer,
    head). With `every_head` each statistic and the heads of every layer follow. `tell(done, total)` is called
    after each file.
    """
    folder, saved = Path(folder), list[Path]()
    papers, pictures = _papers(reading, link), _pictures(reading, heads, every_head)
    total = len(papers) * len(KINDS_OF_FILE) + len(pictures)
    for name, make in papers.items():
        made = make()
        for kind in KINDS_OF_FILE:
            saved.append(made.save(folder / f"{name}.{kind}"))
            tell(len(saved), total)
    for name, make in pictures.items():
        saved.append(_save(make(), folder / f"{name}.png"))
        tell(len(saved), total)
    return saved


def _papers(reading: TextReading, link: Mapping[str, Any] | None) -> dict[str, Make]:
    """The whole figure of one link, and each of its panels alone, by file name.

    `link` has the index of a layer, a head and a query; without it they are 0.
    """
    panels = ["words", "map", "heads", "statistics"]
    if not reading.profile.is_self_attention:
        panels.insert(1, "alignment")
    link = link or {"layer": 0, "head": 0, "query": 0}
    place = {"layer": reading.profile.layers[link["layer"]].number, "head": link["head"], "query": link["query"]}
    alone: dict[str, Make] = {
        name: partial(figure, reading, panels=[name], **place) for name in panels if name != "statistics"
    }
    return {"figure": partial(figure, reading, panels=panels, width=17, **place)} | alone


def _pictures(reading: TextReading, heads: Sequence[tuple[int, int]], every_head: bool) -> dict[str, Make]:
    """Figures of roles, of statistics, and of some heads or of every layer, by file name.

    Maps of more than LARGEST tokens are left out.
    """
    layers = reading.profile.layers
    statistics = [name for name in layers[0].values if every_head or name == "entropy"]
    pictures: dict[str, Make] = {} if reading.roles is None else {"map-roles": partial(role_map, reading)}
    pictures |= {
        f"map-{name}": partial(figure, reading, panels=["statistics"], statistic=name, width=17) for name in statistics
    }
    if every_head:
        for index in range(len(layers)):
            pictures |= _of_layer(reading, index)
        return pictures
    for index, head in heads:
        name = head_name(layers[index].number, head)
        if max(reading.maps[layers[index].name].shape[2:]) <= LARGEST:
            pictures[f"head-{name}"] = partial(_heatmap, reading, layers[index], head, name)
    return pictures


def _of_layer(reading: TextReading, index: int) -> dict[str, Make]:
    """Figures of one layer by file name: the similarity of its heads, the weight received, offsets and maps.

    `index` is that of the layer in the reading, whose own number may be another one.
    """
    layer = reading.profile.layers[index]
    weights, number = reading.maps[layer.name], layer.number
    pictures: dict[str, Make] = {
        f"similarity-layer-{number}": partial(similarity_matrix, layer),
        f"received-layer-{number}": partial(received_bars, reading.profile, index),
    }
    if weights.shape[2] == weights.shape[3]:
        title = f"layer {number}: share of the weight by offset (key minus query)"
        pictures[f"offsets-layer-{number}"] = partial(offset_bars, weights, title)
    if max(weights.shape[2:]) <= LARGEST:
        head = _head_of_words(reading.profile, layer)
        reason = "the one of its layer that attends most to ordinary tokens"
        pictures |= {
            f"heatmap-layer-{number}": partial(_heatmap, reading, layer, "mean", f"layer {number}, mean of all heads"),
            f"heads-layer-{number}": partial(_heatmap, reading, layer, None, f"layer {number}"),
            f"head-layer-{number}": partial(_heatmap, reading, layer, head, f"{head_name(number, head)}, {reason}"),
        }
    return pictures


def _heatmap(reading: TextReading, layer: LayerProfile, head: int | Literal["mean"] | None, title: str) -> Any:
    """The heatmap of one head, of the mean of all, or of each head (None), with the tokens of the reading."""
    tokens = reading.profile.query_tokens, reading.profile.tokens
    return heatmap(reading.maps[layer.name], tokens, head, title=title)


def _head_of_words(profile: ModelProfile, layer: LayerProfile) -> int:
    """The head with the least weight on the first token and on special tokens.

    If the first token is special, its weight is in "special" already.
    """
    aside = layer.values["special"]
    return int((aside if 0 in profile.special else aside + layer.values["first"]).argmin())


def _figure(width: float, height: float, *grid: int, **options: Any) -> tuple[Any, Any]:
    """A new figure of a size in inches, and its axes. `grid` and `options` are those of `Figure.subplots`."""
    figure = canvas("figures").new_figure(width, height)
    return figure, figure.subplots(*grid, **options)


def _colorbar(figure: Any, image: Any, axes: Any, label: str) -> None:
    figure.colorbar(image, ax=axes, label=label, shrink=0.8)


def _save(figure: Any, path: Path) -> Path:
    """Write a figure as a .png, completely or not at all."""
    write_whole(path, canvas("figures").png(figure))
    return path
