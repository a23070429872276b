"""The tables of a report.

A `Report` is the dictionary that `numbers` (numbers.py) makes of a study, as in report.json: its "systems", each with
"title", "label", "quality", "cost" and more, the label of the "baseline", the "tokenizer", "few_seeds", and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from regard.lab.report.charts import Report, finished
from regard.lab.report.elements import Column, Table
from regard.lab.report.published import anchors

#: The text of a cell without a measurement.
NOTHING = "–"


def number(value: float | None, digits: int = 1) -> str:
    """A number with separators for thousands."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


def mean(spread: Mapping[str, Any] | None, digits: int = 1) -> str:
    """Mean ± deviation over the seeds; only the mean if there is one seed.

    >>> mean({"mean": 12.345, "deviation": 0.5, "values": []}), mean(None)
    ('12.3 ± 0.5', '–')
    >>> mean({"mean": 47119.0, "deviation": 3126.0}, 0)
    '47,119 ± 3,126'
    """
    if spread is None:
        return NOTHING
    deviation = spread["deviation"]
    return number(spread["mean"], digits) + ("" if deviation is None else f" ± {number(deviation, digits)}")


def chance(comparison: Mapping[str, Any] | None) -> str:
    """A p-value. The smallest value that the resamples can give is written as "≤"."""
    if comparison is None:
        return NOTHING
    least = 1 / (comparison["resamples"] + 1)
    return f"≤ {least:.3f}" if comparison["p"] <= least * 1.001 else f"{comparison['p']:.3f}"


#: A column: its name, the text of a cell, the value for ranking, and whether a larger value is better.
Measure = tuple[str, Callable[[Report], str], Callable[[Report], float | None] | None, bool]


def _quality(name: str, key: str, digits: int = 1, more: bool = True) -> Measure:
    """The column of system["quality"][key], as mean ± deviation. `more`: a larger value is better."""
    return name, lambda s: mean(s["quality"][key], digits), lambda s: _value(s["quality"][key]), more


def _cost(name: str, key: str, digits: int = 1, more: bool = False, unit: float = 1.0) -> Measure:
    """The column of system["cost"][key], multiplied by `unit`. `more`: a larger value is better.

    A cost is a number, or a mean and a deviation over seeds.
    """

    def text(system: Report) -> str:
        """The cell of a system."""
        cost = system["cost"][key]
        return mean(_scaled(cost, unit), digits) if isinstance(cost, Mapping) else number(_times(cost, unit), digits)

    return name, text, lambda s: _value(s["cost"][key]), more


def _scaled(spread: Mapping[str, Any], unit: float) -> dict[str, Any]:
    """A mean and a deviation, multiplied by `unit`."""
    return {"mean": spread["mean"] * unit, "deviation": _times(spread["deviation"], unit)}


def _times(value: float | None, unit: float) -> float | None:
    """A number multiplied by `unit`; None remains None."""
    return None if value is None else value * unit


def _value(measured: Any) -> float | None:
    """The number that ranks a measurement: its mean over seeds, or the number itself."""
    return measured["mean"] if isinstance(measured, Mapping) else measured


QUALITY: tuple[Measure, ...] = (
    _quality("perplexity", "perplexity", 1, more=False),
    _quality("BLEU", "bleu"),
    _quality("BLEU, novel part", "bleu_novel"),
    _quality("chrF", "chrf"),
    ("p", lambda s: chance((s["p"] or {}).get("all")), None, False),
    ("p, novel part", lambda s: chance((s["p"] or {}).get("novel")), None, False),
)
COST: tuple[Measure, ...] = (
    _cost("parameters, million", "parameters", 2, unit=1e-6),
    _cost("training tokens\u00a0/\u00a0s", "tokens_per_second", 0, more=True),
    _cost("steps", "steps", 0),
    _cost("minutes to best", "minutes_to_best", 2),
    _cost("steps to best", "steps_to_best", 0),
    _cost("peak memory, MiB", "peak_memory_mib", 0),
    _cost("decoded sentences\u00a0/\u00a0s", "sentences_per_second", 0, more=True),
)
MORE: tuple[Measure, ...] = (
    ("seeds", lambda s: ", ".join(map(str, s["seeds"])), None, False),
    _quality("TER", "ter", more=False),
    _quality("exact match", "exact", 3),
    _quality("length ratio", "length_ratio", 3),
    _quality("alignment error rate", "alignment_error_rate", 3, more=False),
    _cost("minutes of training", "minutes", 2),
    _cost("file, MB", "bytes", 2, unit=1e-6),
)
#: Columns without a best value.
UNRANKED = ("length ratio", "steps", "minutes of training", "minutes to best", "steps to best")


