"""The commands of `regard` and their options. Each command imports its work when it runs: --help needs no torch."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from regard.base.errors import MissingPackage, RegardError
from regard.cli.extras import named
from regard.cli.lab import lab
from regard.cli.options import (
    AlignOptions,
    AnalyzeOptions,
    EvaluateOptions,
    Json,
    Model,
    Name,
    StudyOptions,
    TrainOptions,
    TranslateOptions,
)
from regard.version import __version__

#: The beginning of a message that says what failed, as "load_model: " and "attend(positions=...): "; a path does not.
NAMES_OPERATION = re.compile(r"[A-Za-z_][\w.]*( \w+)?(:|\()")


class Command(TyperCommand):
    """Names the extra that has all that the command needs, if a package is not installed; and itself in each error."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (MissingPackage, ModuleNotFoundError) as error:
            missing = named(error, self.name or "", ctx.params)
            if missing is None:
                raise
            raise missing from error
        except RegardError as error:
            if NAMES_OPERATION.match(str(error)):
                raise
            raise RegardError(f"{self.name}: {error}") from error


class Commands(TyperGroup):
    """Prints an error of the user as one red line (exit status 2); Ctrl-C prints nothing (exit status 130)."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RegardError as error:
            typer.secho(str(error), fg="red", err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Any attention mechanism, run fast, with every weight visible.",
)


def add_command(name: str, options: type, run: Callable[[Any], object]) -> None:
    """Add a command whose arguments and options are the fields of a dataclass; `run` gets an object of it."""

    def command(**given: Any) -> None:
        """Run the command with the options that were given."""
        run(options(**{field: value for field, value in given.items() if value is not None}))

    # typer takes no factory of a default: a list that is not given is None here, and left out in `command`
    lists = {field.name for field in fields(options) if field.default_factory is not MISSING}
    signature = inspect.signature(options, eval_str=True)
    parameters = [p.replace(default=None) if p.name in lists else p for p in signature.parameters.values()]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__doc__ = options.__doc__
    app.command(name, cls=Command)(command)


@app.callback(invoke_without_command=True)
def regard(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    """Any attention mechanism, run fast, with every weight visible."""
    if version:
        typer.echo(f"regard {__version__}")
        raise typer.Exit()


@app.command(cls=Command)
def demo(
    out: Annotated[Path, typer.Option(help="Folder of the page.")] = Path("regard-demo"),
    model: Model = "minilm",
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Read two sentences and a passage with a real model, and write a page with all its attention weights."""
    from regard.cli.demo import run

    run(out, model, open_)


@app.command("list", cls=Command)
def list_() -> None:
    """List the mechanisms of the catalog."""
    from regard.cli.catalog import list_mechanisms

    list_mechanisms()


@app.command(cls=Command)
def info(name: Name) -> None:
    """Show one mechanism: formula, paper, parameters, cost, and a picture of its weights."""
    from regard.cli.catalog import show_mechanism

    show_mechanism(name)


@app.command(cls=Command)
def check(
    target: Annotated[
        str, typer.Argument(metavar="FILE.py:NAME", help="A function, class, module or Attention in your file.")
    ],
    like: Annotated[
        str | None, typer.Option(metavar="NAME", help="What it should be: multi_head, bahdanau, causal_mask, ...")
    ] = None,
    matrix: Annotated[
        list[str] | None,
        typer.Option(metavar="ROLE=NAME", help="The parameter of a role: query=W_q.weight; may be repeated."),
    ] = None,
    mask: Annotated[
        str | None,
        typer.Option(
            metavar="keep|drop|additive",
            help="The sense of your mask: True = may attend, True = may not, or 0 and -inf.",
        ),
    ] = None,
    scale: Annotated[float | None, typer.Option(help="The factor of the scores; default: 1 / sqrt(width).")] = None,
    limit: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="The check stops after this time, and says why.")
    ] = 120.0,
    json: Json = False,
) -> None:
    """Find the mistakes of an attention function, by calling it; the file is run, as by python.

    Exit status 0: right; 1: a mistake; 2: it cannot be called; 3: what it should compute was not checked.
    """
    from regard.cli.check import run

    run(target, like, matrix or [], mask, scale, limit, json)


@app.command(cls=Command)
def exercises(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the notebooks are written.")] = Path(
        "exercises"
    ),
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="One exercise, such as bahdanau; may be repeated.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace notebooks that exist.")] = False,
) -> None:
    """Write notebooks of exercises: an empty function, a cell that checks it, hints and a solution."""
    from regard.cli.exercise_notebooks import run

    run(folder, only or [], overwrite)


