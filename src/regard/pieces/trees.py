"""Masks of tokens that branch: trees of drafts, and continuations that share a prefix."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard.base.checks import Count, checked
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import Sizes, to_device
from regard.base.spans import Spans
from regard.pieces.data_masks import documents
from regard.pieces.grid import Grid, at
from regard.pieces.mask import Mask, causal
from regard.pieces.mask import prefix as common_keys
from regard.pieces.mask_checks import check_covers, integers, shortened


@checked
@dataclass(frozen=True)
class tree(Mask):
    """A token attends to itself, to its ancestors in a tree, and to a context before the tree.

    Speculative decoding checks a tree of draft tokens in one call (SpecInfer, Miao et al. 2024, arXiv:2305.09781;
    Medusa, EAGLE). `parents[t]` is the number of the token that token t continues, or -1 if t continues the context.
    Tokens may be in any order in which each parent stands before its children: by depth, as in Medusa, or depth-first.
    The first `context` positions are an ordinary causal text, and token t of the tree has the position `context` + t.
    Positional encodings need the depth of each token instead: `context` + `depths`.

    >>> import regard as rg
    >>> rg.masks.tree([-1, 0, 0, 1]).dense(4).int().tolist()  # tokens 1 and 2 are two continuations of token 0
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    >>> rg.masks.tree([-1, 0, 0, 1]).depths
    (0, 1, 1, 2)
    """

    parents: tuple[int, ...]
    context: Count = 0
    batched = False

    def __init__(self, parents: Sequence[int], context: Count = 0) -> None:
        listed = integers("tree", "parents", parents)
        object.__setattr__(self, "parents", listed)
        object.__setattr__(self, "context", context)
        wrong = next((token for token, parent in enumerate(listed) if not -1 <= parent < token), None)
        if wrong is not None:
            raise RegardError(
                f"tree({shortened(listed)}): token {wrong} has the parent {listed[wrong]}. A parent is -1, which is "
                "the context, or the number of an earlier token: order the tokens so that parents come first."
            )

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The number of ancestors of each token inside the tree."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return tuple(depths)

    def allowed(self, grid: Grid) -> Tensor:
        """In an Euler tour the descendants of a token are an interval, so two comparisons decide a pair."""
        first, stop = (to_device(order, grid.device) for order in self.intervals)
        place = at("tree", "queries", first, 0, grid.query).view(1, 1, -1, 1)
        key_first, key_stop = (at("tree", "keys", order, 0, grid.key) for order in (first, stop))
        return (key_first <= place) & (place < key_stop)

    def any_allowed(self, start: int, stop: int) -> Spans:
        """The ancestors of the last query of each run: those of the other queries of the run are among them."""
        return Spans.union(
            interval for first, last in self._runs_between(start, stop) for interval in self._line(first, last)
        )

    def all_allowed(self, start: int, stop: int) -> Spans:
        """The common ancestors of the first query of each run: the other queries of the run descend from it."""
        lines = [self._ancestors(max(first, start)) for first, _ in self._runs_between(start, stop)]
        common = lines[0] if lines else Spans()
        for line in lines[1:]:
            common &= line
        return common

    def edges(self, start: int, stop: int) -> Sequence[int]:
        """Where runs begin: the ancestors of a run are those of its first token, and more in each step."""
        runs = self._runs
        return runs[bisect_right(runs, start) : bisect_right(runs, stop - 1)]

    def check(self, sizes: Sizes, positions: Positions) -> None:
        size = self.context + len(self.parents)
        check_covers("tree", "queries", positions.queries(sizes.I), size)
        check_covers("tree", "keys", positions.keys, size)

    def __repr__(self) -> str:
        return f"tree({shortened(self.parents)}, context={self.context})"

    @cached_property
    def intervals(self) -> tuple[Tensor, Tensor]:
        """An Euler tour, the order of a depth-first walk: where each position is entered, and where it is left.

        Two tensors (context + tokens,). The descendants of a position, and itself, are entered from the first number up
        to the second. Each position of the context has all later ones as descendants.
        """
        sizes = [1] * len(self.parents)
        for token in range(len(self.parents) - 1, -1, -1):
            if self.parents[token] >= 0:
                sizes[self.parents[token]] += sizes[token]
        free, roots, firsts = [0] * len(sizes), 0, [0] * len(sizes)  # `free`: the next place among the descendants
        for token, parent in enumerate(self.parents):
            if parent >= 0:
                firsts[token] = free[parent]
                free[parent] += sizes[token]
            else:
                firsts[token], roots = roots, roots + sizes[token]
            free[token] = firsts[token] + 1
        context, size = list(range(self.context)), self.context + len(sizes)
        first = [*context, *(self.context + place for place in firsts)]
        stop = [*(size for _ in context), *(self.context + a + b for a, b in zip(firsts, sizes, strict=True))]
        return tuple(torch.tensor(order, dtype=torch.int64, device="cpu") for order in (first, stop))  # type: ignore[return-value]

    @cached_property
    def _runs(self) -> list[int]:
        """First positions of the runs: in a run each token continues the token just before it."""
        return [0, *(self.context + token for token, parent in enumerate(self.parents) if parent != token - 1)]

    def _runs_between(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The runs with a position in [start, stop): the first position of each, and its last one before `stop`."""
        runs = self._runs
        numbers = range(max(bisect_right(runs, start) - 1, 0), bisect_right(runs, stop - 1))
        return [(runs[n], min(runs[n + 1] if n + 1 < len(runs) else stop, stop) - 1) for n in numbers]

    def _ancestors(self, position: int) -> Spans:
        """A position and all its ancestors."""
        return Spans.union(self._line(self._runs[bisect_right(self._runs, position) - 1], position))

    def _line(self, run: int, last: int) -> list[tuple[int, int]]:
        """Position `last` and its ancestors, an interval [first, stop) of each run; its own run begins at `run`."""
        intervals = [(run, last + 1)]
        while run > 0:  # the first run begins at 0; any other begins with a token whose parent is in another run
            last = self.context + self.parents[run - self.context]
            if last < 0:  # the parent is the context, which is empty
                break
            run = self._runs[bisect_right(self._runs, last) - 1]
            intervals.append((run, last + 1))
        return intervals


@checked
def shared_prefix(prefix: Count, lengths: Sequence[int]) -> Mask:
    """Several continuations of one prefix, packed into one sequence: each attends to the prefix and to itself.

    The prefix has `prefix` tokens, the continuations have `lengths`, and all are causal. So the prefix is computed once
    for all samples of a prompt, or for all answers to a document (Hydragen, Juravsky et al. 2024, arXiv:2402.05099).
    The first token of every continuation stands just after the prefix for a positional encoding, but not in the
    sequence: rotate queries and keys by their own places before the call.

    >>> import regard as rg
    >>> rg.masks.shared_prefix(2, [1, 2]).dense(5).int().tolist()
    [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]]
    """
    listed = integers("shared_prefix", "lengths", lengths)
    if not listed or min(listed) < 1:
        raise RegardError(
            f"shared_prefix({prefix}, {shortened(listed)}): give the length of each continuation, at least 1."
        )
    return causal() & (common_keys(prefix) | documents((prefix, *listed) if prefix else listed))
