"""The sections of a report, in order.

A `Report` is the dictionary that `numbers` (numbers.py) makes of a study, as in report.json: its "systems", each with
"title", "label", "quality", "cost" and more, the label of the "baseline", the "tokenizer", "few_seeds", and so on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from regard.lab.data.retrieval import NEAR, NEAR_REASON
from regard.lab.report import charts
from regard.lab.report.charts import Report, finished, quality_name, quality_of
from regard.lab.report.elements import (
    Block,
    Document,
    Facts,
    Figures,
    Folded,
    Heading,
    Quotes,
    Table,
    Text,
)
from regard.lab.report.numbers import LEAST_SEEDS
from regard.lab.report.published import anchors
from regard.lab.report.svg import Figure
from regard.lab.report.sweeps import mean_points, sweep_figures
from regard.lab.report.tables import (
    bucket_table,
    chance,
    cost_table,
    looks_table,
    mean,
    more_table,
    number,
    outcomes_table,
    published_table,
    quality_table,
)

Alignments = Sequence[tuple[str, Sequence[Figure]]]
#: The number of sentences whose alignments are not folded.
OPEN = 2
#: A difference with a smaller p-value is called clear.
CLEAR = 0.05


def document(report: Report, alignments: Alignments = ()) -> Document:
    """The whole report, without empty sections."""
    about = report["about"]
    blocks: list[Block] = [*_opening(report)]
    if finished(report):
        blocks += [*_quality(report), *_section(f"The sweep: {about.get('sweep')}", sweep_figures(report))]
    blocks += _section("Learning", (charts.learning_curves(report, against) for against in ("step", "minutes")))
    if finished(report):
        blocks += _lengths(report)
        blocks += _section("Quality against cost", (charts.against_cost(report, cost) for cost in charts.COSTS))
        blocks += [*_looks(report, alignments), *_sentences(report)]
    if finished(report) and anchors(about):
        blocks += [Heading("Published results"), Text(_PUBLISHED, "hint"), published_table(report)]
    blocks += [Heading("How to repeat it"), Facts(_card(report))]
    return Document(f"Comparison: {about.get('name') or about.get('data', '')}", blocks)


_PUBLISHED = "Corpora, sizes and tokenizations differ: compare orders and ratios, not scores."


def _opening(report: Report) -> Iterator[Block]:
    """The main results, the budget, and warnings about what is missing."""
    about, progress = report["about"], report["progress"]
    yield from (Text(sentence, "leading") for sentence in findings(report))
    yield Text(f"{budget(about)}{_steps_reached(report)}")
    if about.get("without_near"):
        count = (about.get("left_out") or {}).get(NEAR_REASON, 0)
        yield Text(
            f"{count:,} sentences are left out of the test. They are near-duplicates: the similarity of their source "
            f"to a training source is above {NEAR:g}."
        )
    left = progress["expected"] - progress["finished"]
    if left:
        missing = ", ".join(progress["missing"])
        yield Text(
            f"Incomplete: {progress['finished']} of {progress['expected']} trials have finished; missing: {missing}. "
            "Run the same command to continue.",
            "warning",
        )
    for name, message in progress["failed"].items():
        yield Text(f"{name} failed: {message}", "warning")


def budget(about: Mapping[str, Any]) -> str:
    """One or two sentences: the budget of each system, and the number of seeds."""
    amount = about.get("budget") or {}
    unit = amount.get("kind", "steps")
    equal = (
        about.get("equal")
        or f"Equal {'time' if unit == 'minutes' else unit}: {amount.get('amount', 0):g} {unit} per system."
    )
    seeds = about["seeds"]
    several = (
        f"{len(seeds)} seeds; ± is the standard deviation over seeds."
        if len(seeds) > 1
        else "One seed, so the deviation is not known."
    )
    return f"{equal} {several}"


def _steps_reached(report: Report) -> str:
    """The steps that each system reached in equal time, which depends on the machine and its load."""
    if (report["about"].get("budget") or {}).get("kind") != "minutes":
        return ""
    reached = [
        f"{each['title']} {mean(each['cost']['steps'], 0)}" for each in finished(report) if each["cost"]["steps"]
    ]
    return f" Steps in this time: {', '.join(reached)}." if reached else ""


def findings(report: Report) -> list[str]:
    """The main results in a few sentences."""
    by_label = {each["label"]: each for each in report["systems"]}
    ranked = [by_label[label] for label in report["ranking"]]
    if not ranked:
        return ["No trial has finished yet."]
    if report["few_seeds"]:
        return [
            _untaught_sentence(report, ranked) or _unranked_sentence(report, ranked),
            *_retrieval_sentence(report, ()),
        ]
    best = _untaught_sentence(report, ranked) or _best_sentence(report, ranked)
    return [best, *_retrieval_sentence(report, ranked), *_pruning_sentence(report), *_cost_sentence(report)]


def _untaught_sentence(report: Report, ranked: Sequence[Report]) -> str:
    """A sentence for systems that are all below copying; "" if one of them is above it."""
    of, quality = quality_name(report), quality_of(ranked[0])
    copied = report["retrieval"].get("bleu_novel" if "novel" in of else "bleu")
    if copied is None or quality is None or quality["mean"] > copied:
        return ""
    return (
        f"No system has learned to translate: the highest score is {mean(quality)} {of}. Copying the target of the "
        f"most similar training sentence reaches {number(copied)}. Give a larger budget."
    )


def _unranked_sentence(report: Report, ranked: Sequence[Report]) -> str:
    """The scores of too few seeds, in the order of the comparison: no system is called better than another."""
    scores = ", ".join(f"{each['title']} {mean(quality_of(each))}" for each in finished(report))
    return f"{quality_name(report)}: {scores}.{f' {_FEW_SEEDS} Compare with --seeds 3.' if len(ranked) > 1 else ''}"


def _best_sentence(report: Report, ranked: Sequence[Report]) -> str:
    """The best system, or several with the same score; and whether the next one is surely worse."""
    best, of = ranked[0], quality_name(report)
    score = mean(quality_of(best))
    if len(ranked) == 1:
        return f"{best['title']} {'so far' if report['progress']['missing'] else 'alone'}: {score} {of}."
    alike = [each for each in ranked if _read(each) == _read(best)]
    names = " and ".join((", ".join(each["title"] for each in alike[:-1]), alike[-1]["title"]))
    if len(alike) > 1:
        sentence = f"{names} reach the same score: {score} {of}{_baseline_clause(report, alike)}."
    else:
        says = "translates best" if _is_clear(report) else "scores highest"
        sentence = f"{best['title']} {says}: {score} {of}{_baseline_clause(report, alike)}."
    return sentence + _next_sentence(report, ranked[len(alike) :])


_FEW_SEEDS = f"With fewer than {LEAST_SEEDS} seeds per system, other seeds may give another ranking."


def _lead(report: Report) -> Mapping[str, Any] | None:
    """The paired bootstrap of the two highest scores, on the sentences that rank systems."""
    return (report["lead"] or {}).get("novel" if "novel" in quality_name(report) else "all")


def _is_clear(report: Report) -> bool:
    """Whether the difference of the two highest scores is clear."""
    lead = _lead(report)
    return lead is not None and lead["p"] < CLEAR


def _read(system: Report) -> str | None:
    """The printed score of a system. Systems with the same printed score are not ranked."""
    quality = quality_of(system)
    return None if quality is None else number(quality["mean"])


def _next_sentence(report: Report, others: Sequence[Report]) -> str:
    """A sentence about the best of the `others`, those below the best score; p, if it is known for these two."""
    if not others:
        return ""
    lead, apart = _lead(report), ""
    if lead and others[0]["label"] == report["ranking"][1]:
        apart = f" (p of the difference: {chance(lead)}{'' if _is_clear(report) else ', which is not clear'})"
    return f" Next is {others[0]['title']} with {mean(quality_of(others[0]))}{apart}."


def _baseline_clause(report: Report, best: Sequence[Report]) -> str:
    """The score of the baseline, as the end of a sentence; "" if it is one of the best, or has no score."""
    base = next((each for each in finished(report) if each["label"] == report["baseline"]), None)
    if base is None or base in best or (quality := quality_of(base)) is None:
        return ""
    return f", against {mean(quality)} of {base['title']}"


def _retrieval_sentence(report: Report, ranked: Sequence[Report]) -> list[str]:
    """The score of copying, and which of the ranked systems are not above it."""
    retrieval = report["retrieval"]
    if not retrieval:
        return []
    novel = retrieval.get("bleu_novel")
    apart = f", and {novel:.1f} on the {retrieval['novel']:,} novel sentences" if novel is not None else ""
    sentence = f"Copying the target of the most similar training sentence scores {retrieval['bleu']:.1f}{apart}"
    fallen = [each["title"] for each in ranked if (b := each["quality"]["bleu"]) and b["mean"] <= retrieval["bleu"]]
    return [
        f"{sentence}; {', '.join(fallen)} {'is' if len(fallen) == 1 else 'are'} not better than that on all sentences."
        if fallen
        else f"{sentence}."
    ]


def _cost_sentence(report: Report) -> list[str]:
    """The systems that decode fastest and slowest, unless they differ by less than 5 %."""
    timed = [each for each in finished(report) if each["cost"]["sentences_per_second"]]
    if len(timed) < 2:
        return []
    speed = {each["title"]: each["cost"]["sentences_per_second"]["mean"] for each in timed}
    fast, slow = max(speed, key=lambda t: speed[t]), min(speed, key=lambda t: speed[t])
    if speed[fast] < 1.05 * speed[slow]:
        return []
    return [f"Fastest decoding: {fast}, {speed[fast] / speed[slow]:.1f} times as fast as {slow}."]


def _pruning_sentence(report: Report) -> list[str]:
    """The share of heads that can be removed, the least important first, before 1 BLEU is lost."""
    points = mean_points(report, "importance")
    if not points:
        return []
    whole = points[0][1]
    lost = next((n for n, (_, bleu) in enumerate(points) if bleu < whole - 1), len(points))
    share = f"{100 * points[lost - 1][0]:.0f} %" if lost > 1 else "None"
    return [f"{share} of the heads, the least important first, can be removed before 1 BLEU is lost."]


def _quality(report: Report) -> Iterator[Block]:
    """The section of the tables of quality and cost."""
    yield Heading("Quality and cost")
    base = next(each["title"] for each in report["systems"] if each["label"] == report["baseline"])
    below = report["about"].get("novel_below", 0.3)
    novel = next((each["quality"]["novel"] for each in finished(report) if each["quality"]["novel"]), None)
    yield quality_table(report)
    yield cost_table(report)
    part = (
        f"The novel part: the {novel:,} test sources with a similarity below {below:g} to every training source. "
        if novel
        else ""
    )
    sure = (
        f"p is the p-value of the paired bootstrap against {base}: the share of resamples of test sentences and seeds "
        "in which the difference changes its sign. The best value of each column is bold."
    )
    few = f"{_FEW_SEEDS} So there are no p-values, and no value is bold."
    counted = f"BLEU uses the tokenizer {report['tokenizer']} of sacrebleu. "
    yield Text(f"{part}{counted}{few if report['few_seeds'] else sure}", "hint")
    yield Folded("Further measures", [more_table(report), *_tables(report, ("by_similarity", "by_frequency"))])


_CAPTIONS = {
    "by_length": "BLEU by words of the source (sentences), with 95 % intervals",
    "by_similarity": "BLEU by similarity of the nearest training source (sentences), with 95 % intervals",
    "by_frequency": "F1 of words by their count in the training targets (occurrences in the references)",
}


def _tables(report: Report, keys: Sequence[str]) -> list[Table]:
    """The tables of buckets that exist, by their keys in `_CAPTIONS`."""
    return [table for key in keys if (table := bucket_table(report, key, _CAPTIONS[key]))]


def _section(heading: str, figures: Iterable[Figure | None]) -> list[Block]:
    """A section of figures; empty if there are none."""
    drawn = [figure for figure in figures if figure]
    return [Heading(heading), Figures(drawn)] if drawn else []


def _lengths(report: Report) -> Iterator[Block]:
    """The section of BLEU by length and by similarity."""
    figures = [
        charts.by_bucket(report, "by_length", "lengths", "BLEU by source length", "words of the source"),
        charts.by_bucket(report, "by_similarity", "similarity", "BLEU by similarity to training", "nearest source"),
    ]
    if any(figures):
        yield from _section("Long and new sentences", figures)
        yield Text(
            f"Bars are 95 % bootstrap intervals; numbers in brackets are numbers of sentences. {charts.FEW_SAID}",
            "hint",
        )
        yield Folded("The numbers", _tables(report, ("by_length",)))


def _looks(report: Report, alignments: Alignments) -> Iterator[Block]:
    """The section of attention: shares, gradients and alignments, as far as they were measured."""
    figures = [figure for figure in (charts.shares_looked_at(report), charts.gradients(report)) if figure]
    table = looks_table(report)
    if not (figures or table or alignments):
        return
    yield Heading("What they attend to")
    if table:
        yield table
    if figures:
        yield Figures(figures)
        yield Text(_GRADIENT, "hint")
    if alignments:
        yield Text(_ALIGNMENTS, "hint")
        shown = [Figures(figures, sentence, small=True) for sentence, figures in alignments]
        yield from shown[:OPEN]
        if shown[OPEN:]:
            yield Folded(f"{len(shown) - OPEN} more sentences", shown[OPEN:])


_GRADIENT = (
    "A weight shows what a system attends to; a gradient shows what its output depends on. Without attention, the "
    "whole source must pass through one vector."
)
_ALIGNMENTS = (
    "A column per source word, a row per target word of the reference. All have the same scale: the square root of the "
    "weight, from 0 to 1. Orange frames are gold alignments."
)


def _sentences(report: Report) -> Iterator[Block]:
    """The section that counts sentences against the baseline, with examples from the best system."""
    table, examples = outcomes_table(report), report["examples"]
    if table is None:
        return
    titles = {each["label"]: each["title"] for each in report["systems"]}
    yield Heading("Wins and losses")
    yield table
    if examples is None:
        return
    best, base = titles[examples["label"]], titles[report["baseline"]]
    for kind, choice in (
        ("wins", f"with the largest gains of {best}"),
        ("losses", f"with the largest losses of {best}"),
    ):
        if examples[kind]:
            yield Text(f"Sentences {choice} against {base}, by BLEU of the sentence (seed {examples['seed']}):")
            yield from (_quotes(each, best, base) for each in examples[kind])


def _quotes(example: Mapping[str, Any], best: str, base: str) -> Quotes:
    """One sentence with its reference and the translations of the best system and of the baseline."""
    near = example["similarity"]
    similar = "" if near is None else f", similarity to training {near:.2f}"
    lines = [("source", example["source"]), ("reference", example["reference"])]
    lines += [(best, example["system"]), (base, example["baseline"])]
    return Quotes(f"Sentence {example['sentence'] + 1}: {example['difference']:+.1f}{similar}", lines)


def _card(report: Report) -> list[tuple[str, str]]:
    """All facts that are needed to repeat the comparison."""
    about = report["about"]
    pairs = ", ".join(f"{count:,} {split}" for split, count in (about.get("pairs") or {}).items())
    facts = [
        ("command", about.get("command")),
        ("data", f"{about.get('data')}{f' ({pairs} pairs)' if pairs else ''}"),
        ("left out", ", ".join(f"{count:,} {reason}" for reason, count in (about.get("left_out") or {}).items())),
        ("data hash (sha256)", about.get("data_hash")),
        ("seeds", ", ".join(map(str, about["seeds"]))),
        ("budget", budget(about).split(". ")[0]),  # without the sentence about seeds
        ("decoding", _search(report.get("search"))),
        ("sacreBLEU tokenizer", report["tokenizer"]),
        ("sacreBLEU signature", report["signature"]),
        ("versions", _listed(about.get("versions"))),
        ("hardware", _listed(about.get("hardware"))),
        ("trials", f"{report['progress']['finished']} of {report['progress']['expected']} finished"),
        *(
            (f"settings of {each['title']}", json.dumps(each["settings"]))
            for each in report["systems"]
            if each["settings"]
        ),
    ]
    return [(name, str(value)) for name, value in facts if value]


def _search(search: Mapping[str, Any] | None) -> str:
    """The search of the test translations, in words."""
    if not search:
        return ""
    beam = search.get("beam", 1)
    return "greedy" if beam == 1 else f"beam {number(beam, 0)}, length penalty {search.get('length_penalty')}"


def _listed(facts: Mapping[str, Any] | None) -> str:
    """Facts as "name value, name value"."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in (facts or {}).items())
