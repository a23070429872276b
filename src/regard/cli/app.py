"""The commands and their options. What they do is imported when they run, so that --help needs no torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from regard import __version__
from regard.errors import RegardError


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
    out: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("regard-demo"), model: Model = "minilm"
) -> None:
    """Read two sentences and a passage with a real model, and make a page of all its weights."""
    from regard.cli.demo import run

    run(out, model)


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
) -> None:
    """Say how a mechanism would run at a size: which engine, which cannot and why, time and memory."""
    from regard.cli.planning import explain_mechanism

    explain_mechanism(name, length, heads, key_heads, width, dtype, set_ or [])


@app.command()
def see(
    texts: Annotated[
        list[str], typer.Argument(metavar="TEXT|FILE|-...", help="Texts, UTF-8 files, or - for standard input.")
    ],
    model: Model = "minilm",
    layers: Annotated[str | None, typer.Option(metavar="0,1,...", help="Only these layers.")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Read at most so many tokens.")] = None,
    word: Annotated[list[str] | None, typer.Option(help="Say what this word looks at; may be repeated.")] = None,
    save: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the page (or corpus.json) there.")] = None,
    figures: Annotated[Path | None, typer.Option(metavar="DIR", help="Write pictures there, as PNG.")] = None,
    probe: Annotated[bool, typer.Option("--probe", help="Name roles on random tokens that repeat, too.")] = False,
    corpus: Annotated[
        bool, typer.Option("--corpus", help="A file of one document a line, a .jsonl, or a folder of `datasets`.")
    ] = False,
    field: Annotated[str, typer.Option(help="Where the text of a document is, in a .jsonl or a folder.")] = "text",
    json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Show what every head of a model does with a text, several texts side by side, or a corpus."""
    from regard.cli import corpus as documents
    from regard.cli import see as reading

    if "-" in texts and sys.stdin.isatty():
        typer.echo("Reading from the keyboard; end with Ctrl-D.", err=True)
    wish = reading.Wish(texts, model, layers, length, tuple(word or ()), save, figures, probe, json)
    if corpus:
        documents.run(wish, field)
    else:
        reading.run(wish)
