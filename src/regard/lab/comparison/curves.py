"""`curves`: points of the curves of training, of BLEU by length, and of BLEU against removed heads.

The page of a run shows them beside its texts; a report draws its own (lab/report/charts.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from regard.hf.heads.pruning_curve import ORDERS

if TYPE_CHECKING:
    from regard.lab.evaluation.scores import Evaluation

#: Columns of metrics.csv on the y axis, the column on the x axis, and the title.
COLUMNS = (
    ("bleu", "step", "Validation BLEU"),
    ("bleu", "minutes", "Validation BLEU"),
    ("perplexity", "step", "Validation perplexity"),
    ("train_loss", "step", "Training loss"),
)


class Trained(Protocol):
    """The measurements of a run: the rows of metrics.csv, the evaluation, and the result of `pruning` or {}."""

    @property
    def metrics(self) -> Sequence[Mapping[str, float | None]]: ...
    @property
    def evaluation(self) -> Evaluation | None: ...
    @property
    def pruning(self) -> Mapping[str, Any]: ...


def curves(systems: Mapping[str, Sequence[Trained]]) -> list[dict[str, Any]]:
    """All curves as `{"title", "x", "y", "series": [{"name", "points"}]}`; points are means over the runs of a system.

    x values are numbers, or the labels of buckets in their order.
    """
    results = [
        _curve(f"{what} by {x}", x, what, {name: _trained(runs, x, y) for name, runs in systems.items()})
        for y, x, what in COLUMNS
    ]
    lengths = {name: _by_length(runs) for name, runs in systems.items()}
    pruned = {
        f"{name}: {way}" if len(systems) > 1 else way: _pruned(runs, order)
        for name, runs in systems.items()
        for order, way in ORDERS.items()
    }
    results.append(_curve("BLEU by length", "words of the source", "BLEU", lengths))
    results.append(_curve("BLEU without heads", "share of heads removed", "BLEU", pruned))
    return [curve for curve in results if curve["series"]]


def _curve(title: str, x: str, y: str, series: Mapping[str, Sequence[tuple[Any, float]]]) -> dict[str, Any]:
    """One chart of `curves`: its series are points (x, y) by name; empty ones are left out."""
    shown = [{"name": name, "points": [list(point) for point in points]} for name, points in series.items() if points]
    return {"title": title, "x": x, "y": y, "series": shown}


def _trained(runs: Sequence[Trained], x: str, y: str) -> list[tuple[Any, float]]:
    """Points of two columns of metrics.csv, one for each step: both are means over the runs that measured this step."""
    rows = [row for run in runs for row in run.metrics if None not in (row.get("step"), row.get(x), row.get(y))]
    places = dict(_means((row["step"], row[x]) for row in rows))
    return [(places[step], value) for step, value in _means((row["step"], row[y]) for row in rows)]


def _by_length(runs: Sequence[Trained]) -> list[tuple[Any, float]]:
    """Points (label of a bucket of source lengths, mean BLEU over the runs)."""
    buckets = [bucket for run in runs if run.evaluation for bucket in run.evaluation.by_length]
    return _means((bucket.label, bucket.bleu) for bucket in buckets)


def _pruned(runs: Sequence[Trained], order: str) -> list[tuple[Any, float]]:
    """Points (share of removed heads, mean BLEU over the runs), for one of `ORDERS`."""
    points = [point for run in runs for point in run.pruning.get("points", ()) if point["order"] == order]
    return _means((point["share"], point["bleu"]) for point in points)


def _means(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, float]]:
    """The mean of the values of each place: numbers ascend, and labels keep the order in which they first occur.

    >>> _means([(1, 2.0), (3, 5.0), (1, 4.0), (2, 1.0)])
    [(1, 3.0), (2, 1.0), (3, 5.0)]
    """
    values: dict[Any, list[float]] = {}
    for place, value in pairs:
        values.setdefault(place, []).append(value)
    places = values if any(isinstance(place, str) for place in values) else sorted(values)
    return [(place, statistics.fmean(values[place])) for place in places]
