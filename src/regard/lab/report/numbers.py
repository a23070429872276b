"""Computes all numbers of a report as JSON, for its tables, figures and sentences.

A system is named by its `label`; `done` are its finished trials.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.lab.evaluation.bootstrap import PairedComparison, paired_bootstrap
from regard.lab.report.folder import Study, Trial

#: The format version of report.json. It changes if old readers would misread the file.
VERSION = 1
#: The fewest seeds of each system for a comparison with p-values.
LEAST_SEEDS = 3
#: The fields of looking.json that are averaged over seeds.
LOOKS = ("entropy", "spread", "share_eos", "share_punctuation", "end_pieces", "punctuation_pieces")


def numbers(study: Study) -> dict[str, Any]:
    """All numbers of a comparison so far."""
    ranked = ranking(study)
    return {
        "version": VERSION,
        "about": dict(study.about),
        "baseline": study.baseline,
        "progress": _progress(study),
        "retrieval": {name: value for name, value in study.retrieval.items() if not isinstance(value, list)},
        "systems": [_system(study, each) for each in study.about["systems"]],
        "ranking": ranked,
        "few_seeds": any(len(study.of(label)) < LEAST_SEEDS for label in study.labels if study.of(label)),
        "lead": against(study, ranked[0], ranked[1]) if len(ranked) > 1 else None,  # the paired bootstrap of the best
        "examples": examples(study),
        "tokenizer": next((t.evaluation.tokenizer for t in study.trials if t.evaluation), None),
        "signature": next((t.evaluation.bleu.signature for t in study.trials if t.evaluation), None),
        "search": next((dict(t.evaluation.search) for t in study.trials if t.evaluation and t.evaluation.search), None),
    }


def spread(values: Iterable[float | None]) -> dict[str, Any] | None:
    """Mean and sample deviation (n - 1) of the known values. One value has no deviation; no values give None.

    >>> spread([1.0, None, 3.0])
    {'mean': 2.0, 'deviation': 1.4142135623730951, 'values': [1.0, 3.0]}
    """
    finite = [float(value) for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return None
    deviation = statistics.stdev(finite) if len(finite) > 1 else None
    return {"mean": statistics.fmean(finite), "deviation": deviation, "values": finite}


def _progress(study: Study) -> dict[str, Any]:
    """The numbers of all and of the finished trials, and the names (label-seed) of the others.

    "missing" are all trials that have not finished. "running" are those of them that have started, and "failed" those
    that have failed, each with the message of its error.
    """
    missing = [f"{trial.label}-{trial.seed}" for trial in study.trials if not trial.finished]
    running = [f"{trial.label}-{trial.seed}" for trial in study.trials if trial.started and not trial.finished]
    failed = {f"{trial.label}-{trial.seed}": trial.failed.get("message", "") for trial in study.trials if trial.failed}
    return {
        "expected": len(study.trials),
        "finished": len(study.trials) - len(missing),
        "missing": missing,
        "running": running,
        "failed": {name: message for name, message in failed.items() if name in missing},
    }


def _system(study: Study, about: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of one system, over its finished trials; `about` is its entry in `study.about["systems"]`.

    "p" is its whole comparison with the baseline (see `against`). Only the curves include unfinished trials.
    """
    label = about["label"]
    done, trials = study.of(label), study.of(label, finished=False)
    return {
        "label": label,
        "title": title(about),
        "settings": about.get("settings", {}),
        "seeds": [trial.seed for trial in done],
        "quality": _quality(done),
        "cost": _cost(done),
        "looks": {name: spread(trial.looking.get(name) for trial in done) for name in LOOKS},
        "gradient": _gradient(done),
        "p": against(study, label, study.baseline),
        "sentences": outcomes(study, label),
        "by_length": _buckets([t.evaluation.by_length for t in done if t.evaluation]),
        "by_similarity": _buckets([t.evaluation.by_similarity for t in done if t.evaluation]),
        "by_frequency": _frequencies(done),
        "curves": [_curve(trial) for trial in trials if trial.started],
        "pruning": [dict(trial.pruning) for trial in done if trial.pruning],
    }


