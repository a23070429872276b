"""What a profile can measure once it knows the tokens of a text: punctuation, same token, offsets, chosen."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard.checks import checked
from regard.maps import AttentionMap, Fold, MassOn
from regard.stats.folds import Offsets, SameToken, numbers
from regard.stats.statistics import STATISTICS, Allowed, HeadStatistic


def is_punctuation(token: str) -> bool:
    """Whether a token is nothing but punctuation, once the marks of tokenizers are off.

    >>> [is_punctuation(token) for token in [".", "Ġ,", "▁?!", "##'", "it's", "", "[SEP]"]]
    [True, True, True, True, False, False, False]
    """
    bare = (token.removeprefix("##") or token).lstrip("Ġ▁").strip()
    return bool(bare) and all(unicodedata.category(sign).startswith("P") for sign in bare)


@dataclass(frozen=True)
class Chosen(HeadStatistic):
    """Mean over queries of the weight on chosen keys (indices)."""

    keys: tuple[int, ...]
    name: ClassVar[str] = "chosen"
    meaning: ClassVar[str] = "share of the weight on the chosen tokens"

    def folds(self, weights: AttentionMap, special: Sequence[int]) -> tuple[Fold, ...]:
        return (MassOn(torch.tensor(self.keys, dtype=torch.long)),)


@dataclass(frozen=True)
class Punctuation(Chosen):
    """Mean over queries of the weight on punctuation (indices of keys, without the first)."""

    name: ClassVar[str] = "punctuation"
    meaning: ClassVar[str] = "share of the weight on punctuation other than the first token"


@dataclass(frozen=True, eq=False)
class Same(HeadStatistic):
    """Mean over queries of the weight on other places of the query's own token (`ids`), the first key left out."""

    ids: Tensor
    name: ClassVar[str] = "same"
    meaning: ClassVar[str] = "share of the weight on the same token elsewhere"

    def folds(self, weights: AttentionMap, special: Sequence[int]) -> tuple[Fold, ...]:
        keys = self.ids.clone()
        keys[:1] = -1  # no token's number
        return (SameToken(keys, self.ids),)


@dataclass(frozen=True)
class AtOffsets(HeadStatistic):
    """Mean over queries of the weight at offsets -8 to 8: one row of 17 numbers a head, not one number."""

    name: ClassVar[str] = "offsets"
    meaning: ClassVar[str] = "share of the weight at offsets -8 to 8"

    def folds(self, weights: AttentionMap, special: Sequence[int]) -> tuple[Fold, ...]:
        return Offsets(), Allowed(weights)

    def per_head(self, *results: Tensor) -> Tensor:
        offsets, allowed = results
        return offsets / allowed.shape[-1]


@checked
def text_statistics(tokens: Sequence[str], chosen: Sequence[int] | None = None) -> tuple[HeadStatistic, ...]:
    """All statistics of a text: `STATISTICS` and those that need its tokens. For `profile(..., statistics=)`.

    `chosen` are indices of keys whose share of the weight is wanted too. Weight on the first key is the statistic
    "first", and is not counted for its token.

    >>> [statistic.name for statistic in text_statistics(["a", "."])][-3:]
    ['punctuation', 'same', 'offsets']
    """
    marks = tuple(index for index, token in enumerate(tokens) if index and is_punctuation(token))
    extra: list[HeadStatistic] = [Punctuation(marks), Same(numbers(list(tokens))), AtOffsets()]
    if chosen is not None:
        extra.append(Chosen(tuple(chosen)))
    return (*STATISTICS, *extra)
