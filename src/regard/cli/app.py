"""The commands of `regard` and their options. Each command imports its work when it runs: --help needs no torch."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from regard.base.errors import MissingPackage, RegardError
from regard.cli.extras import named
from regard.cli.lab import lab
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

Name = Annotated[str, typer.Argument(help="A mechanism of the catalog; `regard list` prints all names.")]
Json = Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")]
Source = Annotated[Path | None, typer.Option(metavar="FILE", help="Source sentences, one per line.")]
Target = Annotated[Path | None, typer.Option(metavar="FILE", help="Their translations, one per line.")]
Beam = Annotated[int | None, typer.Option(min=1, help="Hypotheses of the beam search; 1: greedy.")]
Batch = Annotated[int, typer.Option(min=1, help="Sentences per batch.")]
ReadWhere = Annotated[
    str,
    typer.Option(
        metavar="output|input", help="Read attention where the model predicts a word (output) or reads it (input)."
    ),
]
Model = Annotated[str, typer.Option(help="A known model, or the folder of a Hugging Face model.")]


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
    """Find the mistakes of an attention function (exit status 1), by calling it; the file is run, as by python."""
    from regard.cli.check import run

    run(target, mask, scale, limit, json)


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


@app.command(cls=Command)
def analyze(
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT|FILE|-...", help="Texts, UTF-8 files, or - for standard input.")
    ] = None,
    model: Model = "minilm",
    image: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read this image, with a vision model: --model DIR.")
    ] = None,
    layers: Annotated[str | None, typer.Option(metavar="0,1,...", help="Only these layers.")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Read at most this many tokens.")] = None,
    word: Annotated[list[str] | None, typer.Option(help="Print what this word attends to; may be repeated.")] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Save a page there, and all maps for `regard view`.")
    ] = None,
    story: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --save: a story that the page plays, in JSON.")
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write figures of the heads that say most there: PDF, SVG, PNG and CSV."),
    ] = None,
    all_figures: Annotated[
        bool, typer.Option("--all-figures", help="With --figures: every statistic, and the heads of every layer.")
    ] = False,
    probe: Annotated[bool, typer.Option("--probe", help="Find roles on repeated random tokens, too.")] = False,
    verify_all: Annotated[bool, typer.Option("--verify-all", help="Verify every row of weights, not a few.")] = False,
    corpus: Annotated[
        bool,
        typer.Option(
            "--corpus", help="Read a file with one document per line, .jsonl, .parquet, or a folder of `datasets`."
        ),
    ] = False,
    field: Annotated[str, typer.Option(help="Column of the text in .jsonl, .parquet or a folder.")] = "text",
    engine: Annotated[
        str, typer.Option(metavar="local|ray", help="Read a corpus in this process, or with Ray workers.")
    ] = "local",
    workers: Annotated[int | None, typer.Option(min=1, help="Ray workers; default: as many as fit.")] = None,
    importance: Annotated[
        bool,
        typer.Option("--importance", help="How much predicting the next token depends on each head; language models."),
    ] = False,
    knock_out: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'L5.H3: it -> animal'",
            help="Print what the model predicts without these weights: heads: queries -> keys; may be repeated.",
        ),
    ] = None,
    attribute: Annotated[
        str | None, typer.Option(metavar="METHOD", help="Print which tokens made the prediction: attn-lrp, chefer, ...")
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="With --attribute: explain this token, not the prediction.")
    ] = None,
    table: Annotated[bool, typer.Option("--table", help="Print every head, not a summary.")] = False,
    generate: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Continue the text by N tokens, and show what each was predicted from."),
    ] = None,
    json: Json = False,
) -> None:
    """Show what every head of a model attends to in a text, in several texts, or in a corpus."""
    from regard.cli import analyze as analyzing
    from regard.cli import corpus as profiling

    if not texts and image is None:
        raise typer.BadParameter("give at least one, or --image FILE.", param_hint="'TEXT|FILE|-...'")
    ways = {"--image": image, "--corpus": corpus, "--knock-out": knock_out, "--generate": generate}
    ways["--attribute"] = attribute
    if len(given := [way for way, value in ways.items() if value]) > 1:
        raise RegardError(f"analyze: {given[0]} and {given[1]} are different analyses; give one of them.")
    texts = texts or []
    if "-" in texts and sys.stdin.isatty():
        typer.echo("Reading from the keyboard; end with Ctrl-D.", err=True)
    shown = {"probe": probe, "as_json": json, "table": table, "importance": importance, "verify_all": verify_all}
    shown["all_figures"] = all_figures
    options = analyzing.Options(texts, model, layers, length, tuple(word or ()), save, figures, **shown, story=story)
    if image is not None:
        from regard.cli import analyze_image

        analyze_image.run(image, options)
    elif attribute is not None or target is not None:
        from regard.cli import analyze_attribution

        analyze_attribution.run(options, attribute, target)
    elif knock_out:
        from regard.cli import analyze_edits

        analyze_edits.run(knock_out, options)
    elif generate is not None:
        from regard.cli import analyze_generation

        analyze_generation.run(generate, options)
    elif corpus:
        profiling.run(options, field, engine, workers)
    else:
        analyzing.run(options)


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


@app.command(cls=Command)
def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.toml] [SECTION.KEY=VALUE...]", help="A configuration file, and settings to change."
        ),
    ] = None,
    source: Source = None,
    target: Target = None,
    data: Annotated[str | None, typer.Option(metavar="NAME|FILE|DIR", help="A corpus, instead of two files.")] = None,
    system: Annotated[str | None, typer.Option(help="The translator: none, bahdanau, transformer, ...")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.001, help="Training time, in minutes of processor time.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Number of updates of the weights.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Number of passes over the corpus.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the run; default: runs/NAME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    template: Annotated[
        bool, typer.Option("--template", help="Print a configuration file that explains all settings.")
    ] = False,
) -> None:
    """Train a translator on a corpus, and save it in a folder for `regard translate`."""
    training = lab("train")
    if template:
        return training.print_template()
    options = {"source": source, "target": target, "data": data, "system": system, "out": out, "resume": resume}
    training.run(training.train_request(arguments or [], minutes=minutes, steps=steps, epochs=epochs, **options))


@app.command(cls=Command)
def translate(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN [TEXT|FILE|-]", help="The folder of a run, and the text to translate, line by line."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="A model in the package, instead of RUN.")] = None,
    beam: Beam = None,
    n_best: Annotated[
        int | None, typer.Option(min=1, help="Number of translations to print, with their scores.")
    ] = None,
    length_penalty: Annotated[float | None, typer.Option(help="Exponent of ((5 + length) / 6).")] = None,
    batch: Batch = 32,
    align: Annotated[str | None, typer.Option(metavar="pharaoh|show", help="Print alignments, too.")] = None,
    reading: ReadWhere = "output",
    replace_unknown: Annotated[
        bool,
        typer.Option("--replace-unknown", help="Replace an unknown word by the source word that it is aligned to."),
    ] = False,
) -> None:
    """Translate a text, a file or standard input, line by line."""
    translating = lab("translate")
    options = {"length_penalty": length_penalty, "batch": batch, "align": align, "reading": reading}
    settings = translating.TranslateOptions(
        arguments or [], model, beam, n_best, replace_unknown=replace_unknown, **options
    )
    translating.run(settings)


@app.command(cls=Command)
def align(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.")],
    source: Annotated[Path, typer.Option(metavar="FILE", help="Source sentences, one per line.")],
    target: Annotated[Path, typer.Option(metavar="FILE", help="Their translations, one per line.")],
    reading: ReadWhere = "output",
    batch: Batch = 32,
    words: Annotated[bool, typer.Option("--words", help="Print the words of both sides before their links.")] = False,
) -> None:
    """Align the words of given sentence pairs by attention: links source-target, counted from 0."""
    aligning = lab("align")
    aligning.run(aligning.AlignOptions(run, source, target, reading, batch, words))


@app.command(cls=Command)
def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.")],
    split: Annotated[str, typer.Option(metavar="test|valid|train", help="The part of the corpus.")] = "test",
    against: Annotated[str | None, typer.Option(metavar="RUN", help="Another run of the same corpus.")] = None,
    beam: Beam = None,
    batch: Batch = 32,
    reading: ReadWhere = "output",
    first: Annotated[int | None, typer.Option(min=1, help="Only the first sentences, this many.")] = None,
    without_near: Annotated[
        bool, typer.Option("--without-near", help="Leave out sentences that are almost in the training text.")
    ] = False,
    bleu_tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Tokenizer of sacrebleu: 13a, zh, ja-mecab, char ...; default: that of the run."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Measure a run on held-out sentences: BLEU in detail, and the difference to another run with its p value."""
    evaluating = lab("evaluate")
    settings = evaluating.EvaluateOptions(
        run, split, against, beam, batch, reading, first, json, without_near, bleu_tokenizer
    )
    evaluating.run(settings)


