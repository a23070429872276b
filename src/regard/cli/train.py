"""`regard train`: a corpus in, a folder out that translates; stopped at any moment, it goes on where it was."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from regard.cli.outputs import check_folder
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.seq2seq.runs.config import Config
    from regard.seq2seq.training.preparation import Prepared
    from regard.seq2seq.training.stream import Standing

#: Packages of the lab that may be missing.
LAB = ("lightning", "pydantic", "sentencepiece", "sacrebleu", "safetensors")


@dataclass(frozen=True)
class Wish:
    """What `regard train` was asked for; what is None is left as the configuration has it."""

    config: Path | None = None
    overrides: tuple[str, ...] = ()
    source: Path | None = None
    target: Path | None = None
    data: str | None = None
    system: str | None = None
    minutes: float | None = None
    steps: int | None = None
    epochs: int | None = None
    out: Path | None = None
    resume: bool = False


def told(arguments: list[str], **options: Any) -> Wish:
    """The wish of a command line: `CONFIG.toml` and `section.key=value` in any order."""
    files = [one for one in arguments if "=" not in one]
    if len(files) > 1:
        raise RegardError(f"train: {' and '.join(files)} cannot both be the configuration. Give one file.")
    overrides = tuple(one for one in arguments if "=" in one)
    return Wish(Path(files[0]) if files else None, overrides, **options)


def print_template() -> None:
    """The configuration with every key explained."""
    with _lab():
        from regard.seq2seq.runs.config import template
    print(template(), end="")


def run(wish: Wish) -> None:
    """Prepare, train, and say how to translate or how to go on."""
    check_folder("train", "--out", wish.out)
    with _lab():
        from regard.seq2seq.runs.guards import alone
        from regard.seq2seq.training.preparation import is_unsaved
        from regard.seq2seq.training.ranks import process_number
    if anew := wish.resume and wish.out is not None and is_unsaved(wish.out):
        wish = _begun_anew(wish)
    config, folder = _configured(wish)
    rank = process_number(config.training)
    console = Console(stderr=True, quiet=rank > 0, highlight=False, soft_wrap=True)
    with alone(folder, "train") if rank == 0 else nullcontext():
        if not wish.resume and rank == 0:
            _check_fresh(folder)
        if wish.resume:
            _say_changes(console, folder, config)
        if anew:
            console.print(f"{folder} was stopped before its first save. The training begins anew.", markup=False)
        _train(console, config, folder, wish.resume)


def _train(console: Console, config: Config, folder: Path, resume: bool) -> None:
    from regard.seq2seq.training.fitting import fit, quiet
    from regard.seq2seq.training.preparation import prepare

    with quiet(), console.status("Reading the corpus and learning its vocabularies"):
        prepared = prepare(config, folder)
    _introduce(console, prepared, folder)
    try:
        with _bar(console, config) as told_bar:
            outcome = fit(prepared.task, resume=resume, told=told_bar)
    except KeyboardInterrupt:
        console.print("Stopped at once; the last saved state is kept. Go on with:")
        console.print(f"  regard train --out {folder} --resume", markup=False)
        raise
    if not console.quiet:
        _conclude(console, folder, outcome.reason, outcome.standing)
    if outcome.reason == "interrupted":
        raise KeyboardInterrupt


def _configured(wish: Wish) -> tuple[Config, Path]:
    """The configuration and the folder of the run."""
    from regard.seq2seq.runs.config import read_config
    from regard.seq2seq.training.preparation import reconfigured

    overrides = [*_options(wish), *wish.overrides]
    if not wish.resume:
        config = read_config(wish.config, overrides)
        return config, wish.out or Path("runs") / _name(config)
    if wish.out is None:
        raise RegardError("train: --resume goes on with a run. Name its folder with --out DIR.")
    if wish.config is not None:
        raise RegardError(
            f"train: a run that is gone on with has its own {wish.out / 'config.toml'}. Leave the file out."
        )

    def changed(sections: dict[str, Any]) -> Config:
        return read_config(None, overrides, sections)

    return reconfigured(wish.out, changed), wish.out


def _begun_anew(wish: Wish) -> Wish:
    """The wish for a new training in a folder where none was saved; a configuration that was written is kept."""
    from regard.seq2seq.runs.run import CONFIG

    assert wish.out is not None
    kept = wish.out / CONFIG
    return replace(wish, resume=False, config=wish.config or (kept if kept.exists() else None))


def _options(wish: Wish) -> Iterable[str]:
    """The options as overrides; a budget takes the place of the others."""
    budgets = {name: getattr(wish, name) for name in ("minutes", "steps", "epochs")}
    given = {name: value for name, value in budgets.items() if value is not None}
    if len(given) > 1:
        raise RegardError(f"train: --{' and --'.join(given)} cannot both be the budget. Give one.")
    if given:
        yield from (f"training.{name}={given.get(name, 0)}" for name in ("steps", "epochs"))
        yield f"training.minutes={float(given.get('minutes', 0.0))}"
    if wish.data is not None and wish.source is not None:
        raise RegardError("train: --data and --source are two corpora. Give one of them.")
    for name in ("source", "target"):
        if getattr(wish, name) is not None:
            yield f"data.{name}={_quoted(getattr(wish, name))}"
    if wish.data is not None:
        yield from (f"data.corpus={_quoted(wish.data)}", 'data.source=""', 'data.target=""')
    if wish.system is not None:
        yield f"model.system={_quoted(wish.system)}"


def _quoted(value: Any) -> str:
    import json

    return json.dumps(str(value), ensure_ascii=False)


def _name(config: Config) -> str:
    """Of the folder: the corpus and the system."""
    source, target = Path(config.data.source), Path(config.data.target)
    stem = source.stem if source.stem == target.stem else f"{source.stem}-{target.stem}"
    if source.name and source.stem == target.stem:  # text.en and text.fr
        stem = f"{source.stem}{source.suffix}{target.suffix}".replace(".", "-")
    corpus = stem if config.data.source else Path(config.data.corpus).stem
    return re.sub(r"[^\w.-]+", "-", f"{corpus}-{config.model.system}")


def _say_changes(console: Console, folder: Path, config: Config) -> None:
    """Print the keys of the configuration that change as a run goes on."""
    from regard.seq2seq.runs.config import differences, make_config
    from regard.seq2seq.runs.run import CONFIG, read_sections

    for key, (before, now) in differences(make_config(read_sections(folder)), config).items():
        console.print(f"{folder / CONFIG}: {key} was {before!r} and is {now!r} from here on.", markup=False)


def _check_fresh(folder: Path) -> None:
    from regard.seq2seq.comparison.study import STUDY
    from regard.seq2seq.runs.run import STATE, WEIGHTS

    if (folder / STUDY).exists():
        raise RegardError(
            f"train: {folder} holds a comparison, whose vocabularies a run would overwrite. Give another --out."
        )
    if (folder / WEIGHTS).exists() or (folder / STATE).exists():
        raise RegardError(
            f"train: {folder} holds a run already, and nothing trained is written over. Go on with it by "
            f"`regard train --out {folder} --resume`, or give another --out."
        )


def _introduce(console: Console, prepared: Prepared, folder: Path) -> None:
    from regard.seq2seq.training.preparation import counted_by

    model, config = prepared.task.model, prepared.task.config
    unit, amount = config.training.budget
    weights = sum(weight.numel() for weight in model.parameters())
    console.print(prepared.corpus.describe(), markup=False)
    console.print(
        f"{config.model.system}, {weights:,} weights, vocabularies of {model.source_size:,} and {model.target_size:,}; "
        f"{amount:g} {unit}, into {folder}",
        markup=False,
    )
    if (counted := counted_by(config, prepared.corpus)) != "13a":
        console.print(f"BLEU counts tokens of sacrebleu's tokenizer {counted}.", markup=False)


def _conclude(console: Console, folder: Path, reason: str, standing: Standing) -> None:
    measured = [row for row in standing.rows if row.get("valid_loss") is not None]
    if measured:
        row = measured[-1]
        bleu = "" if row.get("bleu") is None else f", BLEU {row['bleu']:.1f}"
        console.print(f"Validation: perplexity {row['perplexity']:.2f}{bleu} (greedy)", markup=False)
    minutes = standing.seconds / 60
    if reason == "interrupted":
        console.print(f"Stopped after step {standing.step} ({minutes:.1f} minutes); everything is saved. Go on with:")
        console.print(f"  regard train --out {folder} --resume", markup=False)
        return
    why = "validation got no better" if reason == "patience" else "the budget is used up"
    console.print(f"{standing.step:,} steps in {minutes:.1f} minutes, {why}. Translate with:", markup=False)
    console.print(f"  regard translate {folder}", markup=False)


@contextmanager
def _bar(console: Console, config: Config) -> Any:
    """The share of the budget, the speed and the time left, as a function of where the training stands."""
    from regard.seq2seq.training.stream import TimeLeft

    columns = (BarColumn(bar_width=6), TextColumn("{task.percentage:>3.0f}% {task.description}"))
    left = TimeLeft()
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, refresh_per_second=4, disable=hidden) as progress:
        task = progress.add_task("", total=1.0)

        def show(standing: Standing) -> None:
            if standing.step % 5 and standing.step > 5:
                return
            progress.update(task, completed=standing.share, description=_described(standing, left(standing)))

        yield show


def _described(standing: Standing, seconds_left: float | None) -> str:
    """Step, speed, time left and the last validation, short enough for 80 columns with the bar."""
    speed = standing.tokens / standing.seconds if standing.seconds else 0.0
    measured = next((row for row in reversed(standing.rows) if row.get("valid_loss") is not None), {})
    parts = [f"step {standing.step:,}", f"{speed:,.0f} tokens/s"]
    if seconds_left is not None:
        parts.append(f"{clock(seconds_left)} left")
    if (bleu := measured.get("bleu")) is not None:
        parts.append(f"BLEU {bleu:.1f}")
    elif (perplexity := measured.get("perplexity")) is not None:
        parts.append(f"perplexity {perplexity:.4g}")
    return " | ".join(parts)


def clock(seconds: float) -> str:
    """Hours and minutes, or minutes and seconds.

    >>> clock(75), clock(119.7), clock(7500)
    ('1:15 min', '2:00 min', '2:05 h')
    """
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d} min" if whole < 3600 else f"{whole // 3600}:{whole % 3600 // 60:02d} h"


@contextmanager
def _lab() -> Any:
    """A missing package of the lab is a sentence; what lightning warns of when it is imported is its own affair."""
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in LAB:
            raise
        raise RegardError(f"Training needs {error.name}: pip install 'regard[lab]'") from None
