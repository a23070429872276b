"""Runs a model on texts that show a role: annotated sentences, and needles in a long text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from regard.errors import RegardError
from regard.stats import RoleTable, SyntaxSentence, WatchedSentence, syntax_roles

#: Random orders of the words that are tried, until every gold pair still goes back in the text.
TRIES = 1000


def syntax_table(
    reader: Any, sentences: Sequence[SyntaxSentence], relations: Sequence[str], layers: Sequence[int] | None
) -> RoleTable:
    """The roles of the heads on annotated sentences, with the sentences in another order of their words as the null."""
    if not sentences:
        raise RegardError("TextReader.syntax: there are no sentences. Give at least one, or leave them out.")
    draw = random.Random(0)
    orders = [shuffled_words(sentence, draw) for sentence in sentences]
    read = [_watched(reader, one, range(len(one.words)), layers) for one in sentences]
    null = [_watched(reader, one, order, layers) for one, order in zip(sentences, orders, strict=True)]
    numbers = read[0][1]
    return syntax_roles([one for one, _ in read], null=[one for one, _ in null], relations=relations, numbers=numbers)


def shuffled_words(sentence: SyntaxSentence, draw: random.Random) -> list[int]:
    """A random order of the words in which the key of each gold pair stands before its query, as in the sentence."""
    pairs = [pair for own in sentence.pairs.values() for pair in own]
    order = list(range(len(sentence.words)))
    for _ in range(TRIES):
        draw.shuffle(order)
        place = {word: n for n, word in enumerate(order)}
        if all((place[key] < place[query]) == (key < query) for query, key in pairs):
            break
    return order


def _watched(
    reader: Any, sentence: SyntaxSentence, order: Sequence[int], layers: Sequence[int] | None
) -> tuple[WatchedSentence, list[int]]:
    """The maps of the sentence with its words in this order, and the numbers of their layers."""
    words = sentence.text.split()
    text = " ".join(words[number] for number in order)
    inputs = reader.tokenize(text, None)
    word_of = [order[place] if place >= 0 else -1 for place in _word_places(reader.tokenizer, text)]
    chosen = reader.watched(inputs, layers)
    return WatchedSentence(sentence, word_of, chosen.maps), chosen.numbers


def _word_places(tokenizer: Any, text: str) -> list[int]:
    """For each token of a text the index of its word in `text.split()`; -1 for special tokens."""
    if not getattr(tokenizer, "is_fast", False):
        raise RegardError(
            f"TextReader.syntax: {type(tokenizer).__name__} does not say which characters a token covers. Use a fast "
            "tokenizer (AutoTokenizer.from_pretrained(..., use_fast=True)), or give syntax_roles the words."
        )
    encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
    special = set(tokenizer.all_special_ids)
    places = []
    for token, (start, stop) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        is_none = token in special or stop <= start or not text[start:stop].strip()
        places.append(-1 if is_none else text[:stop].rstrip().count(" "))
    return places
