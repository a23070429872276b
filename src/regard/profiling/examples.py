"""The strongest examples of each head: its strongest link in each of the documents in which this link is strongest."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from regard.base.whole_files import short_number
from regard.stats.profile import Link, ModelProfile
from regard.stats.strongest_links import strongest_word_links

#: Examples that a head keeps, tokens around each end of a link, and what stands for tokens that are left out.
MOST_EXAMPLES, TOKENS_AROUND, ELLIPSIS = 5, 6, "…"


@dataclass(frozen=True)
class HeadExample:
    """A link in a document: the `tokens` around its ends, where the two stand in them, and the weight.

    Special tokens are left out. `document` is the number of the document in the corpus, from 1. `left_out` is the index
    of "…" in `tokens`, which stands for tokens between the ends, or -1.
    """

    weight: float
    tokens: list[str]
    query: int
    key: int
    left_out: int = -1
    document: int = 0

    @staticmethod
    def of(profile: ModelProfile, link: Link) -> HeadExample:
        """The example of a link."""
        ends = sorted((link.query, link.key))
        # the places around each end; if they do not meet, "…" stands between them
        near = [range(max(0, end - TOKENS_AROUND), min(len(profile.tokens), end + TOKENS_AROUND + 1)) for end in ends]
        places = sorted({*near[0], *near[1]} - set(profile.special))
        tokens, left_out = [profile.tokens[place] for place in places], -1
        if near[0].stop < near[1].start:
            left_out = sum(place < near[0].stop for place in places)
            tokens.insert(left_out, ELLIPSIS)
            places.insert(left_out, -1)
        weight = short_number(link.weight)  # few digits, as a profile is saved with many examples
        return HeadExample(weight, tokens, places.index(link.query), places.index(link.key), left_out)


#: The examples of each head of each layer, the strongest first.
Examples = list[list[list[HeadExample]]]


def examples_of(profile: ModelProfile) -> Examples:
    """At most one example of every head of a document; none where queries and keys are different texts."""
    if profile.query_tokens != profile.tokens:
        return [[[] for _ in range(layer.num_heads)] for layer in profile.layers]
    links = [strongest_word_links(profile, layer) for layer in profile.layers]
    return [[[HeadExample.of(profile, link)] if link else [] for link in layer] for layer in links]


def merged_examples(examples: Examples, others: Examples, document: int) -> Examples:
    """The strongest examples of each head of both. `others` are those of the document with this number.

    Of equal weights the earlier document is first. `examples` is empty before the first document.
    """

    def strongest(own: list[HeadExample], new: list[HeadExample]) -> list[HeadExample]:
        numbered = [replace(example, document=document) for example in new]
        return sorted([*own, *numbered], key=lambda example: -example.weight)[:MOST_EXAMPLES]

    layers = zip(examples or [[[]] * len(heads) for heads in others], others, strict=True)
    return [[strongest(*lists) for lists in zip(heads, new_heads, strict=True)] for heads, new_heads in layers]


def examples_to_json(examples: Examples) -> list[list[list[dict[str, Any]]]]:
    """Plain data for `json.dumps`."""
    return [[[asdict(example) for example in head] for head in layer] for layer in examples]


def read_examples(data: list[list[list[dict[str, Any]]]]) -> Examples:
    """The examples that `examples_to_json` wrote."""
    return [[[HeadExample(**example) for example in head] for head in layer] for layer in data]
