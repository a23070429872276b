"""`load_corpus`: a corpus by name, from files, or from a folder of `datasets`, in three splits."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from regard.base.checks import checked
from regard.base.errors import RegardError, nearest
from regard.lab.data.bible import load_bible
from regard.lab.data.corpus import Corpus, Pair
from regard.lab.data.length_limits import limit_words
from regard.lab.data.parallel import read_pairs
from regard.lab.data.splits import split_pairs
from regard.lab.data.synthetic import TASKS, synthetic_pairs

__all__ = ["load_corpus"]

Path = str | os.PathLike[str]
SPLITS = ("train", "valid", "test")


@checked
def load_corpus(
    spec: Path | Sequence[Path] | Mapping[str, Path | Sequence[Path]],
    *,
    size: int = 20_000,
    valid: int | None = None,
    test: int | None = None,
    max_words: int | None = None,
    seed: int = 0,
    fields: tuple[str, str] = ("source", "target"),
    languages: tuple[str, str] = ("source", "target"),
) -> Corpus:
    """A corpus by name or from files.

    - "copy", "reverse", "grammar": `size` invented pairs, drawn from `seed`.
    - "bible-en-fr": embedded in the package, at most 20 words. `regard data` builds other languages, such as
      "bible-en-es". Their splits are fixed by verse. Both directions exist: "bible-fr-en".
    - Two text files with one sentence per line, one .tsv file, one .jsonl file with `fields`, or a folder that
      `datasets` saved.
    - {"train": files, "valid": files, "test": files}: your own splits of such files.

    Pairs that have no splits yet are split by a hash of (`seed`, source), so each source is in one split only. `valid`
    and `test` are the numbers of held-out pairs; by default a tenth of all pairs each, at most 1,000. `languages` are
    the names that the corpus gives to both sides of your files; a corpus with a name has its own.

    Pairs of more than `max_words` words on a side are left out and counted in `skipped`. Without `max_words` the limits
    are 1,000 words and 10,000 characters: a longer line is a fault of the file, and `skipped` gives its number.

    >>> corpus = load_corpus("reverse", size=100)
    >>> corpus.describe()
    'reverse: 80 training, 10 validation, 10 test pairs.'
    """
    if isinstance(spec, Mapping):
        return _own_splits(spec, max_words, fields, languages)
    if isinstance(spec, str) and (names := re.fullmatch(r"bible-([a-z]{2})-([a-z]{2})", spec)):
        return load_bible(names[1], names[2], max_words)
    skipped: Counter[str] = Counter()
    if isinstance(spec, str) and spec in TASKS:
        pairs, languages = synthetic_pairs(spec, size, seed), (spec, spec)
    else:
        pairs, skipped = _read(spec, fields)
    pairs, long = limit_words(pairs, max_words)
    splits = split_pairs(pairs, valid, test, seed)
    return Corpus(_name(spec), *languages, *splits, dict(skipped + long))


def _read(spec: Path | Sequence[Path], fields: tuple[str, str]) -> tuple[list[Pair], Counter[str]]:
    """The usable pairs of one or two files or of a folder, and the number of lines left out, by reason.

    A text without a file ending that names no file is taken as a misspelt name of a corpus.
    """
    if isinstance(spec, str) and not os.path.exists(spec) and not os.path.splitext(spec)[1]:
        names = (*TASKS, "bible-en-fr")
        raise RegardError(f"load_corpus: there is no corpus, file or folder {spec!r}. {nearest(spec, names)}")
    return read_pairs(spec, fields)


def _own_splits(
    spec: Mapping[str, Path | Sequence[Path]],
    max_words: int | None,
    fields: tuple[str, str],
    languages: tuple[str, str],
) -> Corpus:
    """The corpus of a mapping from "train", "valid" and "test" to files: one with pairs, or two with a side each.

    Pairs with a side of more than `max_words` words are left out (None: none are). `fields` are the names of both
    fields in a file of records, and `languages` those of both languages.
    """
    if set(spec) != set(SPLITS):
        raise RegardError(
            f"load_corpus: the names of your own splits must be train, valid and test, got {', '.join(spec)}."
        )
    splits, skipped = {}, Counter()
    for name in SPLITS:
        pairs, left_out = _read(spec[name], fields)
        pairs, long = limit_words(pairs, max_words)
        if not pairs:
            raise RegardError(f"load_corpus: the split {name} ({_name(spec[name])}) has no usable pair.")
        splits[name], skipped = tuple(pairs), skipped + left_out + long
    return Corpus(_name(spec["train"]), *languages, **splits, skipped=dict(skipped))


def _name(spec: Path | Sequence[Path]) -> str:
    """The names of the files, without their folders."""
    paths = [spec] if isinstance(spec, str | os.PathLike) else spec
    return " + ".join(os.path.basename(os.fspath(path).rstrip("/")) for path in paths)
