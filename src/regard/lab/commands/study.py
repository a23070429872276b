"""The study that the options of `regard compare` describe."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from regard.base.errors import RegardError
from regard.cli.options import StudyOptions

if TYPE_CHECKING:
    from regard.lab import Study

#: Options that vary one system. --prune and --scaled are switches; the others list values.
SWEEPS = ("heads", "positions", "attention", "prune", "scaled")

#: Options that say where and how trials run; the others describe the study.
HOW = ("out", "processes", "engine", "report")


def describes_study(settings: StudyOptions) -> bool:
    """Whether an option describes the study, and not only where and how trials run."""
    about = {name: value for name, value in vars(settings).items() if name not in HOW}
    return any(value not in (None, [], (), False) for value in about.values())


def study_of(settings: StudyOptions) -> Study:
    """The study that the options describe."""
    from regard.lab import make_study

    sweep = _sweep(settings)
    value = None if sweep is None else getattr(settings, sweep)
    study = make_study(
        _data(settings),
        systems=None if settings.systems is None else _list(settings.systems),
        seeds=None if settings.seeds is None else seeds_of(settings.seeds),
        budget=_budget(settings),
        sweep=sweep,
        values=_list(value) if isinstance(value, str) else (),  # a switch has no values
        preset=settings.preset,
        overrides=tuple(settings.overrides),
    )
    # `make_study` has no arguments for these
    words = study.train_words if settings.train_words is None else settings.train_words
    return replace(study, train_words=words, without_near=settings.without_near, beam=settings.beam or 1)


def _sweep(settings: StudyOptions) -> str | None:
    """The option of `SWEEPS` that was given; None without one."""
    sweeps = [name for name in SWEEPS if getattr(settings, name)]
    if len(sweeps) > 1:
        raise RegardError(f"compare: --{' and --'.join(sweeps)} are two questions. Run one comparison for each.")
    return sweeps[0] if sweeps else None


def _data(settings: StudyOptions) -> str | tuple[Path, Path] | None:
    """The corpus for `make_study`: a name or a path, the files of both sides, or None for the default."""
    if settings.data is not None and settings.source is not None:
        raise RegardError("compare: --data and --source are two corpora. Give one of them.")
    if settings.source is None and settings.target is None:
        return settings.data
    if settings.source is None or settings.target is None:
        raise RegardError("compare: --source and --target are two files that belong together. Give both.")
    return settings.source, settings.target


def _budget(settings: StudyOptions) -> tuple[str, float] | None:
    """The unit and the amount of the budget; None if no option gives one."""
    budgets = {
        unit: getattr(settings, unit) for unit in ("minutes", "steps", "epochs") if getattr(settings, unit) is not None
    }
    if len(budgets) > 1:
        raise RegardError(f"compare: --{' and --'.join(budgets)} cannot both be the budget. Give one.")
    return next(iter(budgets.items()), None)


def seeds_of(text: str) -> tuple[int, ...]:
    """The seeds of "1,2,5"; a number alone says how many: "3" is 1, 2, 3.

    >>> seeds_of("3"), seeds_of("7,9")
    ((1, 2, 3), (7, 9))
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts) or (len(parts) == 1 and int(parts[0]) < 1):
        raise RegardError(f"compare: --seeds {text} is not right. Give how many, as 3, or which, as 1,2,3.")
    return tuple(range(1, int(parts[0]) + 1)) if len(parts) == 1 else tuple(map(int, parts))


def command_of(settings: StudyOptions, folder: Path) -> str:
    """The command that runs the same comparison again. Options with their default value are left out."""
    words = ["regard", "compare"]
    for name, value in vars(settings).items():
        flag = "--" + name.replace("_", "-")
        if name not in ("overrides", "out", "report") and value not in (None, False, "local"):
            words += [flag] if value is True else [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join([*words, "--out", str(folder), *settings.overrides])


def _list(text: str) -> list[str]:
    """The parts of a text between commas, without empty ones."""
    return [part.strip() for part in text.split(",") if part.strip()]
