"""What has to travel: the keys that each rank needs of each other, read off the spans of the mask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from regard.pieces.mask import Mask
from regard.spans import EVERYTHING, Spans

#: The mask is asked about so many parts of a stretch of queries: more ask for less, and take longer.
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
    """Where the queries and keys of every rank stand, and which keys it needs of whom."""

    mask: Mask | None
    queries: Sequence[Spans]
    keys: Sequence[Spans]

    @property
    def ranks(self) -> int:
        return len(self.keys)

    @cached_property
    def _reaches(self) -> list[list[Spans]]:
        """For each rank and each stretch of its queries."""
        return [[reach(self.mask, *stretch) for stretch in mine] for mine in self.queries]

    def needs(self, rank: int, owner: int) -> Spans:
        """Positions of the owner's keys that travel to a rank."""
        return Spans.union(part for found in self._reaches[rank] for part in found & self.keys[owner])

    def chunks(self, rank: int, owner: int) -> Iterator[tuple[Spans, Spans]]:
        """Each stretch of a rank's queries with those of the owner's keys it needs, a stretch of keys at a time."""
        for stretch, found in zip(self.queries[rank], self._reaches[rank], strict=True):
            for held in self.keys[owner]:
                if needed := found & Spans((held,)):
                    yield Spans((stretch,)), needed
