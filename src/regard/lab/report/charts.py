"""The charts of a report, made with matplotlib, narrow enough for a phone; None where there is nothing to draw."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from regard.lab.report.svg import COLORS, INK, MARKERS, Figure, canvas, drawing

#: Inches; about 450 pixels.
WIDTH, HEIGHT = 4.7, 3.5
#: A bucket of fewer sentences is drawn apart: a few of them can move its BLEU by tens of points.
FEW = 30
FEW_SAID = f"Hollow points stand for fewer than {FEW} sentences."

#: The dictionary that `numbers` (numbers.py) makes of a study, as in report.json: its "systems", the label of the
#: "baseline" and so on; or one of these systems, with its "label", "title", "quality", "cost", "curves" and buckets.
Report = Mapping[str, Any]


def styles(report: Report) -> dict[str, tuple[str, str]]:
    """The color and the marker of every system, the same in all charts. The baseline has the color of the text."""
    others = [each["label"] for each in report["systems"] if each["label"] != report["baseline"]]
    cycle = len(COLORS) - 1
    style_of = {label: (COLORS[1 + n % cycle], MARKERS[(1 + n) % len(MARKERS)]) for n, label in enumerate(others)}
    return {report["baseline"]: (COLORS[0], MARKERS[0])} | style_of


def finished(report: Report) -> list[Report]:
    """The systems with at least one evaluated trial."""
    return [each for each in report["systems"] if each["seeds"]]


# Learning


def learning_curves(report: Report, against: str) -> Figure | None:
    """Validation curves against "step" or "minutes": the mean over seeds, and single seeds as thin lines.

    None if no trial was validated more than once.
    """
    shown = [each for each in report["systems"] if any(len(curve["value"]) > 1 for curve in each["curves"])]
    if not shown:
        return None
    of = shown[0]["curves"][0]["of"]  # curves of another measure are left out
    style = styles(report)
    figure, axes = canvas(WIDTH, HEIGHT)
    for each in shown:
        lines = [
            (list(curve[against]), list(curve["value"]))
            for curve in each["curves"]
            if len(curve["value"]) > 1 and curve["of"] == of
        ]
        color, marker = style[each["label"]]
        for xs, ys in lines if len(lines) > 1 else ():
            axes.plot(xs, ys, color=color, linewidth=0.7, alpha=0.35)
        xs, ys = mean_line(lines)
        axes.plot(xs, ys, color=color, marker=marker, markersize=4, linewidth=1.7, label=each["title"])
    if of == "perplexity":
        axes.set_yscale("log")
    axes.set(xlabel={"step": "steps", "minutes": "minutes of training"}[against], ylabel=f"validation {_measure(of)}")
    if of == "bleu":
        axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    _legend(figure, axes)
    heading = f"Validation {_measure(of)} against {'steps' if against == 'step' else 'time'}"
    ends = "; ".join(f"{e['title']} {_ends(e['curves'])}" for e in shown)
    note = "Thin lines are single seeds. " if any(len(each["curves"]) > 1 for each in shown) else ""
    look = "Compare where the curves end, and how early each of them rises."
    if of == "perplexity":
        look = "Compare where the curves end (lower is better), and how early each of them falls."
    return drawing(figure, f"learning-{against}", heading, f"{note}At the end: {ends}.", look)


def _measure(of: str) -> str:
    """The name of a measure, "bleu" or "perplexity", in texts."""
    return {"bleu": "BLEU"}.get(of, of)


def _ends(curves: Sequence[Report]) -> str:
    """The mean over seeds of the last values of curves."""
    return f"{statistics.fmean(curve['value'][-1] for curve in curves if curve['value']):.1f}"


def mean_line(lines: Sequence[tuple[list[float], list[float]]]) -> tuple[list[float], list[float]]:
    """The mean of curves (x values, y values) where all of them have values, at the x values of the first curve.

    >>> mean_line([([0, 2, 4], [0.0, 2.0, 4.0]), ([0, 1, 2], [2.0, 2.0, 4.0])])
    ([0, 2], [1.0, 3.0])
    """
    import numpy

    if len(lines) == 1:
        return lines[0]
    first, last = max(xs[0] for xs, _ in lines), min(xs[-1] for xs, _ in lines)
    places = [x for x in lines[0][0] if first <= x <= last]
    values = [numpy.interp(places, xs, ys) for xs, ys in lines]
    return places, [float(value) for value in numpy.mean(values, 0)]


# Quality by length and similarity


def by_bucket(
    report: Report, key: str, name: str, heading: str, axis: str, beyond: float | None = None
) -> Figure | None:
    """BLEU by bucket of sentences, with 95 % intervals and counts; None if no finished system has such buckets.

    `key` names the buckets of a system, "by_length" or "by_similarity", `name` the figure, `heading` its title and
    `axis` the buckets below it. Buckets of lengths above `beyond` are shaded.
    """
    shown = [each for each in finished(report) if each[key]]
    labels = sorted({b["label"] for each in shown for b in each[key]}, key=_place)
    if not labels:
        return None
    counts = {bucket["label"]: bucket["count"] for bucket in shown[0][key]}
    style = styles(report)
    figure, axes = canvas(WIDTH, HEIGHT + 0.2)
    for number, each in enumerate(shown):
        shift = 0.5 * ((number + 0.5) / len(shown) - 0.5)
        _bucket_line(axes, each, labels, key, shift, style[each["label"]])
    axes.set_xticks(range(len(labels)), [f"{_brief(label)}\n({counts.get(label, 0)})" for label in labels])
    if beyond is not None and (after := [n for n, label in enumerate(labels) if _place(label) > beyond]):
        axes.axvspan(after[0] - 0.5, len(labels) - 0.5, color=INK, alpha=0.07, linewidth=0)
    axes.set(xlabel=f"{axis} (sentences)", ylabel="BLEU", ylim=(0, None), xlim=(-0.5, len(labels) - 0.5))
    _legend(figure, axes)
    description = "; ".join(f"{each['title']}: " + ", ".join(f"{b['bleu']:.1f}" for b in each[key]) for each in shown)
    return drawing(figure, name, heading, f"{', '.join(labels)}. {description}.", _largest_change(shown, labels, key))


def _largest_change(shown: Sequence[Report], labels: Sequence[str], key: str) -> str:
    """What to see in a chart of buckets: the system whose BLEU changes most, and the one that changes least.

    `shown` are the systems, `labels` the buckets in their order, and `key` is as in `by_bucket`.
    """
    changes = []  # (change from the first bucket to the last, title, the labels of large buckets, their BLEU)
    for each in shown:
        rows = {bucket["label"]: bucket["bleu"] for bucket in each[key] if bucket["count"] >= FEW}
        known = [label for label in labels if label in rows]
        if len(known) > 1:
            changes.append((rows[known[-1]] - rows[known[0]], each["title"], known, rows))
    if not changes:
        return f"No two buckets have {FEW} sentences, so no difference between them is certain."
    changes.sort(key=lambda change: abs(change[0]))
    said = [
        f"{title} goes from {rows[known[0]]:.1f} to {rows[known[-1]]:.1f}"
        for _, title, known, rows in (changes[-1], changes[0])[: len(changes)]
    ]
    known = changes[-1][2]
    return f"From the first bucket to the last ({known[0]}; {known[-1]}): {', '.join(said)}."


def _bucket_line(
    axes: Any, each: Report, labels: Sequence[str], key: str, shift: float, style: tuple[str, str]
) -> None:
    """Draw the line of one system: its BLEU by bucket, with intervals.

    `labels` are those of all buckets, and `key` names the buckets of the system, as in `by_bucket`. `shift` moves its
    points sideways, so that systems do not hide each other. `style` is its color and its marker. Points of fewer than
    `FEW` sentences are hollow, and not joined.
    """
    rows = {bucket["label"]: bucket for bucket in each[key]}
    places = [n for n, label in enumerate(labels) if label in rows]
    values = [rows[labels[n]] for n in places]
    xs, color = [n + shift for n in places], style[0]
    is_few = [v["count"] < FEW for v in values]
    for few, options in (
        (False, {"linewidth": 1.2, "alpha": 0.55}),
        (True, {"linewidth": 1.0, "linestyles": "dotted"}),
    ):
        some = [n for n in range(len(values)) if is_few[n] == few]
        low, high = ([values[n][end] for n in some] for end in ("low", "high"))
        axes.vlines([xs[n] for n in some], low, high, color=color, **options)
    points = {"color": color, "marker": style[1], "markersize": 4.5}
    many = [v["bleu"] if not few else math.nan for v, few in zip(values, is_few, strict=True)]
    axes.plot(xs, many, **points, linewidth=1.1, label=each["title"])
    hollow = [(x, v["bleu"]) for x, v, few in zip(xs, values, is_few, strict=True) if few]
    if hollow:
        axes.plot(*zip(*hollow, strict=True), **points, linestyle="", fillstyle="none")


def _place(label: str) -> float:
    """The order of a label of a bucket: its first number; the novel part comes first."""
    digits = "".join(c if c.isdigit() or c == "." else " " for c in label).split()
    return -1.0 if label.startswith("novel") or not digits else float(digits[0])


def _brief(label: str) -> str:
    """A label that fits below the axis."""
    return label.replace(" (", "\n(").replace(" to ", "–").replace("-", "–") if label[0].isdigit() else label.split()[0]


# Quality against cost


COSTS = {
    "parameters": ("parameters", "parameters (millions)", 1e-6),
    "tokens_per_second": ("training speed", "target tokens per second in training", 1.0),
    "sentences_per_second": ("decoding speed", "sentences per second in decoding", 1.0),
}


def against_cost(report: Report, cost: str) -> Figure | None:
    """BLEU (of the novel part if it is known) against one cost: a point per system."""
    style, (heading, axis, unit) = styles(report), COSTS[cost]
    points = []
    for each in finished(report):
        quality, spent = quality_of(each), each["cost"][cost]
        spent = spent["mean"] if isinstance(spent, Mapping) else spent
        if quality and spent is not None:
            points.append((each, spent * unit, quality["mean"], quality["deviation"] or 0.0))
    if len(points) < 2:
        return None
    figure, axes = canvas(WIDTH, HEIGHT)
    for each, x, y, deviation in points:
        color, marker = style[each["label"]]
        axes.plot(x, y, color=color, marker=marker, markersize=8, linestyle="", label=each["title"])
        if deviation:
            axes.errorbar(x, y, deviation, color=color, capsize=3, linewidth=1.1)
    _legend(figure, axes)
    of = quality_name(report)
    axes.set(xlabel=axis, ylabel=of, ylim=(0, None))
    axes.margins(x=0.12, y=0.12)
    description = "; ".join(f"{each['title']}: {x:.3g}, {y:.1f}" for each, x, y, _ in points)
    side = "left" if cost == "parameters" else "right"
    look = f"The best place is the upper {side}. A system below another and further from the {side} is worse in both."
    return drawing(
        figure, f"cost-{cost.replace('_', '-')}", f"{of} against {heading}", f"{axis}, {of}: {description}.", look
    )


def quality_of(system: Report) -> Report | None:
    """The score that ranks systems: BLEU of the novel part if it is known, otherwise BLEU."""
    return system["quality"]["bleu_novel"] or system["quality"]["bleu"]


def quality_name(report: Report) -> str:
    """The name of the score of `quality_of`."""
    novel = any(each["quality"]["bleu_novel"] for each in finished(report))
    return "BLEU on the novel part" if novel else "BLEU"


# Attention and gradients


def shares_looked_at(report: Report) -> Figure | None:
    """The shares of the weight on the end-of-sentence token and on punctuation: bars per system.

    None if no finished system has them, here and in `gradients`.
    """
    shown = [each for each in finished(report) if each["looks"]["share_eos"]]
    if not shown:
        return None
    figure, axes = canvas(WIDTH, 1.1 + 0.36 * len(shown))
    kinds = (("share_eos", "end of sentence", COLORS[1]), ("share_punctuation", "punctuation", COLORS[2]))
    for number, (key, name, color) in enumerate(kinds):
        rows = [n + 0.19 * (2 * number - 1) for n in range(len(shown))]  # the two bars of a system touch at n
        values = [(each["looks"][key] or {"mean": 0.0})["mean"] for each in shown]
        axes.barh(rows, values, height=0.36, color=color, label=name)
        for place, value in zip(rows, values, strict=True):
            axes.text(value, place, f" {value:.2f}", va="center", fontsize=8, color=INK)
    axes.set_yticks(range(len(shown)), [each["title"] for each in shown])
    axes.invert_yaxis()
    axes.set(xlabel="share of the cross-attention's weight")
    axes.margins(x=0.12)
    axes.grid(visible=False)
    _legend(figure, axes)
    description = "; ".join(f"{e['title']}: {e['looks']['share_eos']['mean']:.2f}" for e in shown)
    heading = "Weight on the end of the sentence and on punctuation"
    look = "A long bar is weight on tokens that have no translation: such weights say little about the words."
    return drawing(figure, "shares", heading, f"End of sentence: {description}.", look)


def gradients(report: Report) -> Figure | None:
    """How much the translation depends on each position of the source, relative to the mean over positions."""
    shown = [each for each in finished(report) if each["gradient"]]
    if not shown:
        return None
    style = styles(report)
    figure, axes = canvas(WIDTH, HEIGHT)
    for each in shown:
        color, marker = style[each["label"]]
        line = each["gradient"]
        axes.plot(line["position"], line["relative"], color=color, marker=marker, markersize=4, label=each["title"])
    axes.set(
        xlabel="position in the source (0 first, 1 last)", ylabel="gradient, 1 = mean over positions", ylim=(0, None)
    )
    axes.axhline(1, color=INK, linewidth=0.8, alpha=0.5, linestyle=":")
    _legend(figure, axes)
    description = "; ".join(
        f"{e['title']} from {e['gradient']['relative'][0]:.2f} to {e['gradient']['relative'][-1]:.2f}" for e in shown
    )
    look = "A line at 1 depends on all words alike. One that is low at the left depends little on the first words."
    said = f"From the first to the last position: {description}."
    return drawing(figure, "gradient", "Gradient by position in the source", said, look)


def _legend(figure: Any, axes: Any) -> None:
    """Draw one legend below the axes, for all lines."""
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
    )