@app.command(cls=Command)
def lecture(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="steps, scores, masks, positions, rope, biases, heads or length."),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="The file to write; default: NAME.html.")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the lecture in the browser.")] = False,
) -> None:
    """Write a lecture: figures with sliders in one file, which needs no network."""
    from regard.cli.lecture import run

    run(name, out, open_)


@app.command(cls=Command)
def plan(
    name: Name,
    length: Annotated[int, typer.Option(min=1, help="Number of queries and keys.")] = 32768,
    heads: Annotated[
        int | None, typer.Option(min=1, help="Query heads; default: those of the mechanism, or 8.")
    ] = None,
    key_heads: Annotated[int | None, typer.Option(min=1, help="Key/value heads; a divisor of the query heads.")] = None,
    head_dim: Annotated[int, typer.Option(min=1, help="Channels of a head.")] = 64,
    dtype: Annotated[str, typer.Option(help="float32, float64, float16 or bfloat16.")] = "float32",
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A parameter of the mechanism.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Number of processes that share the sequence.")] = None,
    layout: Annotated[str, typer.Option(help="How the processes share it: contiguous or zigzag.")] = "contiguous",
) -> None:
    """Print how a mechanism would run at a size: its engine, why others cannot run it, time and memory."""
    from regard.cli.catalog import print_plan

    print_plan(name, length, heads, key_heads, head_dim, dtype, set_ or [], ranks, layout)


def _analyze(options: AnalyzeOptions) -> None:
    """Choose one of the analyses; only its file is imported."""
    if not options.texts and options.image is None:
        raise typer.BadParameter("give at least one, or --image FILE.", param_hint="'TEXT|FILE|-...'")
    ways = ("image", "corpus", "knock_out", "generate", "attribute")
    if len(given := ["--" + way.replace("_", "-") for way in ways if getattr(options, way)]) > 1:
        raise RegardError(f"analyze: {given[0]} and {given[1]} are different analyses; give one of them.")
    if "-" in options.texts and sys.stdin.isatty():
        typer.echo("Reading from the keyboard; end with Ctrl-D.", err=True)
    if options.image is not None:
        from regard.cli import analyze_image as way
    elif options.attribute is not None or options.target is not None:
        from regard.cli import analyze_attribution as way
    elif options.knock_out:
        from regard.cli import analyze_edits as way
    elif options.generate is not None:
        from regard.cli import analyze_generation as way
    elif options.corpus:
        from regard.cli import corpus as way
    else:
        from regard.cli import analyze as way
    way.run(options)


add_command("analyze", AnalyzeOptions, _analyze)


@app.command(cls=Command)
def view(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR|TRANSLATOR]",
            help="A folder of `regard analyze --save`, `train` or `compare`, or a translator of the package.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME|DIR", help="A model that reads the texts that you type on the page: minilm."),
    ] = None,
    story: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A story that the page plays: views with sentences, in JSON.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0: any free port.")] = 8321,
    host: Annotated[
        str, typer.Option(help="Address of the page; 0.0.0.0: other machines can see it, with a token.")
    ] = "127.0.0.1",
    token: Annotated[
        str, typer.Option(help="Password of the page, at least 16 characters; made if other machines can see it.")
    ] = "",
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Explore every weight in the browser: of a saved text, a translator, a comparison, or of texts that you type."""
    from regard.cli.view import run

    run(folder, model, story, host, port, token, open_)


@app.command(cls=Command)
def data(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME|FILES", help="A corpus, files of your own, or a pair to build: en-es, en-de."),
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="Number of training pairs to print.")] = 3,
    max_words: Annotated[int | None, typer.Option(min=1, help="Leave out longer sentences.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of synthetic pairs, and of the split of your own files.")] = 0,
) -> None:
    """List the corpora, print pairs of one, or download and build another language pair."""
    lab("data").run(names or [], show, max_words, seed)


add_command("train", TrainOptions, lambda options: lab("train").run(options))


add_command("translate", TranslateOptions, lambda options: lab("translate").run(options))


add_command("align", AlignOptions, lambda options: lab("align").run(options))


add_command("evaluate", EvaluateOptions, lambda options: lab("evaluate").run(options))


add_command("compare", StudyOptions, lambda options: lab("compare").run(options))
