"""The commands and their options. What they do is imported when they run, so that --help needs no torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from regard.errors import RegardError
from regard.version import __version__


class Commands(TyperGroup):
    """Mistakes of users are one red line and exit status 2; Ctrl-C is silent and 130."""

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

Name = Annotated[str, typer.Argument(help="A mechanism of the catalogue; `regard list` names them.")]
Model = Annotated[str, typer.Option(help="A known model, or the folder of a Hugging Face model.")]


@app.callback(invoke_without_command=True)
def regard(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    """Any attention mechanism, run fast, with every weight visible."""
    if version:
        typer.echo(f"regard {__version__}")
        raise typer.Exit()


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("regard-demo"),
    model: Model = "minilm",
    open_: Annotated[bool, typer.Option("--open", help="Open the page when it is written.")] = False,
) -> None:
    """Read two sentences and a passage with a real model, and make a page of all its weights."""
    from regard.cli.demo import run

    run(out, model, open_)


@app.command("list")
def list_() -> None:
    """List the mechanisms of the catalogue."""
    from regard.cli.catalogue import list_mechanisms

    list_mechanisms()


@app.command()
def show(name: Name) -> None:
    """Show one mechanism: formula, paper, parameters, cost, and a picture of its weights."""
    from regard.cli.catalogue import show_mechanism

    show_mechanism(name)


@app.command()
def explain(
    name: Name,
    length: Annotated[int, typer.Option(min=1, help="Queries and keys.")] = 32768,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads; 8 unless the mechanism says.")] = None,
    key_heads: Annotated[int | None, typer.Option(min=1, help="Key/value heads; must divide the heads.")] = None,
    width: Annotated[int, typer.Option(min=1, help="Width of a head.")] = 64,
    dtype: Annotated[str, typer.Option(help="float32, float64, float16 or bfloat16.")] = "float32",
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A parameter of the mechanism.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Spread the sequence over so many processes.")] = None,
    layout: Annotated[str, typer.Option(help="How they share it: contiguous or zigzag.")] = "contiguous",
) -> None:
    """Say how a mechanism would run at a size: which engine, which cannot and why, time and memory."""
    from regard.cli.planning import explain_mechanism

    explain_mechanism(name, length, heads, key_heads, width, dtype, set_ or [], ranks, layout)


@app.command()
def see(
    texts: Annotated[
        list[str], typer.Argument(metavar="TEXT|FILE|-...", help="Texts, UTF-8 files, or - for standard input.")
    ],
    model: Model = "minilm",
    layers: Annotated[str | None, typer.Option(metavar="0,1,...", help="Only these layers.")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Read at most so many tokens.")] = None,
    word: Annotated[list[str] | None, typer.Option(help="Say what this word looks at; may be repeated.")] = None,
    save: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep all for `regard view`, and a page.")] = None,
    figures: Annotated[Path | None, typer.Option(metavar="DIR", help="Write pictures there, as PNG.")] = None,
    probe: Annotated[bool, typer.Option("--probe", help="Name roles on random tokens that repeat, too.")] = False,
    verify_all: Annotated[bool, typer.Option("--verify-all", help="Check every row of weights, not a few.")] = False,
    corpus: Annotated[
        bool,
        typer.Option("--corpus", help="A file of one document a line, .jsonl, .parquet, or a folder of `datasets`."),
    ] = False,
    field: Annotated[str, typer.Option(help="Where the text of a document is, in a .jsonl or a folder.")] = "text",
    engine: Annotated[
        str, typer.Option(metavar="local|ray", help="Who reads a corpus: this process, or Ray's.")
    ] = "local",
    workers: Annotated[int | None, typer.Option(min=1, help="Of --engine ray; as many as fit unless said.")] = None,
    importance: Annotated[
        bool, typer.Option("--importance", help="How much telling the next token hangs on each head; language models.")
    ] = False,
    table: Annotated[bool, typer.Option("--table", help="Print every head, not the summary.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Show what every head of a model does with a text, several texts side by side, or a corpus."""
    from regard.cli import corpus as profiling
    from regard.cli import see as seeing

    if "-" in texts and sys.stdin.isatty():
        typer.echo("Reading from the keyboard; end with Ctrl-D.", err=True)
    shown = {"probe": probe, "as_json": json, "table": table, "importance": importance, "verify_all": verify_all}
    options = seeing.Options(texts, model, layers, length, tuple(word or ()), save, figures, **shown)
    if corpus:
        profiling.run(options, field, engine, workers)
    else:
        seeing.run(options)


