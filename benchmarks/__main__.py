"""`python -m benchmarks [NAME...]`: mechanisms beside their peers, and suites of goals."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks import mechanisms
from benchmarks.cases import GROUPS
from benchmarks.roofline import commit
from regard.base.errors import MissingPackage, RegardError, nearest

#: Suites of goals, each a file of this folder, and what they measure.
SUITES = {
    "watching": "what seeing every weight of a model costs beside running it",
    "viewing": "how fast tiles of a long text come, what the server holds, how large one file is",
    "translating": "training and decoding of translators beside JoeyNMT and transformers, with equal weights",
    "ring": "the time and memory of a rank of the ring engine, and the bytes that travel",
}
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME...", help="Groups and suites, as --only.")] = None,
    only: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Only these groups and suites; --list prints their names.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="All lengths up to 65,536 and all peers; takes hours.")] = False,
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Device of the mechanisms.")] = "cpu",
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all numbers of the mechanisms to this file.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw time and memory of the mechanisms against length.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Print cases, peers and suites without measuring.")] = False,
) -> None:
    """Measure mechanisms beside their alternatives, in ten minutes at most, and then the suites of goals.

    The exit status is 1 if a goal of a suite was missed.
    """
    try:
        groups, suites = _chosen([*(names or []), *(only.split(",") if only else [])])
        settings = mechanisms.BenchOptions(groups, full, device, json, picture)
        if list_:
            return _list(settings, suites)
        if groups == () and settings != mechanisms.BenchOptions(groups):
            raise RegardError(
                "bench: --full, --device, --json and --picture are for mechanisms, and only suites of goals were "
                f"chosen. Name a group too, one of {', '.join(GROUPS)}, or leave the options out."
            )
        if groups is None or groups:
            mechanisms.run(settings)
        if suites and _missed(suites):
            raise typer.Exit(1)
    except (RegardError, MissingPackage) as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _chosen(names: Sequence[str]) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """The groups of mechanisms (None: all) and the suites with these names; no name: everything."""
    names = [name.strip() for name in names]
    for name in names:
        if name not in (known := (*GROUPS, *SUITES)):
            raise RegardError(f"bench: there is no benchmark {name!r}. {nearest(name, known)}")
    if not names:
        return None, tuple(SUITES)
    return tuple(name for name in names if name in GROUPS), tuple(name for name in names if name in SUITES)


def _list(settings: mechanisms.BenchOptions, suites: Sequence[str]) -> None:
    if settings.only is None or settings.only:
        mechanisms.show_cases(settings)
    for name in suites:
        print(f"\n{name}\n  {SUITES[name]}")


def _missed(suites: Sequence[str]) -> int:
    """Measure and print the goals of some suites; the number of goals that were missed."""
    threads = f"{torch.get_num_threads()} threads"
    print(f"commit {commit() or 'unknown'}, torch {torch.__version__}, {platform.machine()}, {threads}, float32")
    torch.manual_seed(0)
    missed = 0
    for name in suites:
        for goal in import_module(f"benchmarks.{name}").goals():
            print(goal, flush=True)
            missed += not goal.holds
    print("All goals hold." if not missed else f"{missed} goals were missed.")
    return missed


if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
