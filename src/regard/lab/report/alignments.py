"""Figures of alignments: every system on the same sentences, on one color scale."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from regard.drawing.color import RAMP
from regard.lab.report.folder import Study
from regard.lab.report.numbers import title
from regard.lab.report.svg import FONT, Figure, element

#: Pixels per side of a cell, and the mean width of a letter in pixels.
CELL, LETTER = 17, 7.3
BLUE = RAMP[4]
LONGEST = 14
READINGS = {
    "output": "attention of the step that predicts the word",
    "input": "attention of the step that reads the word as input",
}


def alignment_figures(study: Study) -> list[tuple[str, list[Figure]]]:
    """For every sentence, its source and a figure per system with attention, from the first seed."""
    figures: dict[str, list[Figure]] = {}
    for about in study.about["systems"]:
        trial = next((t for t in study.of(about["label"]) if t.looking.get("alignments")), None)
        for number, alignment in enumerate(trial.looking["alignments"] if trial else []):
            source = " ".join(alignment["source"])
            name = f"alignment-{number + 1}-{_plain(about['label'])}"
            figures.setdefault(source, []).append(alignment_figure(name, title(about), alignment))
    return list(figures.items())


def _plain(label: str) -> str:
    """A label in characters that a file name can have."""
    return re.sub(r"[^\w.]+", "-", label)


def alignment_figure(name: str, system: str, alignment: Mapping[str, Any]) -> Figure:
    """Target words are rows, source words columns. Opacity is the square root of the weight; gold links have frames.

    `alignment` is an entry of looking.json: the words of "source" and "target", "weights" and "gold". `name` is that of
    the figure, and `system` its title.
    """
    source, target = ([_short(word) for word in alignment[side]] for side in ("source", "target"))
    left = 14 + LETTER * max(map(len, target), default=0)
    top = 30 + LETTER * max(map(len, source), default=0)
    size = (max(left + CELL * len(source) + 12, 150), top + CELL * len(target) + 8)
    body = [
        f'<g font-family="{FONT}" font-size="11.5" fill="currentColor">'
        f'<text x="4" y="15" font-weight="600" font-size="13">{escape(system)}</text>',
        *_labels(source, target, left, top),
        "</g>",
        *_cells(alignment["weights"], left, top),
        _frame(left, top, len(source), len(target)),
        *_gold(alignment.get("gold") or (), left, top),
    ]
    description = "; ".join(_strongest(alignment)) or "no words"
    reading = READINGS.get(alignment.get("reading", "output"), "")
    heading = f"{system}: {' '.join(alignment['source'])}"
    return element(name, heading, f"Alignment, {reading}. Strongest: {description}.", size, "".join(body))


def _short(word: str) -> str:
    """A word of at most `LONGEST` characters; the end of a longer word is replaced by "…"."""
    return word if len(word) <= LONGEST else word[: LONGEST - 1] + "…"


def _labels(source: Sequence[str], target: Sequence[str], left: float, top: float) -> list[str]:
    """The source words above the grid, turned, and the target words beside it. Its corner is at pixel (left, top)."""
    across = [
        f'<text transform="translate({left + CELL * (s + 0.5) + 4:g} {top - 5:g}) rotate(-90)">{escape(word)}</text>'
        for s, word in enumerate(source)
    ]
    down = [
        f'<text x="{left - 6:g}" y="{top + CELL * (t + 0.5) + 4:g}" text-anchor="end">{escape(word)}</text>'
        for t, word in enumerate(target)
    ]
    return across + down


def _cells(weights: Sequence[Sequence[float]], left: float, top: float) -> list[str]:
    """A square for each weight (target words, source words) of at least 0.003; smaller ones would hardly be visible.

    Here and below `left` and `top` are the corner of the grid in pixels.
    """
    cells = [
        f'<rect x="{left + CELL * s:g}" y="{top + CELL * t:g}" width="{CELL}" height="{CELL}" '
        f'fill-opacity="{min(max(weight, 0.0), 1.0) ** 0.5:.2f}"/>'
        for t, row in enumerate(weights)
        for s, weight in enumerate(row)
        if weight >= 0.003
    ]
    return [f'<g fill="{BLUE}" shape-rendering="crispEdges">', *cells, "</g>"]


def _frame(left: float, top: float, width: int, height: int) -> str:
    """The frame of a grid of `width` x `height` cells."""
    return (
        f'<rect x="{left:g}" y="{top:g}" width="{CELL * width}" height="{CELL * height}" fill="none" '
        'stroke="currentColor" stroke-opacity="0.3"/>'
    )


def _gold(links: Sequence[Sequence[int]], left: float, top: float) -> list[str]:
    """A frame for each gold link (source word, target word)."""
    return [
        f'<rect x="{left + CELL * s + 1.5:g}" y="{top + CELL * t + 1.5:g}" width="{CELL - 3}" height="{CELL - 3}" '
        'fill="none" stroke="#d55e00" stroke-width="1.5"/>'
        for s, t in links
    ]


def _strongest(alignment: Mapping[str, Any]) -> list[str]:
    """The source word with the largest weight for every target word, as "target – source": the figure in words."""
    rows = zip(alignment["target"], alignment["weights"], strict=True)
    best = ((word, max(range(len(row)), key=row.__getitem__)) for word, row in rows if row)
    return [f"{word} – {alignment['source'][index]}" for word, index in best]
