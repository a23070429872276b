"""Inputs made to find roles with: sequences that repeat, and texts that are shuffled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.checks import Size, checked
from regard.errors import RegardError
from regard.stats.profile import SPECIAL_TOKEN


@checked
def probe_tokens(vocabulary: Size | Sequence[int], length: Size, seed: int = 0) -> Tensor:
    """A random sequence of `length` different tokens, twice: what duplicate and induction heads show on; (2 length,).

    Olsson et al. 2022, arXiv:2209.11895: on random tokens nothing but the repetition tells which token
    comes next. `vocabulary` is its size, or the token numbers to draw from (leave special ones out).

    >>> probe = probe_tokens(30_000, 50)
    >>> len(probe), torch.equal(probe[:50], probe[50:])
    (100, True)
    """
    numbers = torch.arange(vocabulary) if isinstance(vocabulary, int) else torch.as_tensor(list(vocabulary))
    if not 0 < length <= len(numbers):
        raise RegardError(
            f"probe_tokens: {length} different tokens were asked for, the vocabulary has {len(numbers)}. "
            "Ask for at least one and at most as many as there are."
        )
    drawn = numbers[torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))[:length]]
    return drawn.repeat(2)


@checked
def shuffle_order(tokens: Sequence[str | int], special: Sequence[int] | None = None, seed: int = 0) -> list[int]:
    """An order of the tokens that shuffles all but the special ones, which stay where they are.

    `special` are indices; without it special tokens are known by their names. The null of `roles`
    is the model's run on `ids[order]`.

    >>> order = shuffle_order(["[CLS]", "a", "b", "c", "[SEP]"])
    >>> order[0], sorted(order[1:4]), order[4]
    (0, [1, 2, 3], 4)
    """
    kept = set(special_places(tokens) if special is None else special)
    free = torch.tensor([place for place in range(len(tokens)) if place not in kept], dtype=torch.long)
    shuffled = free[torch.randperm(len(free), generator=torch.Generator().manual_seed(seed))]
    order = list(range(len(tokens)))
    for place, source in zip(free.tolist(), shuffled.tolist(), strict=True):
        order[place] = source
    return order


def special_places(tokens: Sequence[str | int]) -> list[int]:
    """Indices of the tokens that are special by their names, [CLS], </s> and the like."""
    return [index for index, token in enumerate(tokens) if SPECIAL_TOKEN.fullmatch(str(token))]