def title(about: Mapping[str, Any]) -> str:
    """The display name of a system: its title, or its label if the label has more than the name.

    `about` is its entry in `study.about["systems"]`.
    """
    from regard.lab.models.systems import SYSTEMS

    label, name = about["label"], about.get("name")
    if about.get("title"):
        return str(about["title"])
    if label in SYSTEMS:
        return SYSTEMS[label].title
    return label.replace("_", " ") if name is None or label != name else name


def _quality(done: Sequence[Trial]) -> dict[str, Any]:
    """The measures of quality over the finished trials of a system, each as `spread`."""
    evaluations = [trial.evaluation for trial in done if trial.evaluation is not None]
    novel = [evaluation.novel for evaluation in evaluations]
    return {
        "bleu": spread(evaluation.bleu.score for evaluation in evaluations),
        "bleu_novel": spread(evaluation.bleu if evaluation else None for evaluation in novel),
        "novel": next((evaluation.count for evaluation in novel if evaluation), None),
        "chrf": spread(evaluation.chrf.score for evaluation in evaluations),
        "ter": spread(evaluation.ter.score for evaluation in evaluations),
        "exact": spread(evaluation.exact for evaluation in evaluations),
        "length_ratio": spread(evaluation.length_ratio for evaluation in evaluations),
        "perplexity": spread(evaluation.perplexity for evaluation in evaluations),
        "alignment_error_rate": spread(evaluation.alignment_error_rate for evaluation in evaluations),
        "skipped": sum(evaluation.skipped for evaluation in evaluations),
        "num_sentences": evaluations[0].num_sentences if evaluations else None,
    }


def _cost(done: Sequence[Trial]) -> dict[str, Any]:
    """The measures of cost over the finished trials of a system; parameters and bytes are those of one trial."""
    return {
        "parameters": _first(done, "parameters"),
        "bytes": _first(done, "bytes"),
        "tokens_per_second": spread(_speed(trial) for trial in done),
        "steps": spread(trial.trained.get("steps", _last(trial, "step")) for trial in done),
        "minutes": spread(_minutes(trial) for trial in done),
        "minutes_to_best": spread(_to_best(trial, "minutes") for trial in done),
        "steps_to_best": spread(_to_best(trial, "step") for trial in done),
        "peak_memory_mib": spread(trial.looking.get("peak_memory_mib") for trial in done),
        "sentences_per_second": spread(t.evaluation.sentences_per_second for t in done if t.evaluation),
    }


def _first(done: Sequence[Trial], name: str) -> float | None:
    """A number of looking.json, from the first trial that has it."""
    return next((value for trial in done if (value := trial.looking.get(name)) is not None), None)


def _minutes(trial: Trial) -> float | None:
    """Minutes of training, without validation; from metrics.csv for trials without trained.json."""
    seconds = trial.trained.get("seconds")
    return _last(trial, "minutes") if seconds is None else seconds / 60


def _speed(trial: Trial) -> float | None:
    """Target tokens per second of training, without validation; None if it was not measured."""
    seconds, tokens = trial.trained.get("seconds"), trial.trained.get("tokens")
    if seconds and tokens:
        return tokens / seconds
    speeds = [speed for row in trial.metrics if (speed := row.get("tokens_per_second")) is not None]
    return statistics.median(speeds) if speeds else None


def _last(trial: Trial, column: str) -> float | None:
    """The last known value of a column of metrics.csv."""
    values = [value for row in trial.metrics if (value := row.get(column)) is not None]
    return values[-1] if values else None


