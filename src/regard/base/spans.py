"""Sets of integers, stored as intervals. Masks answer with them which keys a range of queries may attend to.

A mask over n tokens has n x n entries. But in almost every mask the allowed keys form a few intervals, for example the
256 keys before a query, or the keys of one document. `Spans` stores only these intervals, and `&`, `|`, `~` combine
them without n x n work.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

#: The end of an interval without an end. Shifted by any position, it still fits in 64 bits.
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
        """The union of intervals. Empty intervals are dropped; touching intervals become one."""
        return Spans.union(intervals)

    @staticmethod
    def union(intervals: Iterable[tuple[int, int]]) -> Spans:
        """`of` for any iterable."""
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
        """The runs of True in a boolean vector. Its first element is the integer `start`."""
        padded = torch.nn.functional.pad(flags.to("cpu", torch.int8), (1, 1))
        edges = (torch.nonzero(padded.diff()).flatten() + start).tolist()  # start, stop, start, stop, ...
        return Spans(tuple(zip(edges[::2], edges[1::2], strict=True)))

    def __and__(self, other: Spans) -> Spans:
        """The integers of both sets."""
        mine, theirs = self.intervals, other.intervals
        if len(mine) == len(theirs) == 1:  # the usual case; comparisons take less time than min and max
            (left, right), (low, high) = mine[0], theirs[0]
            left, right = left if left > low else low, right if right < high else high
            return Spans(((left, right),)) if left < right else EMPTY
        common, a, b = [], 0, 0
        while a < len(mine) and b < len(theirs):
            (left, right), (low, high) = mine[a], theirs[b]
            start, stop = left if left > low else low, right if right < high else high
            if start < stop:
                common.append((start, stop))
            a += stop == right  # an interval that ends here has nothing more in common
            b += stop == high
        return Spans(tuple(common))

    def __or__(self, other: Spans) -> Spans:
        """The integers of either set."""
        if not self.intervals or not other.intervals:
            return self if self.intervals else other
        return Spans.union(self.intervals + other.intervals)

    def __invert__(self) -> Spans:
        """All other integers, from -INFINITY to INFINITY."""
        edges = [-INFINITY, *(edge for interval in self.intervals for edge in interval), INFINITY]
        return Spans.union(zip(edges[::2], edges[1::2], strict=True))  # from each stop to the next start

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """The intervals (start, stop), whereas `len` and `in` are about integers."""
        return iter(self.intervals)

    def __bool__(self) -> bool:
        return bool(self.intervals)

    def __len__(self) -> int:
        """The number of integers in all intervals."""
        return sum(stop - start for start, stop in self.intervals)

    def __contains__(self, point: int) -> bool:
        index = bisect_right(self.intervals, (point, INFINITY)) - 1  # the last interval that starts at or before it
        return index >= 0 and point < self.intervals[index][1]

    def covers(self, other: Spans) -> bool:
        """Whether this set has every integer of `other`."""
        mine, index = self.intervals, 0
        for start, stop in other.intervals:  # intervals of one set never touch, so one of mine must hold all of this
            while index < len(mine) and mine[index][1] < stop:
                index += 1
            if index == len(mine) or mine[index][0] > start:
                return False
        return True

    def hull(self) -> Spans:
        """One interval, from the first integer to the last."""
        return Spans(((self.intervals[0][0], self.intervals[-1][1]),)) if self.intervals else self

    def shift(self, by: int) -> Spans:
        """The set of all integers plus `by`."""
        if not by:
            return self
        return Spans(tuple((start + by, stop + by) for start, stop in self.intervals))

    def gaps_up_to(self, size: int) -> Spans:
        """The same intervals with every gap of at most `size` integers filled."""
        filled = [(stop, start) for (_, stop), (start, _) in pairwise(self.intervals) if start - stop <= size]
        return self | Spans(tuple(filled)) if filled else self

    def tensor(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """All integers in ascending order, as an int64 vector."""
        if not self.intervals:
            return torch.empty(0, dtype=torch.int64, device=device)
        return torch.cat([torch.arange(a, b, device=device) for a, b in self.intervals])


EMPTY = Spans()
EVERYTHING = Spans(((-INFINITY, INFINITY),))
