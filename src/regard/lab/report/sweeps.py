"""The charts of sweeps, comparisons in which one option changes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from regard.hf.heads.pruning_curve import ORDERS
from regard.lab.report.charts import HEIGHT, WIDTH, Report, _legend, by_bucket, finished, quality_name, quality_of
from regard.lab.report.svg import COLORS, INK, MARKERS, Figure, canvas, drawing

#: Vaswani et al. 2017, table 3 A: BLEU on newstest2013 by number of heads, at constant compute.
VASWANI = {1: 24.9, 4: 25.5, 8: 25.8, 16: 25.8, 32: 25.4}
#: The option of a system that each sweep varies.
OPTIONS = {"heads": "num_heads", "positions": "positions", "attention": "attention", "scaled": "scaled"}


def sweep_figures(report: Report) -> list[Figure]:
    """The figures of the sweep of a report; empty if it is not a sweep."""
    kind = report["about"].get("sweep")
    if kind == "heads":
        figures = _heads(report)
    elif kind == "positions":
        figures = [_positions(report)]
    elif kind == "prune":
        figures = [_pruned(report), *_single(report)]
    elif kind in OPTIONS:
        figures = [_bars(report, kind)]
    else:
        figures = []
    return [figure for figure in figures if figure is not None]


def _heads(report: Report) -> list[Figure]:
    """BLEU by number of heads, and the published result with the same range of BLEU."""
    rows = [(each["settings"].get("num_heads"), quality_of(each)) for each in finished(report)]
    points = sorted(
        (heads, quality["mean"], quality["deviation"] or 0.0) for heads, quality in rows if heads and quality
    )
    if not points:
        return []
    published = [(heads, bleu, 0.0) for heads, bleu in VASWANI.items()]
    span = max(max(y + d for _, y, d in each) - min(y - d for _, y, d in each) for each in (points, published))
    name, of = "heads", quality_name(report)
    ours = _by_heads(points, span, name, f"{of} by number of heads", of)
    theirs = "The same by Vaswani et al. 2017, table 3 A"
    return [ours, _by_heads(published, span, "heads-vaswani", theirs, "BLEU, newstest2013 en-de, d = 512")]


def _by_heads(points: Sequence[tuple[int, float, float]], span: float, name: str, heading: str, axis: str) -> Figure:
    """A chart of points (heads, BLEU, deviation), the least number of heads first.

    The axis of BLEU covers 1.3 `span`, so charts with one `span` have the same scale.
    """
    figure, axes = canvas(WIDTH, HEIGHT)
    xs, ys, deviations = zip(*points, strict=True)
    axes.errorbar(xs, ys, deviations, color=COLORS[1], marker="o", capsize=3, linewidth=1.5)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(xs), [str(each) for each in xs])
    axes.minorticks_off()
    middle = (max(ys) + min(ys)) / 2
    axes.set(xlabel="heads, each of width d / heads", ylabel=axis, ylim=(middle - 0.65 * span, middle + 0.65 * span))
    description = "; ".join(f"{x} heads {y:.1f}" for x, y in zip(xs, ys, strict=True))
    heads, best = max(points, key=lambda point: point[1])[:2]
    look = f"The highest point has {heads} heads ({best:.1f}). Compare its distance from the others with their bars."
    return drawing(figure, name, heading, f"{description}.", look)


def _positions(report: Report) -> Figure | None:
    """BLEU by source length for each position scheme; lengths beyond those of the training are shaded.

    None if no finished system has BLEU by length.
    """
    trained = report["about"].get("train_words")
    shading = f" (shaded: longer than {trained} words, the longest in training)" if trained else ""
    heading = f"BLEU by source length and position scheme{shading}"
    return by_bucket(report, "by_length", "positions", heading, "words of the source", trained)


def _bars(report: Report, kind: str) -> Figure | None:
    """A bar of quality for each variant, with its deviation over seeds; None if none has finished.

    `kind` names what the variants change.
    """
    shown = [(system, quality) for system in finished(report) if (quality := quality_of(system))]
    if not shown:
        return None
    figure, axes = canvas(WIDTH, 0.9 + 0.4 * len(shown))
    for row, (_, quality) in enumerate(shown):
        axes.barh(row, quality["mean"], 0.6, xerr=quality["deviation"] or 0.0, color=COLORS[1], ecolor=INK, capsize=3)
        axes.text(0, row, f"  {quality['mean']:.1f}", va="center", fontsize=9, color="white")
    axes.set_yticks(range(len(shown)), [system["title"] for system, _ in shown])
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set(xlabel=quality_name(report))
    description = "; ".join(f"{system['title']} {quality['mean']:.1f}" for system, quality in shown)
    look = "Compare the difference of two bars with the deviations at their ends."
    return drawing(figure, f"sweep-{kind}", f"{quality_name(report)} by {kind}", f"{description}.", look)


def _pruned(report: Report) -> Figure | None:
    """BLEU against the share of removed heads, in three orders: the mean over all pruned trials; None without any."""
    if not any(mean_points(report, way) for way in ORDERS):
        return None
    figure, axes = canvas(WIDTH, HEIGHT)
    descriptions = []
    for number, way in enumerate(ORDERS):
        points = mean_points(report, way)
        if not points:
            continue
        axes.plot(
            *zip(*points, strict=True),
            color=COLORS[(1, 2, 3, 4)[number % 4]],
            marker=MARKERS[number % 4],
            markersize=4.5,
            label=ORDERS[way],
        )
        descriptions.append(f"{ORDERS[way]}: " + ", ".join(f"{100 * x:.0f} % {y:.1f}" for x, y in points))
    axes.set(xlabel="share of the heads removed", ylabel="BLEU", ylim=(0, None))
    _legend(figure, axes)
    look = "The further a line stays level, the more heads can go in that order."
    return drawing(figure, "pruning", "BLEU against the share of heads removed", f"{'; '.join(descriptions)}.", look)


def mean_points(report: Report, order: str) -> list[tuple[float, float]]:
    """(share of removed heads, BLEU) for one order: the mean over all pruned trials."""
    scores: dict[float, list[float]] = {}
    for pruning in (each for system in report["systems"] for each in system["pruning"]):
        for point in pruning.get("points", ()):
            if point["order"] == order:
                scores.setdefault(round(point["share"], 4), []).append(point["bleu"])
    return sorted((share, statistics.fmean(values)) for share, values in scores.items())


def _single(report: Report) -> list[Figure]:
    """The change of BLEU if one head is removed, by role."""
    pruning = next((each for s in report["systems"] for each in s["pruning"] if each.get("single")), None)
    if pruning is None:
        return []
    figure, axes = canvas(WIDTH, HEIGHT)
    descriptions = []
    roles = list(dict.fromkeys(each["role"] for each in pruning["single"]))
    for number, role in enumerate(roles):
        changes = sorted(each["difference"] for each in pruning["single"] if each["role"] == role)
        shifts = [number + 0.3 * ((n + 0.5) / len(changes) - 0.5) for n in range(len(changes))]
        axes.plot(shifts, changes, color=COLORS[1 + number % 3], marker="o", markersize=5, linestyle="")
        descriptions.append(f"{role} at most {changes[0]:+.1f}")
    axes.axhline(0, color=INK, linewidth=0.8, alpha=0.6)
    axes.set_xticks(range(len(roles)), roles)
    axes.set(ylabel="change of BLEU, one head removed", xlim=(-0.6, len(roles) - 0.4))
    look = "Points at 0 are heads that the model does not need. A point far below is one that it needs."
    return [drawing(figure, "single-heads", "One head removed at a time", f"{'; '.join(descriptions)}.", look)]
