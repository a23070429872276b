"""`recognize` finds the rule behind a mask tensor, so that no n x n tensor is kept.

A model gives its backend a boolean (B, 1, I, J) tensor, which is almost always a short rule: causal, a window, padding.
`recognize` derives candidate rules from the first and last allowed key of every row, and compares them with the whole
tensor, block by block. Only a rule that agrees on every pair is used; otherwise the tensor itself is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from regard.base.positions import Positions
from regard.base.spans import Spans
from regard.pieces.data_masks import documents, mask_tensor, padding
from regard.pieces.grid import Grid
from regard.pieces.mask import Mask, block_local, causal, prefix, window

#: Rows that are compared at once.
BLOCK = 256


@dataclass(frozen=True, eq=False)
class Recognized:
    """A mask (None: all pairs), and the positions `start` of query 0 (None: ends align) and `first` of key 0."""

    mask: Mask | None
    start: int | None = None
    first: int = 0

    def positions(self, num_queries: int, num_keys: int) -> Positions:
        """The positions of this many queries and keys."""
        last = self.first + num_keys
        return Positions(last - num_queries if self.start is None else self.start, Spans(((self.first, last),)))


def recognize(allowed: Tensor, num_batch: int, num_queries: int, num_keys: int, decoding: bool = False) -> Recognized:
    """The rule behind a boolean (B or 1, H or 1, I or 1, J) tensor, or the tensor itself as a mask.

    The numbers are those of the batch entries, queries and keys of the call. With `decoding` a single query stands at
    its last allowed key, not at the last key: a static cache has room for keys that are not written yet.

    >>> import torch
    >>> n = torch.arange(6)
    >>> recognize((n <= n[:, None])[None, None], 1, 6, 6).mask
    causal()
    """
    full = allowed.expand(-1, -1, num_queries, num_keys)
    if full.shape[1] == 1 or full.stride(1) == 0 or bool((full == full[:, :1]).all()):
        facts = _Facts.of(full[:, 0], num_batch)
        for candidate in _candidates(facts):
            if _agrees(candidate, facts):
                if decoding and num_queries == 1 and candidate.mask is not None:
                    return Recognized(candidate.mask, int(facts.last.max()))
                return candidate
    return Recognized(mask_tensor(full))


@dataclass(frozen=True, eq=False)
class _Facts:
    """The tensor (b, I, J), the keys that at least one row allows (b, J), each row's first and last allowed key (b, I).

    b is 1 if all `num_batch` entries have the same mask. Rows without an allowed key have -1.
    """

    allowed: Tensor
    used_keys: Tensor
    first: Tensor
    last: Tensor
    num_batch: int

    @staticmethod
    def of(allowed: Tensor, num_batch: int) -> _Facts:
        first, last = [], []
        for block in allowed.split(BLOCK, 1):  # argmax of zeros and ones is the place of the first one
            flags, empty = block.to(torch.uint8), ~block.any(-1)
            first.append(flags.argmax(-1).masked_fill(empty, -1))
            last.append((block.shape[-1] - 1 - flags.flip(-1).argmax(-1)).masked_fill(empty, -1))
        return _Facts(allowed, allowed.any(1), torch.cat(first, 1), torch.cat(last, 1), num_batch)

    def padding(self) -> Mask | None:
        """The keys that at least one row allows, as a mask; None if these are all keys."""
        return None if self.used_keys.all() else padding(self.used_keys.expand(self.num_batch, -1))


def _candidates(facts: _Facts) -> Iterator[Recognized]:
    """Candidate rules, the simplest first. They only have to be possible: `_agrees` tests every pair.

    If no padding hides a row's last keys, a causal row ends at its own position. So the first query has the largest
    `last` - row as its position. `ahead` and `behind` are the largest distances from a query to an allowed key.
    """
    (_, I, J), real = facts.allowed.shape, facts.padding()
    yield Recognized(real)
    filled = facts.first >= 0
    if not filled.any() or I == 1:
        return
    rows, aligned = torch.arange(I, device=filled.device), J - I
    start = min(int((facts.last - rows)[filled].max()), aligned)
    first_query = None if start == aligned else start  # None: the ends of queries and keys align
    ahead = int((facts.last - aligned - rows)[filled].max())
    behind = max(int((start + rows - facts.first)[filled].max()), 0) + 1  # counts the query's own position
    yield Recognized(_both(causal(), real), first_query)
    yield Recognized(_both(window(max(behind, ahead + 1)), real))
    yield Recognized(_both(causal() & window(behind), real), first_query)
    yield Recognized(_both(causal() & block_local(behind), real), first_query)
    yield from _of_one_sequence(facts, real)


def _of_one_sequence(facts: _Facts, real: Mask | None) -> Iterator[Recognized]:
    """Candidate rules for a batch of one: a prefix, and packed documents.

    A prefix ends at the last key of row 0. A document begins at the first key of its rows.
    """
    batch, I, J = facts.allowed.shape
    if batch > 1:
        return
    yield Recognized(_both(causal() | prefix(int(facts.last[0, 0]) + 1), real))
    edges = [*facts.first[0].unique().tolist(), J]
    if I == J and edges[0] == 0:
        packed = documents([stop - start for start, stop in pairwise(edges)])
        yield Recognized(causal() & packed)
        yield Recognized(packed)


def _both(rule: Mask, real: Mask | None) -> Mask:
    """The pairs of a rule whose key is no padding."""
    return rule if real is None else rule & real


def _agrees(candidate: Recognized, facts: _Facts) -> bool:
    """Whether the rule equals the tensor for every pair."""
    batch, I, J = facts.allowed.shape
    if candidate.mask is None:
        return bool(facts.allowed.all())
    grid = Grid.whole(Positions.of(candidate.start, I, J), batch, 1, I, facts.allowed.device)
    for start in range(0, I, BLOCK):
        rows = slice(start, min(start + BLOCK, I))
        predicted = candidate.mask.allowed(grid.tile(rows, slice(0, J)))[:, 0]
        if not bool((predicted == facts.allowed[:, rows]).all()):
            return False
    return True
