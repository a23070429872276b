"""`make_study`: the study that answers one question, from a few names and numbers; presets, sweeps and defaults."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from regard.base.checks import checked
from regard.base.errors import RegardError, nearest
from regard.lab.comparison.study import DEFAULT, Entry, Study
from regard.lab.comparison.sweeps import SHORT, entries
from regard.lab.models.systems import find_system
from regard.lab.runs.config import read_config

#: Values of a preset, used where `make_study` gets none.
PRESETS: dict[str, dict[str, Any]] = {
    # After 600 steps the systems differ (BLEU 13 without attention, 73 to 100 with it); after a minute all score 99.9.
    "quick": {
        "data": "grammar",
        "overrides": ("model.width=64",),
        "systems": ("none", "bahdanau", "luong_general", "transformer"),
        "budget": ("steps", 600),
    },
    "full": {"budget": ("minutes", 4.0)},
}
#: Seeds of a preset or a sweep, if none are given. Two variants often differ less than two seeds of one of them.
SWEEP_SEEDS = (1, 2, 3)
#: The unit and the amount of training for each trial, if no budget is given.
BUDGET = ("minutes", 4.0)
#: Steps that are assumed for a minute of training, to place the validations before the speed is known.
STEPS_PER_MINUTE = 600


@checked
def make_study(
    data: str | tuple[str | Path, str | Path] | None = None,
    *,
    systems: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    budget: tuple[str, float] | None = None,
    sweep: str | None = None,
    values: Sequence[str] = (),
    preset: str | None = None,
    overrides: Iterable[str] = (),
) -> Study:
    """A comparison of systems on one corpus with one budget, for `regard.lab.compare`.

    `dataclasses.replace` changes the other fields of the study, such as `beam` and `train_words`.

    Args:
        data: The name of a corpus, a file, a folder, or two files of source and target sentences.
        systems: Names of `SYSTEMS`; by default all seven. A sweep changes one system, by default "transformer".
        seeds: Of the trainings; every system is trained once for each seed. By default 1, 2 and 3 for a sweep or a
            preset, otherwise 1.
        budget: The unit ("minutes", "steps" or "epochs") and the amount; by default 4 minutes.
        sweep: "heads", "positions", "attention", "prune" or "scaled": compare variants of one system.
        values: The variants of the sweep; by default those of `SWEEPS`.
        preset: "quick" or "full"; values for the arguments that are not given.
        overrides: Keys of the configuration that all trials share, as "model.width=64".

    >>> study = make_study("grammar", systems=["none", "bahdanau"], seeds=[1, 2, 3], budget=("minutes", 1))
    >>> study.name, len(study.systems), study.config.training.budget
    ('grammar', 2, ('minutes', 1.0))
    """
    if preset is not None and preset not in PRESETS:
        raise RegardError(f"compare: there is no preset {preset!r}. {nearest(preset, PRESETS)}")
    defaults = PRESETS.get(preset or "", {})
    if data is None and "data" in defaults:
        data, overrides = defaults["data"], (*defaults["overrides"], *overrides)
    if systems is None and sweep is None:
        systems = defaults.get("systems")
    unit, amount = budget or defaults.get("budget", BUDGET)
    return Study(
        name=_name(data, preset, sweep),
        config=read_config(None, overrides, _sections(data, unit, amount)).with_explicit_kind(),
        systems=_entries(systems or (), sweep, values),
        seeds=tuple(seeds or (SWEEP_SEEDS if preset or sweep else (1,))),
        sweep=sweep,
        train_words=SHORT if sweep == "positions" else None,
    )


def _entries(names: Sequence[str], sweep: str | None, values: Sequence[str]) -> tuple[Entry, ...]:
    """The systems of a study: the named ones, or the variants of one system in a sweep."""
    for name in names:
        find_system(name)  # raises an error for an unknown name
    if sweep is None:
        return tuple(Entry(name, name) for name in names or DEFAULT)
    if len(names) > 1:
        raise RegardError(f"compare: the sweep {sweep} changes one system, got {', '.join(names)}. Give one.")
    return entries(sweep, values, names[0] if names else "transformer")


def _sections(data: str | tuple[str | Path, str | Path] | None, unit: str, amount: float) -> dict[str, dict[str, Any]]:
    """The configuration that all trials share, before overrides. `unit` and `amount` are the budget.

    Training losses are logged every 50 steps, or as often as validations if these are more frequent.
    """
    corpus: dict[str, Any] = {}
    if isinstance(data, tuple):
        corpus = {"source": str(data[0]), "target": str(data[1])}
    elif data is not None:
        corpus = {"corpus": data}
    steps = _validation_steps(unit, amount)
    return {
        "data": corpus,
        "training": {unit: float(amount) if unit == "minutes" else int(amount), "log_steps": min(50, steps)},
        "validation": {"sentences": 200, "steps": steps},
    }


def _validation_steps(unit: str, amount: float) -> int:
    """Steps between two validations: about eight points of a learning curve, and at most 1,000 steps.

    The budget is `amount` "minutes", "steps" or "epochs".
    """
    if unit == "epochs":
        return 500  # the default, because the steps of an epoch are not known yet
    steps = amount if unit == "steps" else amount * STEPS_PER_MINUTE
    return max(1, min(1000, round(steps / 8)))


def _name(data: str | tuple[str | Path, str | Path] | None, preset: str | None, sweep: str | None) -> str:
    """The name of the comparison and of its folder: the corpus, the preset and the sweep."""
    corpus = f"{Path(data[0]).stem}-{Path(data[1]).stem}" if isinstance(data, tuple) else data or "bible-en-fr"
    parts = [Path(corpus).stem, *(part for part in (preset, sweep) if part)]
    return re.sub(r"[^\w.-]+", "-", "-".join(parts))