def _to_best(trial: Trial, unit: str) -> float | None:
    """Minutes or steps of training until the best validation, by BLEU if it was measured, otherwise by loss.

    `unit` is "minutes" or "step".
    """
    for column, best in (("bleu", max), ("valid_loss", min)):
        rows = [row for row in trial.metrics if row.get(column) is not None and row.get(unit) is not None]
        if rows:
            return best(rows, key=lambda row: row[column] or 0.0)[unit]
    return None


def _curve(trial: Trial) -> dict[str, Any]:
    """The validations in order of steps. `of` is the name of their measure."""
    of = "bleu" if any(row.get("bleu") is not None for row in trial.metrics) else "perplexity"
    rows = [row for row in trial.metrics if row.get(of) is not None]
    places = {name: [row.get(name) or 0.0 for row in rows] for name in ("step", "minutes")}
    return {"seed": trial.seed, "of": of, **places, "value": [row[of] for row in rows]}


def _gradient(done: Sequence[Trial]) -> dict[str, list[float]] | None:
    """The gradient by position in the source (0 to 1), relative to the mean over positions: the mean over seeds.

    None if no trial has measured it.
    """
    gradients = [trial.looking["gradient"] for trial in done if trial.looking.get("gradient")]
    shares: dict[float, list[float]] = {}
    for gradient in gradients:
        for place, value in zip(gradient["bins"], gradient["relative"], strict=True):
            if value is not None:
                shares.setdefault(float(place), []).append(float(value))
    if not shares:
        return None
    return {"position": sorted(shares), "relative": [statistics.fmean(shares[place]) for place in sorted(shares)]}