@app.command()
def view(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="What `regard see --save`, `train` or `compare` wrote.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8321,
    host: Annotated[str, typer.Option(help="Another address lets others in, and needs --token.")] = "127.0.0.1",
    token: Annotated[str, typer.Option(help="Asked of everyone; at least 16 characters.")] = "",
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Travel the maps of a saved text, a trained translator or a comparison in the browser, down to single weights."""
    from regard.cli.view import run

    run(folder, host, port, token, open_)


@app.command()
def data(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME|FILES", help="A corpus, files of your own, or a pair to build: en-es, en-de."),
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="Print so many training pairs.")] = 3,
    max_words: Annotated[int | None, typer.Option(min=1, help="Leave longer sentences out.")] = None,
    seed: Annotated[int, typer.Option(help="Of invented pairs, and of the split of your own files.")] = 0,
) -> None:
    """List the corpora, look into one, or fetch and build another pair of languages."""
    from regard.cli.data import run

    run(names or [], show, max_words, seed)


@app.command()
def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG.toml] [SECTION.KEY=VALUE...]", help="A configuration, and keys to change."),
    ] = None,
    source: Annotated[Path | None, typer.Option(metavar="FILE", help="Source sentences, one a line.")] = None,
    target: Annotated[Path | None, typer.Option(metavar="FILE", help="Their translations, line by line.")] = None,
    data: Annotated[str | None, typer.Option(metavar="NAME|FILE|DIR", help="A corpus, in place of two files.")] = None,
    system: Annotated[str | None, typer.Option(help="What translates: none, bahdanau, transformer, ...")] = None,
    minutes: Annotated[float | None, typer.Option(min=0.001, help="Train so long: processor time.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Train so many updates of the weights.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Train so many passes over the corpus.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the run goes; runs/NAME unless said.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    template: Annotated[bool, typer.Option("--template", help="Print the configuration, all keys explained.")] = False,
) -> None:
    """Train a translator on a corpus; the folder it leaves is all that translating takes."""
    from regard.cli import train as training

    if template:
        return training.print_template()
    options = {"source": source, "target": target, "data": data, "system": system, "out": out, "resume": resume}
    training.run(training.train_request(arguments or [], minutes=minutes, steps=steps, epochs=epochs, **options))


@app.command()
def translate(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN [TEXT|FILE|-]", help="The folder of a run, and what to translate, line by line."),
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="A model in the package, in place of RUN.")] = None,
    beam: Annotated[int | None, typer.Option(min=1, help="Hypotheses that are kept; 1: greedy.")] = None,
    n_best: Annotated[int | None, typer.Option(min=1, help="Most translations to print, with their scores.")] = None,
    length_penalty: Annotated[float | None, typer.Option(help="Exponent of ((5 + length) / 6).")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sentences at a time.")] = 32,
    align: Annotated[str | None, typer.Option(metavar="pharaoh|show", help="Print alignments, too.")] = None,
    reading: Annotated[
        str,
        typer.Option(
            metavar="output|input", help="Read attention where the model predicts a word (output) or reads it (input)."
        ),
    ] = "output",
    replace_unknown: Annotated[
        bool, typer.Option("--replace-unknown", help="Copy the source word that an unknown word is aligned to.")
    ] = False,
) -> None:
    """Translate a text, a file or standard input, line by line as the lines come."""
    from regard.cli import translate as translating

    options = {"length_penalty": length_penalty, "batch": batch, "align": align, "reading": reading}
    wish = translating.Wish(arguments or [], model, beam, n_best, replace_unknown=replace_unknown, **options)
    translating.run(wish)


@app.command()
def align(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.")],
    source: Annotated[Path, typer.Option(metavar="FILE", help="Source sentences, one a line.")],
    target: Annotated[Path, typer.Option(metavar="FILE", help="Their translations, line by line.")],
    reading: Annotated[
        str,
        typer.Option(
            metavar="output|input", help="Read attention where the model predicts a word (output) or reads it (input)."
        ),
    ] = "output",
    batch: Annotated[int, typer.Option(min=1, help="Sentences at a time.")] = 32,
    words: Annotated[bool, typer.Option("--words", help="Print the words of both sides before their links.")] = False,
) -> None:
    """Align the words of given sentence pairs by attention: links source-target, counted from 0."""
    from regard.cli import align as aligning

    aligning.run(aligning.Wish(run, source, target, reading, batch, words))


@app.command()
def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.")],
    split: Annotated[str, typer.Option(metavar="test|valid|train", help="Which part of the corpus.")] = "test",
    against: Annotated[str | None, typer.Option(metavar="RUN", help="Another run of the same corpus.")] = None,
    beam: Annotated[int | None, typer.Option(min=1, help="Hypotheses that are kept; 1: greedy.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sentences at a time.")] = 32,
    reading: Annotated[
        str, typer.Option(metavar="output|input", help="Where the attention of a word is read for its alignment.")
    ] = "output",
    first: Annotated[int | None, typer.Option(min=1, help="Only so many sentences.")] = None,
    without_near: Annotated[
        bool, typer.Option("--without-near", help="Leave out sentences that are nearly in the training text.")
    ] = False,
    bleu_tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Tokenizer of sacrebleu: 13a, zh, ja-mecab, char ...; default: that of the run."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Measure a run on sentences that are held out: BLEU and where it comes from; against another with p."""
    from regard.cli import evaluate as evaluating

    wish = evaluating.Wish(run, split, against, beam, batch, reading, first, json, without_near, bleu_tokenizer)
    evaluating.run(wish)


@app.command()
def compare(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE...]", help="Keys that all trials share.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="NAME|FILE|DIR", help="A corpus; bible-en-fr unless said.")
    ] = None,
    source: Annotated[Path | None, typer.Option(metavar="FILE", help="Source sentences, one a line.")] = None,
    target: Annotated[Path | None, typer.Option(metavar="FILE", help="Their translations, line by line.")] = None,
    systems: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="What is compared; all seven unless said.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="N|A,B,...", help="How many seeds, or which; one unless said.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(metavar="N", min=0.001, help="Equal time: a processor's minutes of training; 4 unless said."),
    ] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", min=1, help="Equal steps: updates of the weights.")] = None,
    epochs: Annotated[int | None, typer.Option(metavar="N", min=1, help="Equal passes over the corpus.")] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="quick|full", help="4 systems, some minutes; 7 systems x 3 seeds, hours.")
    ] = None,
    heads: Annotated[
        str | None, typer.Option(metavar="1,4,...", help="Compare numbers of heads of a Transformer.")
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
        int | None, typer.Option(metavar="N", min=1, help="Train on pairs of so many words at most, test on all.")
    ] = None,
    without_near: Annotated[
        bool, typer.Option("--without-near", help="Leave out test sentences that are nearly in the training text.")
    ] = False,
    beam: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Hypotheses in the test translations; 1, greedy, unless said."),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Trials at a time; one a core unless said.")
    ] = None,
    engine: Annotated[
        str, typer.Option(metavar="local|ray", help="Where trials run: on this machine, or on a Ray cluster.")
    ] = "local",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where all goes; one that is begun is gone on with.")
    ] = None,
    report: Annotated[bool, typer.Option("--report", help="Only write the report of what is finished so far.")] = False,
) -> None:
    """Train systems side by side on the same pairs with the same budget, and write a report."""
    given = {name: value for name, value in locals().items() if name != "overrides"}
    from regard.cli import comparison

    comparison.run(comparison.Wish(tuple(overrides or ()), **given))


@app.command()
def bench(
    only: Annotated[str | None, typer.Option(metavar="A,B,...", help="Only these groups; --list names them.")] = None,
    full: Annotated[bool, typer.Option("--full", help="All lengths to 65,536 and all peers; takes long.")] = False,
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where it is measured.")] = "cpu",
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all numbers there.")] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw time and memory against length.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Name the cases and peers, and measure nothing.")] = False,
) -> None:
    """Measure every mechanism beside what one would pick instead: exactness, time, memory; ten minutes at most."""
    from regard.cli import bench as benching

    wish = benching.Wish(only, full, device, json, picture)
    if list_:
        benching.show_cases(wish)
    else:
        benching.run(wish)
