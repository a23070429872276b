"""Arguments and options of the larger commands: one dataclass for each command, one field for each option.

The docstring of a class is what --help prints first. This file imports little, so --help needs no torch.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from regard.base.errors import RegardError

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


@dataclasses.dataclass(frozen=True)
class AnalyzeOptions:
    """Show what every head of a model attends to in a text, in several texts, or in a corpus."""

    texts: Annotated[
        list[str], typer.Argument(metavar="TEXT|FILE|-...", help="Texts, UTF-8 files, or - for standard input.")
    ] = dataclasses.field(default_factory=list)
    model: Model = "minilm"
    image: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read this image, with a vision model: --model DIR.")
    ] = None
    layers: Annotated[str | None, typer.Option(metavar="0,1,...", help="Only these layers.")] = None
    length: Annotated[int | None, typer.Option(min=1, help="Read at most this many tokens.")] = None
    words: Annotated[list[str], typer.Option("--word", help="Print what this word attends to; may be repeated.")] = (
        dataclasses.field(default_factory=list)
    )
    save: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Save a page there, and all maps for `regard view`.")
    ] = None
    story: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --save: a story that the page plays, in JSON.")
    ] = None
    figures: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write figures of the heads that say most there: PDF, SVG, PNG and CSV."),
    ] = None
    all_figures: Annotated[
        bool, typer.Option("--all-figures", help="With --figures: every statistic, and the heads of every layer.")
    ] = False
    probe: Annotated[bool, typer.Option("--probe", help="Find roles on repeated random tokens, too.")] = False
    verify_all: Annotated[bool, typer.Option("--verify-all", help="Verify every row of weights, not a few.")] = False
    corpus: Annotated[
        bool,
        typer.Option(
            "--corpus", help="Read a file with one document per line, .jsonl, .parquet, or a folder of `datasets`."
        ),
    ] = False
    field: Annotated[str, typer.Option(help="Column of the text in .jsonl, .parquet or a folder.")] = "text"
    engine: Annotated[
        str, typer.Option(metavar="local|ray", help="Read a corpus in this process, or with Ray workers.")
    ] = "local"
    workers: Annotated[int | None, typer.Option(min=1, help="Ray workers; default: as many as fit.")] = None
    importance: Annotated[
        bool,
        typer.Option("--importance", help="How much predicting the next token depends on each head; language models."),
    ] = False
    knock_out: Annotated[
        list[str],
        typer.Option(
            metavar="'L5.H3: it -> animal'",
            help="Print what the model predicts without these weights: heads: queries -> keys; may be repeated.",
        ),
    ] = dataclasses.field(default_factory=list)
    attribute: Annotated[
        str | None, typer.Option(metavar="METHOD", help="Print which tokens made the prediction: attn-lrp, chefer, ...")
    ] = None
    target: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="With --attribute: explain this token, not the prediction.")
    ] = None
    table: Annotated[bool, typer.Option("--table", help="Print every head, not a summary.")] = False
    generate: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Continue the text by N tokens, and show what each was predicted from."),
    ] = None
    as_json: Json = False

    @property
    def numbers(self) -> list[int] | None:
        """The layers of --layers as numbers; None for all."""
        if self.layers is None:
            return None
        try:
            return sorted({int(part) for part in self.layers.split(",")})
        except ValueError:
            raise RegardError(
                f"analyze: --layers takes numbers separated by commas, such as 0,1; got {self.layers!r}."
            ) from None


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """Train a translator on a corpus, and save it in a folder for `regard translate`."""

    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[CONFIG.toml] [SECTION.KEY=VALUE...]", help="A configuration file, and settings to change."
        ),
    ] = dataclasses.field(default_factory=list)
    source: Source = None
    target: Target = None
    data: Annotated[str | None, typer.Option(metavar="NAME|FILE|DIR", help="A corpus, instead of two files.")] = None
    system: Annotated[str | None, typer.Option(help="The translator: none, bahdanau, transformer, ...")] = None
    minutes: Annotated[float | None, typer.Option(min=0.001, help="Training time, in minutes of processor time.")] = (
        None
    )
    steps: Annotated[int | None, typer.Option(min=1, help="Number of updates of the weights.")] = None
    epochs: Annotated[int | None, typer.Option(min=1, help="Number of passes over the corpus.")] = None
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the run; default: runs/NAME.")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False
    template: Annotated[
        bool, typer.Option("--template", help="Print a configuration file that explains all settings.")
    ] = False

    @property
    def config(self) -> Path | None:
        """The configuration file among the arguments, in any order; None if all are overrides (key=value)."""
        files = [argument for argument in self.arguments if "=" not in argument]
        if len(files) > 1:
            raise RegardError(f"train: {' and '.join(files)} cannot both be the configuration. Give one file.")
        return Path(files[0]) if files else None

    @property
    def overrides(self) -> list[str]:
        """The settings among the arguments, `section.key=value` each."""
        return [argument for argument in self.arguments if "=" in argument]


@dataclasses.dataclass(frozen=True)
class TranslateOptions:
    """Translate a text, a file or standard input, line by line."""

    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN [TEXT|FILE|-]", help="The folder of a run, and the text to translate, line by line."
        ),
    ] = dataclasses.field(default_factory=list)
    model: Annotated[str | None, typer.Option(metavar="NAME", help="A model in the package, instead of RUN.")] = None
    beam: Beam = None
    n_best: Annotated[int | None, typer.Option(min=1, help="Number of translations to print, with their scores.")] = (
        None
    )
    length_penalty: Annotated[float | None, typer.Option(help="Exponent of ((5 + length) / 6).")] = None
    batch: Batch = 32
    align: Annotated[str | None, typer.Option(metavar="pharaoh|show", help="Print alignments, too.")] = None
    reading: ReadWhere = "output"
    replace_unknown: Annotated[
        bool,
        typer.Option("--replace-unknown", help="Replace an unknown word by the source word that it is aligned to."),
    ] = False


@dataclasses.dataclass(frozen=True)
class AlignOptions:
    """Align the words of given sentence pairs by attention: links source-target, counted from 0."""

    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.")]
    source: Annotated[Path, typer.Option(metavar="FILE", help="Source sentences, one per line.")]
    target: Annotated[Path, typer.Option(metavar="FILE", help="Their translations, one per line.")]
    reading: ReadWhere = "output"
    batch: Batch = 32
    words: Annotated[bool, typer.Option("--words", help="Print the words of both sides before their links.")] = False


@dataclasses.dataclass(frozen=True)
class EvaluateOptions:
    """Measure a run on held-out sentences: BLEU in detail, and the difference to another run with its p value."""

    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.")]
    split: Annotated[str, typer.Option(metavar="test|valid|train", help="The part of the corpus.")] = "test"
    against: Annotated[str | None, typer.Option(metavar="RUN", help="Another run of the same corpus.")] = None
    beam: Beam = None
    batch: Batch = 32
    reading: ReadWhere = "output"
    limit: Annotated[int | None, typer.Option("--first", min=1, help="Only the first sentences, this many.")] = None
    without_near: Annotated[
        bool, typer.Option("--without-near", help="Leave out sentences that are almost in the training text.")
    ] = False
    bleu_tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Tokenizer of sacrebleu: 13a, zh, ja-mecab, char ...; default: that of the run."
        ),
    ] = None
    as_json: Json = False


@dataclasses.dataclass(frozen=True)
class StudyOptions:
    """Train several systems on the same pairs with the same budget, and write a report."""

    overrides: Annotated[
        list[str], typer.Argument(metavar="[SECTION.KEY=VALUE...]", help="Settings of all trials.")
    ] = dataclasses.field(default_factory=list)
    data: Annotated[str | None, typer.Option(metavar="NAME|FILE|DIR", help="A corpus; default: bible-en-fr.")] = None
    source: Source = None
    target: Target = None
    systems: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="The systems to compare; default: all seven.")
    ] = None
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="N|A,B,...", help="Number of seeds, or the seeds; default: 3 for a sweep or a preset, else 1."
        ),
    ] = None
    minutes: Annotated[
        float | None,
        typer.Option(metavar="N", min=0.001, help="Equal time: minutes of processor time per training; default: 4."),
    ] = None
    steps: Annotated[int | None, typer.Option(metavar="N", min=1, help="Equal steps: updates of the weights.")] = None
    epochs: Annotated[int | None, typer.Option(metavar="N", min=1, help="Equal passes over the corpus.")] = None
    preset: Annotated[
        str | None,
        typer.Option(metavar="quick|full", help="4 systems x 600 steps, some minutes; 7 systems x 4 minutes, an hour."),
    ] = None
    heads: Annotated[
        str | None,
        typer.Option(metavar="1,4,...", help="Compare numbers of heads. For example: --preset quick --heads 1,4,8,16."),
    ] = None
    positions: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Compare position schemes: train short, test long.")
    ] = None
    attention: Annotated[str | None, typer.Option(metavar="A,B,...", help="Compare mechanisms of self-attention.")] = (
        None
    )
    prune: Annotated[bool, typer.Option("--prune", help="Remove heads: by importance, at random, one by one.")] = False
    scaled: Annotated[bool, typer.Option("--scaled", help="Compare scores with and without 1 / sqrt(D).")] = False
    train_words: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Train on pairs of at most this many words, test on all.")
    ] = None
    without_near: Annotated[
        bool, typer.Option("--without-near", help="Leave out test sentences that are almost in the training text.")
    ] = False
    beam: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Hypotheses of the beam search on the test; default: 1, greedy."),
    ] = None
    processes: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Trials at the same time; default: one per core.")
    ] = None
    engine: Annotated[
        str, typer.Option(metavar="local|ray", help="Run trials on this machine, or on a Ray cluster.")
    ] = "local"
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the comparison; an unfinished one continues.")
    ] = None
    report: Annotated[bool, typer.Option("--report", help="Only write the report of the finished trials.")] = False
