"""Runs a model on texts that show a role: annotated sentences, needles in a long text, and a smaller cache."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from regard.base.errors import RegardError
from regard.base.texts.embedded import english_verses, passage
from regard.hf.editing import streaming
from regard.hf.heads.model_heads import ModelHeads
from regard.stats import SyntaxSentence, WatchedNeedle, WatchedSentence, cache_split, retrieval_roles, syntax_roles
from regard.stats.cache_split import KeyHeadSplit
from regard.stats.roles import RoleTable

#: A sentence of which the end is the answer, its end, and the question.
NEEDLES = (
    ("The gardener hid the silver key", " under the third stone of the old bridge.",
     "Where did the gardener hide the silver key? He hid it"),
    ("The captain's secret code", " is seven violet lanterns beside a sleeping tiger.",
     "What is the captain's secret code? It"),
    ("For her best bread the baker", " needs walnuts, two pears and a spoon of dark honey.",
     "What does the baker need for her best bread? She"),
    ("The doctor from Vienna keeps her letters", " inside a blue piano behind the winter garden.",
     "Where does the doctor from Vienna keep her letters? She keeps them"),
)  # fmt: skip
#: The places of the needle, as shares of the text.
DEPTHS = (0.1, 0.5, 0.85)

#: Random orders of the words that are tried, until every gold pair still goes back in the text.
TRIES = 1000


def syntax_table(
    reader: Any, sentences: Sequence[SyntaxSentence], relations: Sequence[str], layers: Sequence[int] | None
) -> RoleTable:
    """The roles of the heads on annotated sentences, with the sentences in another order of their words as the null.

    `reader` is the `TextReader` of a model, here and below; `layers` are the numbers of layers, None for all.
    """
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
    """The maps of the sentence with its words in this order, and the numbers of their layers.

    `order` has the number of the word at each place. `word_of` has for each token the number of its word, or -1.
    """
    words = sentence.text.split()
    text = " ".join(words[number] for number in order)
    inputs = reader.tokenize(text, None)
    word_of = [order[place] if place >= 0 else -1 for place in _word_places(reader.tokenizer, text)]
    chosen = reader.watched(inputs, layers)
    return WatchedSentence(sentence, word_of, chosen.maps), chosen.numbers


def _word_places(tokenizer: Any, text: str) -> list[int]:
    """For each token of a text the index of its word in `text.split()`; -1 for special tokens and for spaces alone.

    Single spaces separate the words, so the number of spaces before the end of a token is the index of its word.
    """
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


def needle_table(reader: Any, length: int, depths: Sequence[float], layers: Sequence[int] | None) -> RoleTable:
    """The retrieval heads of a causal model, on needles at several depths of a text of `length` tokens.

    Depths are shares of the text, from 0 to 1, and `layers` are the numbers of layers, None for all.

    The tokens are: the text up to the depth, the needle with its answer, the rest of the text, the question, and the
    answer once more. A head that retrieves reads the first answer while the model predicts the second.
    """
    watched, numbers = [], None
    for needle, answer, question in NEEDLES:
        parts = [_ids(reader, part) for part in (f" {needle}", answer, f" {question}")]
        size = length - sum(map(len, parts)) - len(parts[1])  # the answer stands twice
        if size < 2 * len(parts[1]) or not depths or not all(0 <= depth <= 1 for depth in depths):
            raise RegardError(
                f"TextReader.needles(length={length}, depths={list(depths)}): a needle, its question and its answer "
                f"take {length - size} tokens. Give a longer length, and depths between 0 and 1."
            )
        text = long_text(reader, size)
        for depth in depths:
            cut = 1 + round(depth * (size - 1))  # at least the first token of the text stands before the needle
            ids = [*text[:cut], *parts[0], *parts[1], *text[cut:], *parts[2], *parts[1]]
            row = torch.tensor([ids])
            chosen = reader.watched({"input_ids": row, "attention_mask": torch.ones_like(row)}, layers)
            numbers = chosen.numbers
            place = cut + len(parts[0])
            watched.append(WatchedNeedle(chosen.maps, place, len(ids) - len(parts[1]), len(parts[1])))
    return retrieval_roles(watched, numbers=numbers)


def long_text(reader: Any, length: int) -> list[int]:
    """The first tokens of the texts of the package: a passage of Alice in Wonderland, then the World English Bible.

    A verse has more than four tokens, so the verses suffice.
    """
    ids = _ids(reader, passage())
    if len(ids) < length:
        ids += _ids(reader, " " + " ".join(english_verses(length // 4 + 100)))
    return ids[:length]


def _ids(reader: Any, text: str) -> list[int]:
    """The tokens of a text, without special ones."""
    return reader.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def split_of(reader: Any, inputs: dict[str, Any], sinks: int, window: int, least: float) -> KeyHeadSplit:
    """The heads of a model that need the whole cache, on one text; the last three arguments as in `cache_split`."""
    chosen = reader.watched(inputs, None)
    heads = ModelHeads.of(reader.model, "cache_split")
    groups = {name: heads[name].group for name in chosen.maps}
    return cache_split(chosen.maps, sinks=sinks, window=window, least=least, groups=groups, numbers=chosen.numbers)


@dataclass(frozen=True)
class CacheCost:
    """The perplexity of a text under a `KeyHeadSplit`: `TextReader.cache_cost(split, text)`.

    `whole` is that of the whole cache, `split` that of the split, `random` that of as many key heads with the whole
    cache at random, and `none` that of streaming heads only. `share` is the cache of the split for this text.

    >>> from regard.hf import CacheCost
    >>> print(CacheCost(whole=18.2, split=18.9, random=21.4, none=25.0, share=0.41, tokens=1024).sentence)
    The cache takes 41 % and perplexity goes from 18.2 to 18.9 over 1,024 tokens (21.4 with as many heads at
    random, 25.0 if all stream).
    """

    whole: float
    split: float
    random: float
    none: float
    share: float
    tokens: int

    @property
    def sentence(self) -> str:
        """The cost in one sentence."""
        return (
            f"The cache takes {100 * self.share:.0f} % and perplexity goes from {self.whole:.1f} to {self.split:.1f} "
            f"over {self.tokens:,} tokens ({self.random:.1f} with as many heads at random, {self.none:.1f} if all "
            "stream)."
        )


@torch.no_grad()
def cost_of(reader: Any, split: KeyHeadSplit, inputs: dict[str, Any], seed: int) -> CacheCost:
    """The perplexities of a text with the whole cache, with a split, and with two to compare it with.

    These two are as many key heads drawn at random by `seed`, and no head with the whole cache. `reader` is a
    `TextReader`, and `inputs` are those of its model, with the ids (1, n).
    """
    ids = inputs["input_ids"]

    def perplexity(tried: KeyHeadSplit | None) -> float:
        with nullcontext() if tried is None else streaming(reader.model, tried):
            return math.exp(float(reader.model(**inputs, labels=ids, use_cache=False).loss))

    tried = (None, split, split.at_random(seed), split.without_full())
    return CacheCost(*map(perplexity, tried), share=split.share(ids.shape[1]), tokens=ids.shape[1])
