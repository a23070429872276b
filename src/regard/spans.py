"""An algebra of integer intervals: what a mask says about whole stretches of keys.

A mask over n tokens is an n x n question, but almost every mask in use answers it in
intervals: "the 256 keys before me", "the keys of my document". `Spans` holds such an answer
in O(number of intervals), and `&`, `|`, `~` combine answers without ever touching n x n.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

INFINITY = 1 << 60


@dataclass(frozen=True)
class Spans:
    """Sorted, disjoint, half-open intervals of integers.

    >>> Spans.of((0, 4), (2, 6), (9, 10))
    Spans(intervals=((0, 6), (9, 10)))
    >>> Spans.of((0, 10)) & ~Spans.of((3, 5))
    Spans(intervals=((0, 3), (5, 10)))
    """

    intervals: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(*intervals: tuple[int, int]) -> Spans:
        """The union of the given intervals; empty ones vanish, touching ones merge."""
        return Spans.union(intervals)

    @staticmethod
    def union(intervals: Iterable[tuple[int, int]]) -> Spans:
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(intervals):
            if start >= stop:
                continue
            if merged and start <= merged[-1][1]:
                if stop > merged[-1][1]:
                    merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        return Spans(tuple(merged))

    @staticmethod
    def where(flags: torch.Tensor, start: int = 0) -> Spans:
        """The runs of True in a boolean vector whose first element stands at `start`."""
        padded = torch.nn.functional.pad(flags.to("cpu", torch.int8), (1, 1))
        edges = (torch.nonzero(padded.diff()).flatten() + start).tolist()
        return Spans(tuple(zip(edges[::2], edges[1::2], strict=True)))

    def __and__(self, other: Spans) -> Spans:
        mine, theirs = self.intervals, other.intervals
        if len(mine) == len(theirs) == 1:
            (left, right), (low, high) = mine[0], theirs[0]
            left, right = left if left > low else low, right if right < high else high
            return Spans(((left, right),)) if left < right else EMPTY
        found, a, b = [], 0, 0
        while a < len(mine) and b < len(theirs):
            (left, right), (low, high) = mine[a], theirs[b]
            start, stop = left if left > low else low, right if right < high else high
            if start < stop:
                found.append((start, stop))
            if right < high:
                a += 1
            else:
                b += 1
        return Spans(tuple(found))

    def __or__(self, other: Spans) -> Spans:
        if not self.intervals or not other.intervals:
            return self if self.intervals else other
        return Spans.union(self.intervals + other.intervals)

    def __invert__(self) -> Spans:
        edges = [-INFINITY, *(edge for interval in self.intervals for edge in interval), INFINITY]
        return Spans.union(zip(edges[::2], edges[1::2], strict=True))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.intervals)

    def __bool__(self) -> bool:
        return bool(self.intervals)

    def __len__(self) -> int:
        """How many integers the intervals hold together."""
        return sum(stop - start for start, stop in self.intervals)

    def __contains__(self, point: int) -> bool:
        at = bisect_right(self.intervals, (point, INFINITY)) - 1
        return at >= 0 and point < self.intervals[at][1]

    def covers(self, other: Spans) -> bool:
        """Whether every integer of `other` is held here too."""
        mine, at = self.intervals, 0
        for start, stop in other.intervals:  # intervals never touch, so each has to lie inside one of these
            while at < len(mine) and mine[at][1] < stop:
                at += 1
            if at == len(mine) or mine[at][0] > start:
                return False
        return True

    def hull(self) -> Spans:
        """The one interval from the first integer to the last."""
        return Spans(((self.intervals[0][0], self.intervals[-1][1]),)) if self.intervals else self

    def shift(self, by: int) -> Spans:
        if not by:
            return self
        return Spans(tuple((start + by, stop + by) for start, stop in self.intervals))

    def gaps_up_to(self, size: int) -> Spans:
        """The same intervals with every gap of at most `size` integers filled."""
        filled = [(a[1], b[0]) for a, b in pairwise(self.intervals) if b[0] - a[1] <= size]
        return self | Spans(tuple(filled)) if filled else self

    def tensor(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Every integer held, in order, as an int64 vector."""
        if not self.intervals:
            return torch.empty(0, dtype=torch.int64, device=device)
        return torch.cat([torch.arange(a, b, device=device) for a, b in self.intervals])


EMPTY = Spans()
EVERYTHING = Spans(((-INFINITY, INFINITY),))
