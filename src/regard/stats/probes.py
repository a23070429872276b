"""Inputs for finding roles of heads: random sequences that repeat, and shuffled texts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.base.checks import Size, checked
from regard.base.errors import RegardError
from regard.stats.profile import SPECIAL_TOKEN


@checked
def probe_tokens(vocabulary: Size | Sequence[int], length: Size, seed: int = 0) -> Tensor:
    """A random sequence of `length` different tokens, repeated once; (2 length,).

    Duplicate and induction heads show on it.
    Olsson et al. 2022, arXiv:2209.11895: in random tokens only the repetition predicts the next token.
    `vocabulary` is the number of tokens, or a list of token numbers to draw from (leave out special tokens).

    >>> probe = probe_tokens(30_000, 50)
    >>> len(probe), torch.equal(probe[:50], probe[50:])
    (100, True)
    """
    numbers = torch.arange(vocabulary) if isinstance(vocabulary, int) else torch.as_tensor(list(vocabulary))
    if not 0 < length <= len(numbers):
        raise RegardError(
            f"probe_tokens: length is {length}, but the vocabulary has {len(numbers)} tokens. "
            f"Give a length from 1 to {len(numbers)}."
        )
    sequence = numbers[torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))[:length]]
    return sequence.repeat(2)


@checked
def shuffle_order(tokens: Sequence[str | int], special: Sequence[int] | None = None, seed: int = 0) -> list[int]:
    """A random order of the tokens in which special tokens keep their positions.

    `special` are indices; by default special tokens are recognized by their names. Run the model on `ids[order]`
    to get the maps `null` of `roles`.

    >>> order = shuffle_order(["[CLS]", "a", "b", "c", "[SEP]"])
    >>> order[0], sorted(order[1:4]), order[4]
    (0, [1, 2, 3], 4)
    """
    fixed = set(special_positions(tokens) if special is None else special)
    free = torch.tensor([position for position in range(len(tokens)) if position not in fixed], dtype=torch.long)
    shuffled = free[torch.randperm(len(free), generator=torch.Generator().manual_seed(seed))]
    order = list(range(len(tokens)))
    for position, source in zip(free.tolist(), shuffled.tolist(), strict=True):
        order[position] = source
    return order


def special_positions(tokens: Sequence[str | int]) -> list[int]:
    """Indices of the tokens whose names are those of special tokens, such as [CLS] or </s>."""
    return [index for index, token in enumerate(tokens) if SPECIAL_TOKEN.fullmatch(str(token))]
