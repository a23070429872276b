"""What `regard compare` was asked for, as the comparison that is meant."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.cli.train import _quoted
from regard.errors import RegardError, nearest

if TYPE_CHECKING:
    from regard.seq2seq.comparison.study import Entry, Study

#: What a preset stands for where nothing else is said.
PRESETS: dict[str, dict[str, Any]] = {
    # The grammar is learned in a minute, and with a known alignment; real text takes several times as long.
    "quick": {
        "data": "grammar",
        "overrides": ("model.width=64", "validation.steps=400"),
        "systems": "none,bahdanau,luong_general,transformer",
        "seeds": "1",
        "minutes": 1.0,
    },
    "full": {"systems": "", "seeds": "3", "minutes": 4.0},
}
#: The budget when none is set.
MINUTES = 4.0
#: Corpora whose words are whole: generated ones have few.
WHOLE_WORDS = ("copy", "reverse", "grammar")
#: Steps of a minute, for the number of validations before a speed is known.
STEPS_A_MINUTE = 600
SWEEPS = ("heads", "positions", "attention", "prune", "scaled")

#: What of a wish says where and how, and not what is compared.
ELSEWHERE = ("out", "processes", "engine", "report")


@dataclass(frozen=True)
class Wish:
    """What `regard compare` was asked for; None is what was not said."""

    overrides: tuple[str, ...] = ()
    data: str | None = None
    source: Path | None = None
    target: Path | None = None
    systems: str | None = None
    seeds: str | None = None
    minutes: float | None = None
    steps: int | None = None
    epochs: int | None = None
    preset: str | None = None
    heads: str | None = None
    positions: str | None = None
    attention: str | None = None
    prune: bool = False
    scaled: bool = False
    train_words: int | None = None
    without_near: bool = False
    beam: int | None = None
    processes: int | None = None
    engine: str = "local"
    out: Path | None = None
    report: bool = False

    @property
    def says_what(self) -> bool:
        """Whether anything was said about what is compared, and not only about where and how."""
        about = {name: value for name, value in vars(self).items() if name not in ELSEWHERE}
        return any(value not in (None, (), False) for value in about.values())


def study_of(wish: Wish) -> Study:
    """The comparison that is wished for."""
    from regard.seq2seq.comparison.study import Study
    from regard.seq2seq.runs.config import read_config

    if wish.preset is not None and wish.preset not in PRESETS:
        raise RegardError(f"compare: there is no preset {wish.preset!r}. {nearest(wish.preset, PRESETS)}")
    preset = PRESETS.get(wish.preset or "", {})
    if wish.data is None and wish.source is None and "data" in preset:
        wish = replace(wish, data=preset["data"], overrides=(*preset["overrides"], *wish.overrides))
    sweep, entries = _systems(wish, preset)
    config = read_config(None, [*_options(wish, preset), *wish.overrides])
    words = wish.train_words
    if words is None and sweep == "positions":
        from regard.seq2seq.comparison.sweeps import SHORT as words
    return Study(
        name=_name(wish),
        config=config,
        systems=entries,
        seeds=seeds_of(wish.seeds or preset.get("seeds", "1")),
        sweep=sweep,
        train_words=words,
        without_near=wish.without_near,
        beam=wish.beam or 1,
    )


def seeds_of(text: str) -> tuple[int, ...]:
    """The seeds of "1,2,5"; a number alone says how many: "3" is 1, 2, 3.

    >>> seeds_of("3"), seeds_of("7,9")
    ((1, 2, 3), (7, 9))
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts) or (len(parts) == 1 and int(parts[0]) < 1):
        raise RegardError(f"compare: --seeds {text} is not right. Give how many, as 3, or which, as 1,2,3.")
    return tuple(range(1, int(parts[0]) + 1)) if len(parts) == 1 else tuple(map(int, parts))


def command_of(wish: Wish, folder: Path) -> str:
    """The command that compares the same again."""
    words = ["regard", "compare"]
    for name, value in vars(wish).items():
        flag = "--" + name.replace("_", "-")
        if name not in ("overrides", "out", "report") and value not in (None, False, "local"):
            words += [flag] if value is True else [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join([*words, "--out", str(folder), *wish.overrides])


def _systems(wish: Wish, preset: dict[str, Any]) -> tuple[str | None, tuple[Entry, ...]]:
    """Which sweep, if any, and what is compared."""
    from regard.seq2seq.comparison.study import DEFAULT, Entry
    from regard.seq2seq.comparison.sweeps import entries
    from regard.seq2seq.models.systems import system

    asked = [name for name in SWEEPS if getattr(wish, name)]
    if len(asked) > 1:
        raise RegardError(f"compare: --{' and --'.join(asked)} are two questions. Compare once for each.")
    names = _list(wish.systems if wish.systems is not None else "" if asked else preset.get("systems", ""))
    for name in names:
        system(name)
    if not asked:
        return None, tuple(Entry(name, name) for name in names or DEFAULT)
    if len(names) > 1:
        raise RegardError(f"compare: --{asked[0]} changes one system, got --systems {wish.systems}. Give one.")
    value = getattr(wish, asked[0])
    return asked[0], entries(asked[0], [] if value is True else _list(value), names[0] if names else "transformer")


def _options(wish: Wish, preset: dict[str, Any]) -> list[str]:
    """The configuration that all trials share, as overrides."""
    if wish.data is not None and wish.source is not None:
        raise RegardError("compare: --data and --source are two corpora. Give one of them.")
    if (wish.source is None) != (wish.target is None):
        raise RegardError("compare: --source and --target are two files that belong together. Give both.")
    options = [] if wish.data is None else [f"data.corpus={_quoted(wish.data)}"]
    if wish.source is not None:
        options += [f"data.source={_quoted(wish.source)}", f"data.target={_quoted(wish.target)}"]
    if wish.data in WHOLE_WORDS:
        options.append("tokenizer.kind=words")
    unit, amount = _budget(wish, preset)
    options.append(f"training.{unit}={float(amount) if unit == 'minutes' else amount}")
    steps = _validations(unit, amount)
    return [
        *options,
        "validation.sentences=200",
        f"validation.steps={steps}",
        f"training.log_steps={min(50, steps)}",
    ]


def _budget(wish: Wish, preset: dict[str, Any]) -> tuple[str, float]:
    given = {unit: getattr(wish, unit) for unit in ("minutes", "steps", "epochs") if getattr(wish, unit) is not None}
    if len(given) > 1:
        raise RegardError(f"compare: --{' and --'.join(given)} cannot both be the budget. Give one.")
    return next(iter(given.items()), ("minutes", preset.get("minutes", MINUTES)))


def _validations(unit: str, amount: float) -> int:
    """Steps between two validations: about eight points of a learning curve, and at most 1,000 steps."""
    if unit == "epochs":
        return 500
    steps = amount if unit == "steps" else amount * STEPS_A_MINUTE
    return max(1, min(1000, round(steps / 8)))


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _name(wish: Wish) -> str:
    """Of the comparison and its folder: the corpus, and what is asked of it."""
    corpus = wish.data or (f"{wish.source.stem}-{wish.target.stem}" if wish.source and wish.target else "bible-en-fr")
    asked = [name for name in SWEEPS if getattr(wish, name)]
    parts = [Path(corpus).stem, *([wish.preset] if wish.preset else []), *asked]
    return re.sub(r"[^\w.-]+", "-", "-".join(parts))
