"""`Indices`: a set of numbers of heads, queries or keys, as ranges, of which the last may have no end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.base.spans import INFINITY, Spans


@dataclass(frozen=True)
class Indices:
    """Ranges (start, stop, step) of numbers from 0 on, in the order in which they were given.

    >>> import torch
    >>> some = Indices(((3, 4, 1), (0, 2, 1)))
    >>> some.contain(torch.arange(5)).int().tolist(), some.among(range(5)), some.rank(torch.tensor([3, 1])).tolist()
    ([1, 1, 0, 1, 0], [0, 1, 3], [0, 2])
    """

    ranges: tuple[tuple[int, int, int], ...]

    @staticmethod
    def of(*numbers: int) -> Indices:
        return Indices(tuple((number, number + 1, 1) for number in numbers))

    @property
    def is_everything(self) -> bool:
        return (0, INFINITY, 1) in self.ranges

    @property
    def is_finite(self) -> bool:
        return all(stop < INFINITY for _, stop, _ in self.ranges)

    @property
    def last(self) -> int:
        """The greatest number; -1 if there is none."""
        return max((range(*one)[-1] for one in self.ranges if range(*one)), default=-1)

    def contain(self, numbers: Tensor) -> Tensor:
        """For each of these numbers, whether it is in the set."""
        found = torch.zeros_like(numbers, dtype=torch.bool)
        for start, stop, step in self.ranges:
            found |= (numbers >= start) & (numbers < stop) & ((numbers - start) % step == 0)
        return found

    def among(self, numbers: range) -> list[int]:
        """Those of consecutive numbers that are in the set, ascending."""
        every = torch.arange(numbers.start, numbers.stop, device="cpu")
        return every[self.contain(every)].tolist()

    def rank(self, numbers: Tensor) -> Tensor:
        """The place of each number in the order of the ranges; 0 for numbers that are not in the set."""
        rank, done, before = torch.zeros_like(numbers), torch.zeros_like(numbers, dtype=torch.bool), 0
        for start, stop, step in self.ranges:
            inside = Indices(((start, stop, step),)).contain(numbers) & ~done
            rank = torch.where(inside, before + (numbers - start) // step, rank)
            done, before = done | inside, before + len(range(start, stop, step))
        return rank

    def hull(self) -> Spans:
        """Intervals that hold all the numbers, and others if a range has steps."""
        return Spans.union((start, stop) for start, stop, _ in self.ranges)

    def core(self) -> Spans:
        """Intervals that hold only numbers of the set: the ranges without steps."""
        return Spans.union((start, stop) for start, stop, step in self.ranges if step == 1)


EVERY = Indices(((0, INFINITY, 1),))
