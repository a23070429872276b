"""Folders of comparisons with invented numbers, for tests of the report alone: nothing here was ever trained."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import torch

from regard.lab.evaluation.scores import Evaluation, Training, score, word_frequencies

WORDS = [
    *("le", "la", "roi", "jour", "dieu", "terre", "fils", "homme", "main", "eau"),
    *("père", "mère", "<ville>", "&", "peuple", "cœur", "parole", "nuit", "lumière", "pain"),
]
SYSTEMS = {"none": 0.55, "bahdanau": 0.25, "luong_general": 0.2, "transformer": 0.22}
MARKS = "<b>&\"'`*_|"


def fabricate(
    folder: Path, systems=SYSTEMS, seeds=(1, 2), sentences=60, sweep=None, settings=None, unfinished=(), unseen=()
) -> Path:
    """Write a folder of a comparison; trials in `unfinished` have metrics alone, in `unseen` no looking.json."""
    draw = random.Random(0)
    sources = [" ".join(draw.choices(WORDS, k=draw.randint(3, 18))) for _ in range(sentences)]
    references = [" ".join(draw.choices(WORDS, k=len(source.split()))) for source in sources]
    references[0], sources[1] = references[0] + " " + MARKS, sources[1] + " " + MARKS
    similarities = [round(draw.random(), 3) for _ in sources]
    entries = [
        {"name": name if not sweep else "transformer", "label": name, "settings": (settings or {}).get(name, {})}
        for name in systems
    ]
    _write(folder / "comparison.json", _about(entries, seeds, sweep))
    _write(
        folder / "test.json", {"sources": sources, "references": references, "ids": list(map(str, range(sentences)))}
    )
    _write(
        folder / "retrieval.json",
        {"bleu": 15.8, "bleu_novel": 5.6, "novel": sum(s < 0.3 for s in similarities), "similarities": similarities},
    )
    for label, noise in systems.items():
        for seed in seeds:
            path = folder / "trials" / f"{label}-{seed}"
            _metrics(path, noise, seed)
            if f"{label}-{seed}" in unfinished:
                continue
            hypotheses = [_noisy(reference, noise, draw) for reference in references]
            found = score(
                hypotheses,
                references,
                sources,
                Training(word_frequencies(references[: sentences // 2]), similarities),
            )
            found = replace(found, perplexity=100 * noise + seed, seconds=2.0 + seed, search={"beam": 1})
            _write(path / "evaluation.json", found.to_json() | {"translations": hypotheses})
            _write(path / "trained.json", {"steps": 100, "seconds": 240.0, "tokens": 240_000 * (1 + noise)})
            if f"{label}-{seed}" not in unseen:
                _write(path / "looking.json", _looking(label, noise, sources, references, draw))
            if sweep == "prune":
                _write(path / "pruning.json", _pruning(found))
    return folder


def _about(entries, seeds, sweep):
    return {
        "version": 1,
        "name": "invented",
        "data": "no-such-corpus",
        "data_hash": "0" * 64,
        "pairs": {"train": 1000, "valid": 100, "test": 60},
        "systems": entries,
        "seeds": list(seeds),
        "budget": {"kind": "minutes", "amount": 4},
        "equal": "Equal time: every trial trains for 4 minutes on 1 thread.",
        "sweep": sweep,
        "train_words": 10 if sweep == "positions" else None,
        "command": "regard compare --data no-such-corpus --minutes 4",
        "versions": {"regard": "0", "torch": "0"},
        "hardware": {"cores": 2, "threads_per_process": 1},
        "novel_below": 0.3,
        "baseline": "none",
    }


def _metrics(path, noise, seed):
    rows = ["step,epoch,minutes,train_loss,tokens_per_second,valid_loss,perplexity,bleu"]
    for n in range(1, 9):
        quality = (1 - noise) * 30 * (1 - 0.6**n) + seed
        rows.append(f"{50 * n - 25},0,{(n - 0.5) / 2},{5 / n},1000.0,,,")
        rows.append(f"{50 * n},0,{n / 2},{5 / n},1000.0,{4 / n},{100 / n},{quality if n != 7 else quality + 9}")
    path.mkdir(parents=True, exist_ok=True)
    (path / "metrics.csv").write_text("\n".join(rows) + "\n")


def _noisy(reference, noise, draw):
    return " ".join(draw.choice(WORDS) if draw.random() < noise else word for word in reference.split())


def _looking(label, noise, sources, references, draw):
    facts = {"parameters": int(1e6 * (1 + noise)), "bytes": int(2e6 * (1 + noise)), "peak_memory_mib": 300.5}
    relative = [2.0 - 0.2 * n if label == "none" else 1.0 + 0.05 * (n % 3) for n in range(9)] + [None]
    facts["gradient"] = {"bins": [0.05 + 0.1 * n for n in range(10)], "relative": relative, "absolute": relative}
    names = ("entropy", "spread", "share_eos", "share_punctuation", "end_pieces", "punctuation_pieces")
    if label == "none":
        return facts | dict.fromkeys(names) | {"alignments": []}
    facts |= dict(zip(names, (1.2, 0.5, 0.1 + noise, 0.2, 0.08, 0.12), strict=True))
    return facts | {"alignments": [_alignment(s, t, draw) for s, t in zip(sources[:6], references[:6], strict=True)]}


def _alignment(source, target, draw):
    source, target = source.split(), target.split()
    weights = []
    for t in range(len(target)):
        row = [2.0 ** -abs(s - t) * draw.random() for s in range(len(source))]
        weights.append([each / sum(row) for each in row])
    return {"source": source, "target": target, "weights": weights, "reading": "output", "gold": [[0, 0], [1, 2]]}


def _pruning(found: Evaluation):
    whole = found.bleu.score
    fall = {"importance": 0.0, "random": 0.6, "reversed": 0.95}
    points = [
        {"order": order, "share": n / 8, "removed": n, "bleu": whole * (1 - rate * n / 8) - 9 * (n > 2)}
        for order, rate in fall.items()
        for n in range(9)
    ]
    single = [
        {"module": f"{role}.0", "role": role, "head": head, "bleu": whole - head, "difference": -float(head)}
        for role in ("encoder", "decoder", "cross")
        for head in range(4)
    ]
    return {"heads": 12, "sentences": 60, "bleu": whole, "points": points, "single": single}


def _write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, ensure_ascii=False))


def made_run(folder, name, **data):
    """A run of the grammar with fresh weights."""
    from regard.lab.runs.config import make_config
    from regard.lab.runs.run import METRICS, WEIGHTS, save_weights, write_metrics
    from regard.lab.training.preparation import prepare

    sections = {"data": {"corpus": "grammar", "size": 60}, "tokenizer": {"kind": "words"}}
    prepared = prepare(make_config(sections | {"model": {"system": name, "width": 8}}), folder)
    with torch.no_grad():
        prepared.task.model.projection.bias[:4] = -9.0  # weights of chance say words, and not the end at once
    save_weights(prepared.task.model, {}, folder / WEIGHTS, {})
    rows = [{"step": n, "minutes": n / 4, "train_loss": 1 / n, "bleu": n if n > 1 else None} for n in (1, 2, 3)]
    write_metrics(folder / METRICS, rows)
    return folder
