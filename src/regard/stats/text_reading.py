"""The result of reading a text with a model: statistics, heads that stand out, and how heads differ between texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.maps import AttentionMap, Reduction
from regard.stats.numbering import head_name
from regard.stats.profile import Link, ModelProfile, one_text, profile, token_names
from regard.stats.roles import LABEL, QUERIES, RoleTable
from regard.stats.warnings import Finding, findings

# The result of reading one text with one model: maps, profile, warnings, and what each word attends to.


#: The most tokens of one word.
PIECES = 12


@dataclass(frozen=True, eq=False)
class HeadLink:
    """A link, with the head and the number of the layer in the model that it belongs to.

    >>> import torch, regard as rg
    >>> from regard.types import TextReading
    >>> q, k = 20 * torch.eye(4).roll(2, 1).expand(1, 1, 4, 4), torch.eye(4).expand(1, 1, 4, 4)
    >>> reading = TextReading.of("", {"layers.5": rg.Attention()(q, k, k).weights})
    >>> (strongest,) = reading.notable(query=0)
    >>> strongest.layer, strongest.head, strongest.link.query, strongest.link.key
    (5, 0, 0, 2)
    """

    layer: int
    head: int
    link: Link


@dataclass(frozen=True, eq=False)
class TextReading:
    """A text as a model read it: a title, one map of the text for each layer, and their profile.

    Signed maps are held as shares of |weight|, and a layer with more than 128 heads as the mean over 128 of them.
    `roles` is None if roles were not computed, for example because the text is too short. `masks` are the warnings
    about masks, and `model` is the name of the model, if it is known.

    >>> import torch, regard as rg
    >>> from regard.types import TextReading
    >>> x = torch.zeros(1, 1, 4, 8)
    >>> maps = {"layer": rg.Attention()(x, x, x).weights}
    >>> reading = TextReading.of("A title", maps, ["the", "un", "##lock", "key"])
    >>> reading.find("unlock"), [finding.kind for finding in reading.findings]
    (1, ['uniform'])
    """

    title: str
    maps: Mapping[str, AttentionMap]
    profile: ModelProfile
    roles: RoleTable | None = None
    masks: list[Finding] = field(default_factory=list)
    model: str = ""

    @staticmethod
    def of(
        title: str,
        maps: Mapping[str, AttentionMap],
        tokens: Sequence[str] | None = None,
        special: Sequence[int] | None = None,
        numbers: Sequence[int] | None = None,
        *,
        queries: Sequence[str] | None = None,
        batch: int = 0,
        also: Callable[[AttentionMap], Sequence[Reduction]] = lambda weights: (),
        model: str = "",
        kinds: Mapping[str, str] | None = None,
    ) -> TextReading:
        """Compute the profile of maps of one size; without `tokens`, each token is named by its position.

        `tokens` are the tokens of the keys and `queries` those of the queries. By default the queries are the
        last keys. `special` are the indices of special keys, by default those with a name such as [CLS]. `numbers` are
        the numbers of the layers, by default those in the names of `maps`. `batch` is the index of one text of a batch.
        `also(map)` returns further reductions for a map. `model` is the name of the model, and `kinds` the kinds of its
        layers, as in `seen.kinds`. Without maps there is an error.

        >>> import torch, regard as rg
        >>> x = torch.zeros(1, 1, 2, 4)
        >>> TextReading.of("", {"layer": rg.Attention()(x, x, x).weights}).profile.tokens
        ['0', '1']
        """
        keys = list(tokens or ())
        if maps:
            keys, queries = token_names(next(iter(maps.values())), tokens, queries)
        texts = {name: one_text("TextReading", weights, batch) for name, weights in maps.items()}
        measured = profile(texts, keys, query_tokens=queries, special=special, numbers=numbers, also=also, kinds=kinds)
        return TextReading(title, texts, measured, model=model)

    @cached_property
    def findings(self) -> list[Finding]:
        """Warnings about masks, then warnings about heads."""
        return [*self.masks, *findings(self.profile)]

    @property
    def why_no_roles(self) -> str:
        """Why `roles` is None, in a sentence; "" if there are roles."""
        profile = self.profile
        if self.roles is not None:
            return ""
        if not profile.is_self_attention:
            return "Roles are defined for self-attention; here the words of one text attend to those of another."
        ordinary = [profile.query_tokens[at] for at in profile.ordinary]
        if len(ordinary) <= QUERIES:
            return (
                f"Roles need a text with more than {QUERIES} tokens besides special ones; this one has {len(ordinary)}."
            )
        if len({*ordinary}) == 1:
            return "Roles need a text with different tokens; all tokens of this one are the same."
        return (
            "Roles were not computed for this text. They need its model: `regard analyze TEXT --model NAME` finds them."
        )

    def rows(self, query: int) -> list[Tensor]:
        """The exact weights of one query, (H, J) for each layer."""
        return [weights[0, :, query].cpu() for weights in self.maps.values()]

    def notable(self, query: int, count: int = 3) -> list[HeadLink]:
        """The `count` strongest links from `query`, an index, to ordinary tokens, at most one for each head.

        In self-attention the first token, the token itself and its neighbors are left out, because many heads put most
        of their weight on these.
        """
        profile = self.profile
        own = query + len(profile.tokens) - len(profile.query_tokens)  # in self-attention queries are the last keys
        left_out = {*profile.special, *((0, own - 1, own, own + 1) if profile.is_self_attention else ())}
        others = [j for j in range(len(profile.tokens)) if j not in left_out]
        links = []
        for layer, weights in zip(profile.layers, self.rows(query), strict=True):
            for head, row in enumerate(weights[:, others] if others else []):
                best = int(row.argmax())
                links.append(HeadLink(layer.number, head, Link(query, others[best], float(row[best]))))
        return sorted(links, key=lambda link: -link.link.weight)[:count]

    def top(self, query: int, layer: int, count: int = 5) -> list[tuple[int, float]]:
        """The keys with the largest weights from `query`, as the mean over a layer's heads: (index, weight).

        `layer` is an index into `maps`, not the number of the layer in the model.
        """
        mean = self.rows(query)[layer].mean(0)
        best = mean.topk(min(count, len(mean)))
        return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    def find(self, word: str) -> int | None:
        """The index of the first occurrence of `word`: that of its first piece if it has several; None if not found."""
        return next(iter(self.occurrences(word)), None)

    def occurrences(self, word: str) -> list[int]:
        """The indices of all occurrences of `word`: that of the first piece if it has several."""
        return [place.start for place in places_of(word, self.profile.query_tokens)]


def plain(token: str) -> str:
    """A token in lower case, without the prefixes that tokenizers add (##, Ġ, ▁)."""
    return token.removeprefix("##").lstrip("Ġ▁").strip().lower()


def places_of(word: str, tokens: Sequence[str]) -> list[range]:
    """Where a word is in a text: the numbers of its tokens, for each occurrence.

    Case and the prefixes of tokenizers do not count. A part of a longer word is not the word, where ## shows it, and
    tokens of two words are no word.

    >>> places_of("animal", ["the", "ani", "##mal", "Animal"]), places_of("into", ["Ġin", "Ġto", "Ġin", "to"])
    ([range(1, 3), range(3, 4)], [range(2, 4)])
    """
    pieces, target = [plain(token) for token in tokens], plain(word)
    continues_word = [token.startswith("##") for token in [*tokens, ""]]  # "": a word may end with the text
    begins_word = [token.startswith(("Ġ", "▁")) for token in tokens]
    return [
        range(start, stop)
        for start in range(len(pieces))
        for stop in range(start + 1, min(start + PIECES, len(pieces)) + 1)
        if "".join(pieces[start:stop]) == target and not continues_word[start] and not continues_word[stop]
        if not any(begins_word[start + 1 : stop])
        if pieces[start]  # a word does not begin at a token that is only a prefix
    ]


# Heads that stand out on a text: most weight on a nearby token, the most focused and the broadest.


#: Statistics that are shares of the weight on a nearby token -> that token.
NEARBY = {"previous": "the previous token", "next": "the next token", "itself": "the token itself"}


class HeadValue(NamedTuple):
    """A value of one head; `layer` is the number of the layer in the model."""

    value: float
    layer: int
    head: int

    @property
    def name(self) -> str:
        return head_name(self.layer, self.head)


def nearby_shares(reading: TextReading, name: str) -> Iterator[HeadValue]:
    """A statistic of `NEARBY` for every head, over the queries whose target exists and is not the first token.

    The queries of the reading must be all its tokens, not the last ones after a cache. The statistic is a mean over all
    queries that have a key, so the weight of the query whose target is the first token is subtracted.
    """
    last = len(reading.profile.query_tokens) - 1
    query = {"previous": 1, "itself": 0}.get(name, last + 1)  # whose target is the first token; none for "next"
    at_first = reading.rows(query) if query <= last else None
    left_out = {"previous": [0, 1], "itself": [0]}.get(name, [last])  # without a target, or with the first token
    for index, layer in enumerate(reading.profile.layers):
        counts = layer.counts[name]
        num_queries = (counts - (layer.allowed[:, left_out[: last + 1]] > 0).sum(-1)).clamp_min(1).tolist()
        for head, total in enumerate((layer.values[name].double() * counts).tolist()):
            on_first = 0.0 if at_first is None else float(at_first[index][head, 0])
            yield HeadValue((total - on_first) / num_queries[head], layer.number, head)


def entropies_outside(profile: ModelProfile) -> Iterator[HeadValue]:
    """The entropy in nats of each head's weight outside the first token and special tokens.

    Heads with less than `LABEL` of their weight there are left out: they hardly attend to the text. exp(entropy) is
    the effective number of tokens.
    """
    for layer in profile.layers:
        outside = 1 - layer.values["special"]
        outside = outside if 0 in profile.special else outside - layer.values["first"]
        for head, (kept, entropy) in enumerate(zip(outside.tolist(), layer.values["elsewhere"].tolist(), strict=True)):
            if kept >= LABEL:
                yield HeadValue(entropy / kept, layer.number, head)


# `text_differences` compares the heads of one model on several texts; the heads that change most come first.


#: Statistics between 0 and 1. The others grow with the length of a text, so texts cannot be compared by them.
SHARES = ("evenness", "special", "previous", "next", "itself")


@dataclass(frozen=True)
class TextDifference:
    """One head: the statistic that differs most between the texts, its value on each text, and their range.

    >>> import torch, regard as rg
    >>> from regard.stats.text_reading import text_differences
    >>> from regard.types import TextReading
    >>> q, k = 20 * torch.eye(4).expand(1, 1, 4, 4), torch.eye(4).expand(1, 1, 4, 4)
    >>> maps = [rg.Attention()(query, k, k).weights for query in (q, q.flip(2))]
    >>> (head,) = text_differences([TextReading.of("", {"layers.0": weights}) for weights in maps])
    >>> head.statistic, [round(value) for value in head.values], round(head.spread)
    ('itself', [1, 0], 1)
    """

    layer: int
    head: int
    statistic: str
    values: tuple[float, ...]
    spread: float


@checked
def text_differences(readings: Sequence[TextReading]) -> list[TextDifference]:
    """One `TextDifference` for every head, the largest spread first. All readings must be of the same layers of one
    model.

    >>> import torch, regard as rg
    >>> from regard.types import TextReading
    >>> x = torch.zeros(1, 1, 3, 4)
    >>> reading = TextReading.of("", {"layers.0": rg.Attention()(x, x, x).weights})
    >>> [head.spread for head in text_differences([reading, reading])]
    [0.0]
    """
    if not readings or len({len(reading.profile.layers) for reading in readings}) > 1:
        raise RegardError(
            "text_differences: give at least one reading. All readings must be of the same layers of one model."
        )
    head_differences = []
    for layers in zip(*(reading.profile.layers for reading in readings), strict=True):
        for head in range(layers[0].num_heads):
            values = torch.stack([torch.stack([layer.values[name][head] for name in SHARES]) for layer in layers])
            spread = values.amax(0) - values.amin(0)
            largest = int(spread.argmax())
            numbers = tuple(values[:, largest].tolist())
            head_differences.append(
                TextDifference(layers[0].number, head, SHARES[largest], numbers, float(spread[largest]))
            )
    return sorted(head_differences, key=lambda difference: -difference.spread)
