"""The route of keys: which keys each rank needs of each other rank, from the spans of the mask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from regard.base.spans import EVERYTHING, Spans
from regard.pieces.mask import Mask

#: Parts of an interval of queries, each with its own spans. With more parts fewer keys are sent, but plans are slower.
QUESTIONS = 16


def reach(mask: Mask | None, start: int, stop: int) -> Spans:
    """Key positions that some query of [start, stop) may attend to."""
    if mask is None:
        return EVERYTHING
    step = -(-(stop - start) // QUESTIONS)
    parts = (mask.any_allowed(first, min(first + step, stop)) for first in range(start, stop, step))
    return Spans.union(interval for part in parts for interval in part)


@dataclass(frozen=True, eq=False)
class Route:
    """The positions of the queries and keys of every rank, and the keys that each rank needs of each other."""

    mask: Mask | None
    queries: Sequence[Spans]
    keys: Sequence[Spans]

    @property
    def ranks(self) -> int:
        return len(self.keys)

    @cached_property
    def _reaches(self) -> list[list[Spans]]:
        """The reach of each interval of queries of each rank."""
        return [[reach(self.mask, *interval) for interval in held] for held in self.queries]

    def needs(self, rank: int, owner: int) -> Spans:
        """Positions of the keys that the owner sends to a rank."""
        return Spans.union(interval for reached in self._reaches[rank] for interval in reached & self.keys[owner])

    def chunks(self, rank: int, owner: int) -> Iterator[tuple[Spans, Spans]]:
        """Each interval of queries of a rank with each interval of the owner's keys, reduced to the needed keys."""
        for interval, reached in zip(self.queries[rank], self._reaches[rank], strict=True):
            for held in self.keys[owner]:
                if needed := reached & Spans((held,)):
                    yield Spans((interval,)), needed