def quality_table(report: Report) -> Table:
    """Quality: a row per system, and a row for the retrieval baseline.

    `measures` leaves out empty columns, so that row has only the cells of the columns that are shown.
    """
    table = measures(QUALITY, finished(report), report["few_seeds"])
    retrieval = report["retrieval"]
    if not retrieval:
        return table
    given = {"BLEU": number(retrieval["bleu"]), "BLEU, novel part": number(retrieval.get("bleu_novel"))}
    row = ["Nearest source, copied", *(given.get(name, NOTHING) for name, *_ in QUALITY)]
    keep = {column.name for column in table.columns}
    kept = [cell for cell, name in zip(row, ("system", *(name for name, *_ in QUALITY)), strict=True) if name in keep]
    return Table(table.caption, table.columns, [*table.rows, kept], table.best)


def cost_table(report: Report) -> Table:
    """Cost: a row per system. It is a table of its own, because both together are wider than the page."""
    return measures(COST, finished(report), report["few_seeds"])


def more_table(report: Report) -> Table:
    """Further measures of quality and cost."""
    return measures(MORE, finished(report), report["few_seeds"])


def measures(wanted: Sequence[Measure], systems: Sequence[Report], few_seeds: bool) -> Table:
    """A row per system, without empty columns.

    `wanted` are the columns. The best value of each column is bold, with all values that print the same, unless the
    whole column does. With few seeds nothing is bold.
    """
    shown = [each for each in wanted if any(each[1](system) != NOTHING for system in systems)]
    rows = [[system["title"], *(text(system) for _, text, _, _ in shown)] for system in systems]
    best = set()
    for place, (name, _, value, more) in enumerate(shown, 1):  # column 0 is the system
        ranked = systems if name not in UNRANKED and not few_seeds else ()
        values = {row: found for row, system in enumerate(ranked) if value and (found := value(system)) is not None}
        if values:
            top = (max if more else min)(values, key=lambda row: values[row])
            alike = {row for row in values if _leading(rows[row][place]) == _leading(rows[top][place])}
            best |= {(row, place) for row in alike if len(alike) < len(values)}
    return Table("", [Column("system", False), *(Column(name) for name, *_ in shown)], rows, frozenset(best))


def _leading(cell: str) -> str:
    """A printed number without its deviation."""
    return cell.split(" ± ")[0]


def bucket_table(report: Report, key: str, caption: str) -> Table | None:
    """BLEU by bucket: a column per bucket, with its number of sentences; None without buckets.

    `key` is "by_length" or another of the keys under which a system has buckets.
    """
    systems = [each for each in finished(report) if each[key]]
    if not systems:
        return None
    buckets = systems[0][key]
    columns = [Column("system", False), *(Column(f"{each['label']} ({each['count']})") for each in buckets)]
    rows = []
    for system in systems:
        by_label = {bucket["label"]: bucket for bucket in system[key]}
        cells = [_bucket(by_label.get(each["label"])) for each in buckets]
        rows.append([system["title"], *cells])
    return Table(caption, columns, rows)


def _bucket(bucket: Mapping[str, Any] | None) -> str:
    """The cell of a bucket: BLEU with its interval, or F1 for a bin of word frequency."""
    if bucket is None:
        return NOTHING
    if "bleu" not in bucket:
        return f"{bucket['f1']:.3f}"
    return f"{bucket['bleu']:.1f} ({bucket['low']:.1f} to {bucket['high']:.1f})"


def looks_table(report: Report) -> Table | None:
    """Entropy and shares of the cross-attention, and the values of uniform attention; None if none was measured."""
    shown = [each for each in finished(report) if each["looks"]["entropy"]]
    if not shown:
        return None
    names = ("entropy, nats", "entropy / log S", "on the end-of-sentence token", "on punctuation")
    keys = ("entropy", "spread", "share_eos", "share_punctuation")
    rows = [[each["title"], *(mean(each["looks"][key], 2) for key in keys)] for each in shown]
    even = shown[0]["looks"]
    if even["end_pieces"] and even["punctuation_pieces"]:
        rows.append(
            ["uniform attention", NOTHING, "1.00", *(mean(even[k], 2) for k in ("end_pieces", "punctuation_pieces"))]
        )
    return Table("What the cross-attention attends to", [Column("system", False), *map(Column, names)], rows)


def outcomes_table(report: Report) -> Table | None:
    """The numbers of sentences that each system translates better, equally well and worse than the baseline.

    None if no finished system can be compared with it.
    """
    shown = [(each["title"], each["sentences"]) for each in finished(report) if each["sentences"]]
    if not shown:
        return None
    names = ("better", "alike", "worse")
    columns = [Column("system", False), *map(Column, names)]
    return Table(
        "Sentences against the baseline", columns, [[title, *(str(o[n]) for n in names)] for title, o in shown]
    )


def published_table(report: Report) -> Table:
    """Published results and ours, and why they are comparable or not."""
    by_label = {system["label"]: system for system in finished(report)}
    rows = []
    for anchor in anchors(report["about"]):
        ours = [by_label[label] for label in anchor.ours if label in by_label]
        scores = ", ".join(f"{system['title']} {mean(system['quality']['bleu'])}" for system in ours)
        rows.append([anchor.paper, anchor.task, anchor.figures, scores or NOTHING, anchor.why])
    columns = [Column(name, False) for name in ("paper", "task", "published", "ours, BLEU", "comparable?")]
    return Table("", columns, rows)
