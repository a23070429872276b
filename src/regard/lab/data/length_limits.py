"""Leaves out pairs that are too long: lines that are no sentences, or more pieces than a model reads."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from regard.base.errors import RegardError, first_few
from regard.lab.data.corpus import Corpus, Pair
from regard.lab.data.tokenizer import Tokenizer

__all__ = ["limit_pieces", "limit_words", "pairs_within"]

#: The limits of each side in words and characters, where the caller gives none.
MOST_WORDS, MOST_CHARACTERS = 1000, 10_000


def limit_words(pairs: list[Pair], max_words: int | None) -> tuple[list[Pair], Counter[str]]:
    """The pairs of at most `max_words` words on each side, and the number of pairs left out, by reason.

    Without `max_words` the limits are 1,000 words and 10,000 characters. A longer line is no sentence, and a batch,
    which is padded to its longest line, could fill the memory.
    """
    if max_words is not None:
        kept = [pair for pair in pairs if pair.words <= max_words]
        return kept, Counter({f"longer than {max_words} words": len(pairs) - len(kept)})

    def fits(pair: Pair) -> bool:
        # a text of n characters has at most n words, so only longer texts are cut into words
        characters = max(len(pair.source), len(pair.target))
        return characters <= MOST_WORDS or (characters <= MOST_CHARACTERS and pair.words <= MOST_WORDS)

    kept = [pair for pair in pairs if fits(pair)]
    if len(kept) == len(pairs):
        return pairs, Counter()
    lines = _line_numbers(pair for pair in pairs if not fits(pair))
    reason = f"longer than {MOST_WORDS:,} words or {MOST_CHARACTERS:,} characters{lines}"
    return kept, Counter({reason: len(pairs) - len(kept)})


def limit_pieces(corpus: Corpus, source: Tokenizer, target: Tokenizer, max_pieces: int) -> Corpus:
    """The corpus without training and validation pairs of more than `max_pieces` pieces on a side.

    `skipped` gives their number and their first line numbers. Test pairs stay.

    >>> from regard.lab.data import WordTokenizer
    >>> words, pairs = WordTokenizer(["a"]), (Pair("a", "a"), Pair("a a a", "a", "2"))
    >>> limit_pieces(Corpus("letters", "x", "y", pairs, pairs[:1], pairs), words, words, 2).describe()
    'letters: 1 training, 1 validation, 2 test pairs; left out: 1 of more than 2 pieces (2).'
    """
    train, valid = (pairs_within(split, source, target, max_pieces) for split in (corpus.train, corpus.valid))
    kept, all_pairs = {*map(id, train + valid)}, corpus.train + corpus.valid  # `id`: pairs may be equal
    left_out = [pair for pair in all_pairs if id(pair) not in kept]
    if not left_out:
        return corpus
    if not train:
        raise RegardError(
            f"load_corpus: every training pair of {corpus.name} has more than {max_pieces} pieces on a side."
        )
    skipped = {**corpus.skipped, f"of more than {max_pieces:,} pieces{_line_numbers(left_out)}": len(left_out)}
    return replace(corpus, train=train, valid=valid, skipped=skipped)


def pairs_within(pairs: Iterable[Pair], source: Tokenizer, target: Tokenizer, max_pieces: int) -> tuple[Pair, ...]:
    """The pairs of at most `max_pieces` pieces on each side."""

    def fits(text: str, tokenizer: Tokenizer) -> bool:
        # A short text needs no tokenizer: a piece has at least one character of the normalized text, and the first
        # piece may be a lone space. NFKD has at least as many characters as the NFKC of a tokenizer.
        return len(unicodedata.normalize("NFKD", text)) < max_pieces or len(tokenizer.encode(text)) <= max_pieces

    return tuple(pair for pair in pairs if fits(pair.source, source) and fits(pair.target, target))


def _line_numbers(pairs: Iterable[Pair]) -> str:
    """The first line numbers of pairs, in brackets; empty if the pairs have none.

    >>> _line_numbers([Pair("a", "b", "17"), Pair("a", "b", "30")])
    ' (17, 30)'
    """
    numbers = first_few(pair.id for pair in pairs if pair.id)
    return f" ({numbers})" if numbers else ""