@app.command(cls=Command)
def compare(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE...]", help="Settings of all trials.")
    ] = None,
    data: Annotated[str | None, typer.Option(metavar="NAME|FILE|DIR", help="A corpus; default: bible-en-fr.")] = None,
    source: Source = None,
    target: Target = None,
    systems: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="The systems to compare; default: all seven.")
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="N|A,B,...", help="Number of seeds, or the seeds; default: 3 for a sweep or a preset, else 1."
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(metavar="N", min=0.001, help="Equal time: minutes of processor time per training; default: 4."),
    ] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", min=1, help="Equal steps: updates of the weights.")] = None,
    epochs: Annotated[int | None, typer.Option(metavar="N", min=1, help="Equal passes over the corpus.")] = None,
    preset: Annotated[
        str | None,
        typer.Option(metavar="quick|full", help="4 systems x 600 steps, some minutes; 7 systems x 4 minutes, an hour."),
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(metavar="1,4,...", help="Compare numbers of heads. For example: --preset quick --heads 1,4,8,16."),
    ] = None,
    positions: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Compare position schemes: train short, test long.")
    ] = None,
    attention: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Compare mechanisms of self-attention.")
    ] = None,
    prune: Annotated[bool, typer.Option("--prune", help="Remove heads: by importance, at random, one by one.")] = False,
    scaled: Annotated[bool, typer.Option("--scaled", help="Compare scores with and without 1 / sqrt(D).")] = False,
    train_words: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Train on pairs of at most this many words, test on all.")
    ] = None,
    without_near: Annotated[
        bool, typer.Option("--without-near", help="Leave out test sentences that are almost in the training text.")
    ] = False,
    beam: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Hypotheses of the beam search on the test; default: 1, greedy."),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Trials at the same time; default: one per core.")
    ] = None,
    engine: Annotated[
        str, typer.Option(metavar="local|ray", help="Run trials on this machine, or on a Ray cluster.")
    ] = "local",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the comparison; an unfinished one continues.")
    ] = None,
    report: Annotated[bool, typer.Option("--report", help="Only write the report of the finished trials.")] = False,
) -> None:
    """Train several systems on the same pairs with the same budget, and write a report."""
    given = {name: value for name, value in locals().items() if name != "overrides"}
    comparison = lab("compare")
    comparison.run(comparison.StudyOptions(tuple(overrides or ()), **given))
