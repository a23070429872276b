"""Head statistics that need the tokens of a text: weight on punctuation, equal tokens, offsets or chosen tokens."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard.base.checks import checked
from regard.maps import AttentionMap, MassOn, Reduction
from regard.stats.statistics import STATISTICS, Allowed, HeadStatistic
from regard.stats.token_reductions import Offsets, SameToken, numbers


def is_punctuation(token: str) -> bool:
    """Whether a token consists of punctuation only; prefixes that tokenizers add (##, Ġ, ▁) are ignored.

    >>> [is_punctuation(token) for token in [".", "Ġ,", "▁?!", "##'", "it's", "", "[SEP]"]]
    [True, True, True, True, False, False, False]
    """
    bare = (token.removeprefix("##") or token).lstrip("Ġ▁").strip()
    return bool(bare) and all(unicodedata.category(character).startswith("P") for character in bare)


@dataclass(frozen=True)
class Chosen(HeadStatistic):
    """Mean over queries of the weight on chosen keys (indices)."""

    keys: tuple[int, ...]
    name: ClassVar[str] = "chosen"
    meaning: ClassVar[str] = "share of the weight on the chosen tokens"

    def reductions(self, weights: AttentionMap, special: Sequence[int]) -> tuple[Reduction, ...]:
        return (MassOn(torch.tensor(self.keys, dtype=torch.long)),)


@dataclass(frozen=True)
class Punctuation(Chosen):
    """Mean over queries of the weight on punctuation; `keys` are its indices, without the first key."""

    name: ClassVar[str] = "punctuation"
    meaning: ClassVar[str] = "share of the weight on punctuation other than the first token"


@dataclass(frozen=True, eq=False)
class Same(HeadStatistic):
    """Mean over queries of the weight on other occurrences of the query's token, except for the first key."""

    ids: Tensor
    name: ClassVar[str] = "same"
    meaning: ClassVar[str] = "share of the weight on other occurrences of the same token"

    def reductions(self, weights: AttentionMap, special: Sequence[int]) -> tuple[Reduction, ...]:
        keys = self.ids.clone()
        keys[:1] = -1  # equals no token number
        return (SameToken(keys, self.ids),)


@dataclass(frozen=True)
class AtOffsets(HeadStatistic):
    """Mean over queries of the weight at offsets -8 to 8: 17 numbers for each head."""

    name: ClassVar[str] = "offsets"
    meaning: ClassVar[str] = "share of the weight at offsets -8 to 8"

    def reductions(self, weights: AttentionMap, special: Sequence[int]) -> tuple[Reduction, ...]:
        return Offsets(), Allowed(weights)

    def per_head(self, *results: Tensor) -> Tensor:
        offsets, allowed = results
        return offsets / allowed.shape[-1]


@checked
def text_statistics(tokens: Sequence[str], chosen: Sequence[int] | None = None) -> tuple[HeadStatistic, ...]:
    """All statistics of a text: `STATISTICS` and those that need its tokens. For `profile(..., statistics=)`.

    `chosen` are indices of keys; the statistic "chosen" is the share of the weight on them. Weight on the first key
    counts for the statistic "first" only, whatever its token is.

    >>> [statistic.name for statistic in text_statistics(["a", "."])][-3:]
    ['punctuation', 'same', 'offsets']
    """
    punctuation = tuple(index for index, token in enumerate(tokens) if index and is_punctuation(token))
    extra: list[HeadStatistic] = [Punctuation(punctuation), Same(numbers(list(tokens))), AtOffsets()]
    if chosen is not None:
        extra.append(Chosen(tuple(chosen)))
    return (*STATISTICS, *extra)
