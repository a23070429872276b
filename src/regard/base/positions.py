"""The positions of queries and keys. Masks and biases compare positions, never indices.

So there is no special case for a chunk of queries, a cache of earlier keys, a ring cache that has forgotten keys, or a
shard of a longer sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from regard.base.checks import integer
from regard.base.errors import RegardError
from regard.base.spans import EMPTY, Spans


@dataclass(frozen=True)
class Positions:
    """Queries have the positions `start`, `start` + 1, ...; keys have the integers of `keys`, in ascending order.

    >>> Positions.aligned_to_end(2, 5)
    Positions(start=3, keys=Spans(intervals=((0, 5),)))
    """

    start: int
    keys: Spans

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", integer("Positions", "start", self.start))
        if not isinstance(self.keys, Spans):
            raise RegardError(
                f"Positions(keys={self.keys!r}): expected Spans, such as regard.types.Spans.of((0, 5)) for keys at 0 "
                "to 4."
            )

    @staticmethod
    def aligned_to_end(num_queries: int, num_keys: int) -> Positions:
        """The default: the last query has the position of the last key ("bottom-right").

        torch's `is_causal` aligns the first query with the first key instead.
        """
        return Positions(num_keys - num_queries, Spans(((0, num_keys),)) if num_keys else EMPTY)

    @staticmethod
    def of(start: int | None, num_queries: int, num_keys: int) -> Positions:
        """Keys from 0 on, the first query at `start` (by default aligned to the end)."""
        aligned = Positions.aligned_to_end(num_queries, num_keys)
        return aligned if start is None else Positions(start, aligned.keys)

    def check(self, num_keys: int) -> None:
        """Refuse another number of keys than that of the positions."""
        if len(self.keys) != num_keys:
            raise RegardError(
                f"attend: {num_keys} keys were given, but positions has {len(self.keys)} key positions. "
                "Give one position for each key."
            )

    def queries(self, num_queries: int) -> Spans:
        """The positions of the queries."""
        return Spans(((self.start, self.start + num_queries),)) if num_queries else EMPTY

    @cached_property
    def _offsets(self) -> list[int]:
        """The index of the first key of each interval of positions; at the end the number of keys."""
        return [0, *accumulate(stop - start for start, stop in self.keys)]

    def columns(self, spans: Spans) -> Spans:
        """Key positions -> key indices (positions without a key are dropped)."""
        if len(self.keys.intervals) == 1:
            return (spans & self.keys).shift(-self.keys.intervals[0][0])
        parts = []
        for offset, (start, stop) in zip(self._offsets, self.keys, strict=False):
            inside = spans & Spans(((start, stop),))
            parts += inside.shift(offset - start).intervals
        return Spans.union(parts)

    def at(self, columns: Spans) -> Spans:
        """Key indices -> key positions, the inverse of `columns`."""
        if len(self.keys.intervals) == 1:
            return columns.shift(self.keys.intervals[0][0])
        parts = []
        for offset, (start, stop) in zip(self._offsets, self.keys, strict=False):
            inside = columns & Spans(((offset, offset + stop - start),))
            parts += inside.shift(start - offset).intervals
        return Spans.union(parts)

    def query(self, rows: slice, device: torch.device | str = "cpu") -> Tensor:
        """The positions of the queries with the indices `rows`, as a vector."""
        return torch.arange(self.start + rows.start, self.start + rows.stop, device=device)

    def key(self, device: torch.device | str = "cpu") -> Tensor:
        """The positions of all keys, as a vector."""
        return self.keys.tensor(device)

    def distances(self, num_queries: int) -> range:
        """All integers from the smallest distance j - i of a query and a key to the largest.

        >>> Positions.aligned_to_end(2, 3).distances(2)
        range(-2, 2)
        """
        first, last = self.keys.hull().intervals[0]
        return range(first - self.start - num_queries + 1, last - self.start)


def check_positions(positions: object) -> None:
    """Refuse a value that is not a `Positions`."""
    if positions is not None and not isinstance(positions, Positions):
        raise RegardError(
            f"attend(positions={positions!r}): expected regard.types.Positions, got {type(positions).__name__}. If the "
            "first query has position 3 and the first key 0: regard.types.Positions.of(3, num_queries, num_keys)."
        )
