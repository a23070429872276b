"""`regard align`: word alignments of sentence pairs from the attention of a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import zip_longest

from rich.console import Console

from regard.base.errors import RegardError, first_few
from regard.base.texts.text_files import lines
from regard.cli.options import AlignOptions
from regard.lab.commands.translate import load
from regard.lab.decoding.alignment import align_texts, write_pharaoh
from regard.lab.decoding.translation import LIMIT


def run(settings: AlignOptions) -> None:
    """Print one line of links for every pair; it is empty for a pair that cannot be aligned."""
    with Console(stderr=True).status("Loading the model"):
        trained = load(settings.run, None)
    tokenizers = trained.source_tokenizer, trained.target_tokenizer
    options = {"reading": settings.reading, "batch": settings.batch, "limit": LIMIT}
    unaligned = []
    for number, alignment in enumerate(align_texts(trained.model, tokenizers, _pairs(settings), **options), 1):
        if alignment is None:
            unaligned.append(number)
            fields = ["", "", ""]
        else:
            fields = [" ".join(alignment.source), " ".join(alignment.target), write_pharaoh(alignment.links())]
        sys.stdout.write(" ||| ".join(fields if settings.words else fields[2:]) + "\n")
    sys.stdout.flush()
    if unaligned:
        Console(stderr=True, soft_wrap=True).print(
            f"{len(unaligned)} pairs have no links, because a side is empty or has more than {LIMIT:,} pieces: "
            f"line {first_few(unaligned)}.",
            style="yellow",
        )


def _pairs(settings: AlignOptions) -> Iterator[tuple[str, str]]:
    """The lines of both files as pairs; an error if one file ends before the other.

    `lines` yields (line number, text), so `pair[0][1]` is the text of the source.
    """
    sides = (lines(path, "align") for path in (settings.source, settings.target))
    for number, pair in enumerate(zip_longest(*sides), 1):
        if None in pair:
            ended = settings.source if pair[0] is None else settings.target
            raise RegardError(
                f"align: {ended} ends after {number - 1} lines and the other file goes on. Line n of one must "
                "translate line n of the other."
            )
        yield pair[0][1].strip(), pair[1][1].strip()