def _buckets(seeds: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """The buckets of several seeds merged: the means of BLEU and of the ends of the intervals."""
    labels = list(dict.fromkeys(bucket.label for buckets in seeds for bucket in buckets))
    rows = []
    for label in labels:
        in_bucket = [bucket for buckets in seeds for bucket in buckets if bucket.label == label]
        means = {
            name: statistics.fmean(getattr(bucket, name) for bucket in in_bucket) for name in ("bleu", "low", "high")
        }
        rows.append({"label": label, "count": in_bucket[0].count, **means})  # the sentences are those of any seed
    return rows


def _frequencies(done: Sequence[Trial]) -> list[dict[str, Any]]:
    """The bins of word frequency of several seeds merged: the mean of F1 (0 to 1), and the words of the references."""
    bins = [each for trial in done if trial.evaluation for each in trial.evaluation.by_frequency]
    rows = []
    for label in dict.fromkeys(each.label for each in bins):
        same = [each for each in bins if each.label == label]
        rows.append({"label": label, "count": same[0].expected, "f1": statistics.fmean(each.f1 for each in same)})
    return rows


# Against the baseline


def _counts_of_seeds(study: Study, label: str) -> Tensor | None:
    """The n-gram counts of a system, (seeds, sentences, 10); None if it has too few seeds."""
    counts = [study.counts[label, seed] for seed in study.about["seeds"] if (label, seed) in study.counts]
    return torch.stack(counts) if len(counts) >= LEAST_SEEDS else None


def against(study: Study, label: str, other: str) -> dict[str, Any] | None:
    """The paired bootstrap of two systems over sentences and seeds, on all sentences and on novel sentences.

    None if a system has fewer than `LEAST_SEEDS` seeds, because other seeds may reverse the result.
    """
    counts, other_counts = _counts_of_seeds(study, label), _counts_of_seeds(study, other)
    if counts is None or other_counts is None or study.test is None or label == other:
        return None
    comparisons = {"all": _comparison(paired_bootstrap(counts, other_counts))}
    novel = [n for n, each in enumerate(study.test.similarities) if each < study.novel_below]
    if novel:
        comparisons["novel"] = _comparison(paired_bootstrap(counts[:, novel], other_counts[:, novel]))
    return comparisons


def _comparison(comparison: PairedComparison) -> dict[str, Any]:
    """A paired bootstrap as JSON."""
    interval = list(comparison.interval)
    return {
        "difference": comparison.difference,
        "interval": interval,
        "p": comparison.p_value,
        "resamples": comparison.resamples,
    }


def sentence_scores(counts: Tensor) -> list[float]:
    """BLEU of every sentence, as in sacrebleu, from counts (N, 10); orders without n-grams do not count."""
    from regard.lab.evaluation.metrics import sacrebleu

    compute = sacrebleu().BLEU.compute_bleu
    rows = counts.long().tolist()
    return [
        float(compute(row[2:6], row[6:], row[0], row[1], smooth_method="exp", effective_order=True).score)
        for row in rows
    ]


def _differences(study: Study, label: str) -> tuple[int, list[float]] | None:
    """The first seed of both a system and the baseline, and the difference of BLEU of each sentence.

    None for the baseline itself, and if there is no such seed.
    """
    counts, base = study.counts, study.baseline
    seed = next((seed for seed in study.about["seeds"] if (label, seed) in counts and (base, seed) in counts), None)
    if seed is None or label == base:
        return None
    scores = sentence_scores(counts[label, seed]), sentence_scores(counts[base, seed])
    return seed, [mine - theirs for mine, theirs in zip(*scores, strict=True)]


def outcomes(study: Study, label: str) -> dict[str, int] | None:
    """The numbers of sentences that are better, equal and worse than the baseline, by BLEU of the sentence.

    They are of one seed, the first of both systems. None for the baseline itself, and if there is no such seed.
    """
    result = _differences(study, label)
    if result is None:
        return None
    seed, differences = result
    # equal scores may differ by rounding
    better, worse = (sum(sign * difference > 1e-9 for difference in differences) for sign in (1, -1))
    return {"seed": seed, "better": better, "alike": len(differences) - better - worse, "worse": worse}


def ranking(study: Study) -> list[str]:
    """The finished systems from the highest to the lowest mean BLEU, of the novel part if it is known."""
    scores = {}
    for label in filter(study.of, study.labels):
        quality = _quality(study.of(label))
        scores[label] = (quality["bleu_novel"] or quality["bleu"])["mean"]
    return sorted(scores, key=lambda label: -scores[label])


def examples(study: Study, wins: int = 5, losses: int = 3) -> dict[str, Any] | None:
    """The test sentences where the best system other than the baseline gains and loses most against the baseline.

    There are at most `wins` gains and `losses` losses. A gain is a difference of BLEU of the sentence; both systems
    have the same seed. If similarities are known, only novel sentences are taken. None if the two have no seed in
    common, or if the sentences are not known.
    """
    best = next((label for label in ranking(study) if label != study.baseline), study.baseline)
    result = _differences(study, best)
    if result is None or study.test is None:
        return None
    seed, differences = result
    near = study.test.similarities
    order = sorted(range(len(differences)), key=lambda n: (-differences[n], n))
    order = [n for n in order if not near or near[n] < study.novel_below]
    chosen = {
        "wins": [n for n in order[:wins] if differences[n] > 0],
        "losses": [n for n in order[::-1][:losses] if differences[n] < 0],
    }
    return {"label": best, "seed": seed} | {
        kind: [_example(study, best, seed, n, differences[n]) for n in rows] for kind, rows in chosen.items()
    }


def _example(study: Study, label: str, seed: int, place: int, difference: float) -> dict[str, Any]:
    """Test sentence `place` with the translations of a system and of the baseline, both from `seed`.

    `difference` is the system's BLEU of the sentence minus that of the baseline.
    """
    assert study.test is not None
    translations = {t.label: t.evaluation.hypotheses[place] for t in study.trials if t.seed == seed and t.evaluation}
    return {
        "sentence": place,
        "source": study.test.sources[place],
        "reference": study.test.references[place],
        "system": translations[label],
        "baseline": translations[study.baseline],
        "difference": difference,
        "similarity": study.test.similarities[place] if study.test.similarities else None,
    }
