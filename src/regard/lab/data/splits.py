"""Splits sentence pairs into training, validation and test pairs, the same way on every machine."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence

from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.lab.data.corpus import Pair

__all__ = ["split_pairs", "stable_draw"]

#: The fewest pairs that can be split into three.
FEWEST = 10


@checked
def split_pairs(
    pairs: Sequence[Pair], valid: int | None = None, test: int | None = None, seed: int = 0
) -> tuple[tuple[Pair, ...], tuple[Pair, ...], tuple[Pair, ...]]:
    """Training, validation and test pairs, by a hash of (`seed`, source).

    All pairs with the same source are in the same split, in any order of the pairs, and added pairs move few of the
    other pairs. Two sources are the same if they differ only in spaces or in Unicode normalization (NFKC).

    >>> from regard.lab.data import Pair, split_pairs
    >>> splits = split_pairs([Pair(f"source {n % 50}", f"target {n}") for n in range(100)])
    >>> [len(split) for split in splits]
    [80, 10, 10]
    >>> len(set.intersection(*({pair.source for pair in split} for split in splits)))
    0
    """
    share = min(1000, len(pairs) // 10)
    valid, test = share if valid is None else valid, share if test is None else test
    if len(pairs) < FEWEST or min(valid, test) < 1 or valid + test >= len(pairs):
        raise RegardError(
            f"load_corpus: {len(pairs)} pairs are too few for {valid} validation pairs, {test} test pairs and at least "
            f"1 training pair. Give at least {FEWEST} pairs, and at least 1 pair each for validation and test."
        )
    groups: dict[str, list[int]] = {}
    for number, pair in enumerate(pairs):
        groups.setdefault(_normalized(pair.source), []).append(number)
    in_test, in_valid = _held_out(pairs, list(groups.values()), (test, valid), seed)
    if not in_valid or not in_test:
        raise RegardError(
            f"load_corpus: {len(pairs)} pairs have {len(groups)} different sources. These are too few for {valid} "
            f"validation and {test} test pairs whose sources are not in training. Give more text, or your own splits."
        )
    return (
        tuple(pair for number, pair in enumerate(pairs) if number not in in_test | in_valid),
        tuple(pairs[number] for number in sorted(in_valid)),
        tuple(pairs[number] for number in sorted(in_test)),
    )


def _held_out(pairs: Sequence[Pair], groups: list[list[int]], sizes: tuple[int, int], seed: int) -> list[set[int]]:
    """The numbers of the pairs of each held-out split, of at most `sizes` pairs, in the order of `sizes`.

    `groups` are the numbers of pairs with the same source; a group is never divided.
    """
    held_out: list[set[int]] = [set(), set()]
    # the alphabetically first source stands for its group, so the order of the pairs does not matter
    groups = sorted(groups, key=lambda numbers: stable_draw(seed, min(pairs[n].source.strip() for n in numbers)))
    for numbers in groups:
        for split, size in zip(held_out, sizes, strict=True):
            if len(split) + len(numbers) <= size:
                split.update(numbers)
                break
    return held_out


def _normalized(text: str) -> str:
    """The text without differences that a tokenizer ignores: in spaces, and in Unicode normalization."""
    return " ".join(text.split()) if text.isascii() else " ".join(unicodedata.normalize("NFKC", text).split())


def stable_draw(seed: int, text: str) -> bytes:
    """A pseudo-random number for a text, as 16 bytes to sort by; the same on every machine."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16, key=str(seed).encode()).digest()
