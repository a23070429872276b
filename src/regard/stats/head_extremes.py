"""Heads that stand out on a text: most weight on a nearby token, the most focused and the broadest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from regard.stats.numbering import head_name
from regard.stats.profile import ModelProfile
from regard.stats.roles import LABEL
from regard.stats.text_reading import TextReading

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
    """A statistic of `NEARBY` for every head, over the queries whose target is not the first token."""
    count = len(reading.profile.query_tokens)
    query = {"previous": 1, "itself": 0}.get(name, count)  # the query whose target is the first token
    at_first = reading.rows(query) if query < count else None
    num_queries = max(count - (2 if name == "previous" else 1), 1)
    for number, layer in enumerate(reading.profile.layers):
        for head, mean in enumerate(layer.values[name].tolist()):
            on_first = 0.0 if at_first is None else float(at_first[number][head, 0])
            yield HeadValue((mean * count - on_first) / num_queries, layer.number, head)


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
