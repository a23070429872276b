"""`regard train`: train a translator on a corpus, or resume a training."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from regard.base.errors import RegardError
from regard.cli.options import TrainOptions
from regard.cli.outputs import check_folder

if TYPE_CHECKING:
    from regard.lab.runs.config import Config
    from regard.lab.training.preparation import Prepared
    from regard.lab.training.stream import TrainingProgress


def run(settings: TrainOptions) -> None:
    """Train, and print how to translate or how to continue. Of several processes only the first one prints."""
    if settings.template:
        from regard.lab import Config

        return print(Config().write(), end="")
    check_folder("train", "--out", settings.out)
    from regard.lab import resume_training, train
    from regard.lab.training.preparation import is_unsaved
    from regard.lab.training.ranks import process_number

    kept = None
    # a run without a saved state cannot be resumed, so it begins anew, with the configuration that it wrote
    if is_unsaved_run := settings.resume and settings.out is not None and is_unsaved(settings.out):
        settings, kept = replace(settings, resume=False), _kept_config(settings)
    config, folder = _configured(settings, kept)
    console = Console(stderr=True, quiet=process_number(config.training) > 0, highlight=False, soft_wrap=True)
    if is_unsaved_run:
        console.print(f"{folder} was stopped before its first save. The training begins anew.", markup=False)
    try:
        with _progress(console, config, folder) as callbacks:
            if settings.resume:
                trained = resume_training(folder, _overrides(settings), **callbacks)
            else:
                trained = train(config, folder, **callbacks)
    except KeyboardInterrupt:
        console.print("Stopped at once; the last saved state is kept. Go on with:")
        console.print(f"  regard train --out {folder} --resume", markup=False)
        raise
    if not console.quiet:
        _conclude(console, folder, trained.outcome.reason, trained.outcome.progress)
    # the state is saved, but the command ends as after Ctrl-C
    if trained.outcome.reason == "interrupted":
        raise KeyboardInterrupt


@contextmanager
def _progress(console: Console, config: Config, folder: Path) -> Any:
    """Show what `train` does: a status line while it prepares, then a bar.

    Yields the arguments `on_start` and `on_step` of `train`. `steps` gets the function that updates the bar when the
    training starts.
    """
    with ExitStack() as stack:
        status = stack.enter_context(console.status("Reading the corpus and learning its vocabularies"))
        steps: list[Callable[[TrainingProgress], None]] = []

        def on_start(prepared: Prepared) -> None:
            """End the status line, print what will be trained, and begin the bar."""
            status.stop()
            for key, (before, now) in prepared.changes.items():
                console.print(f"{folder / 'config.toml'}: {key} was {before!r} and is now {now!r}.", markup=False)
            _introduce(console, prepared, folder)
            steps.append(stack.enter_context(_bar(console, config)))

        yield {"on_start": on_start, "on_step": lambda progress: steps[0](progress)}


def _configured(settings: TrainOptions, kept: Path | None) -> tuple[Config, Path]:
    """The configuration and the folder of the run. `kept` is a configuration that the folder has already."""
    from regard.lab import read_config
    from regard.lab.training.preparation import reconfigured

    overrides = _overrides(settings)
    if not settings.resume:
        config = read_config(settings.config or kept, overrides)
        return config, settings.out or Path("runs") / _name(config)
    if settings.out is None:
        raise RegardError("train: --resume continues a run. Name its folder with --out DIR.")
    if settings.config is not None:
        raise RegardError(
            f"train: a run that is continued has its own {settings.out / 'config.toml'}. Leave the configuration "
            "file out."
        )
    return reconfigured(settings.out, lambda sections: read_config(None, overrides, sections)), settings.out


def _overrides(settings: TrainOptions) -> list[str]:
    """The options and the keys of the command line, as overrides of the configuration."""
    return [*_options(settings), *settings.overrides]


def _kept_config(settings: TrainOptions) -> Path | None:
    """The configuration that a run without a saved state has written; the new training keeps it. None without one."""
    from regard.lab.runs.run import CONFIG

    assert settings.out is not None
    kept = settings.out / CONFIG
    return kept if kept.exists() else None


def _options(settings: TrainOptions) -> Iterable[str]:
    """The options as overrides; a budget sets the other budgets to 0."""
    budgets = {name: getattr(settings, name) for name in ("minutes", "steps", "epochs")}
    given = {name: value for name, value in budgets.items() if value is not None}
    if len(given) > 1:
        raise RegardError(f"train: --{' and --'.join(given)} cannot both be the budget. Give one.")
    if given:
        yield from (f"training.{name}={given.get(name, 0)}" for name in ("steps", "epochs"))
        yield f"training.minutes={float(given.get('minutes', 0.0))}"
    if settings.data is not None and settings.source is not None:
        raise RegardError("train: --data and --source are two corpora. Give one of them.")
    from regard.lab.runs.config import toml  # quotes a text, so that no override is read as a number

    for name in ("source", "target"):
        if getattr(settings, name) is not None:
            yield f"data.{name}={toml(str(getattr(settings, name)))}"
    if settings.data is not None:
        yield from (f"data.corpus={toml(str(settings.data))}", 'data.source=""', 'data.target=""')
    if settings.system is not None:
        yield f"model.system={toml(str(settings.system))}"


def _name(config: Config) -> str:
    """The name of the folder: the corpus and the system."""
    source, target = Path(config.data.source), Path(config.data.target)
    stem = source.stem if source.stem == target.stem else f"{source.stem}-{target.stem}"
    if source.name and source.stem == target.stem:  # text.en and text.fr
        stem = f"{source.stem}{source.suffix}{target.suffix}".replace(".", "-")
    corpus = stem if config.data.source else Path(config.data.corpus).stem
    return re.sub(r"[^\w.-]+", "-", f"{corpus}-{config.model.system}")


def _introduce(console: Console, prepared: Prepared, folder: Path) -> None:
    """Print the corpus, the size of the model, the budget and the folder."""
    model, config = prepared.task.model, prepared.task.config
    unit, amount = config.training.budget
    weights = sum(weight.numel() for weight in model.parameters())
    console.print(prepared.corpus.describe(), markup=False)
    console.print(
        f"{config.model.system}, {weights:,} weights, vocabularies of {model.source_size:,} and {model.target_size:,}; "
        f"{amount:g} {unit}, into {folder}",
        markup=False,
    )
    if prepared.bleu_tokenizer != "13a":
        console.print(f"BLEU counts tokens of sacrebleu's tokenizer {prepared.bleu_tokenizer}.", markup=False)


def _conclude(console: Console, folder: Path, reason: str, progress: TrainingProgress) -> None:
    """Print the last validation, why the training ended (`Outcome.reason`), and the next command."""
    measured = [row for row in progress.rows if row.get("valid_loss") is not None]
    if measured:
        row = measured[-1]
        bleu = "" if row.get("bleu") is None else f", BLEU {row['bleu']:.1f}"
        console.print(f"Validation: perplexity {row['perplexity']:.2f}{bleu} (greedy)", markup=False)
    if reason == "interrupted":
        console.print(
            f"Stopped after step {progress.step} ({clock(progress.seconds)}); everything is saved. Go on with:"
        )
        console.print(f"  regard train --out {folder} --resume", markup=False)
        return
    why = "validation got no better" if reason == "patience" else "the budget is used up"
    console.print(f"{progress.step:,} steps in {clock(progress.seconds)}, {why}. Translate with:", markup=False)
    console.print(f"  regard translate {folder}", markup=False)


@contextmanager
def _bar(console: Console, config: Config) -> Any:
    """A bar with the used share of the budget, the speed and the time left; yields the function that updates it."""
    from regard.lab.training.stream import TimeLeft

    columns = (BarColumn(bar_width=6), TextColumn("{task.percentage:>3.0f}% {task.description}"))
    left = TimeLeft()
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, refresh_per_second=4, disable=hidden) as bar:
        task = bar.add_task("", total=1.0)

        def show(progress: TrainingProgress) -> None:
            """Update the bar after each of the first 5 steps, then after every fifth step."""
            if progress.step % 5 and progress.step > 5:
                return
            bar.update(task, completed=progress.share, description=_described(progress, left(progress)))

        yield show


def _described(progress: TrainingProgress, seconds_left: float | None) -> str:
    """Step, speed, time left and the last validation; with the bar it fits into 80 columns."""
    speed = progress.tokens / progress.seconds if progress.seconds else 0.0
    measured = next((row for row in reversed(progress.rows) if row.get("valid_loss") is not None), {})
    parts = [f"step {progress.step:,}", f"{speed:,.0f} tokens/s"]
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
