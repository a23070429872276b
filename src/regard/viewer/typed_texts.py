"""The texts of an open page by number: those that it began with, and the last ones that a reader typed."""

from __future__ import annotations

import threading

from regard.viewer.embedded import exact_bytes
from regard.viewer.live_request import LiveRequest
from regard.viewer.sheet import Sheet

#: The most typed texts that are kept, and the most bytes of their maps. The oldest are dropped first.
KEPT, KEPT_BYTES = 12, 128 << 20


class TypedTexts:
    """Typed texts get numbers from `first` on. A number is never used twice, so an open page never mixes two texts.

    A text may have several sheets: those of a translator are its alignment, its encoder and its decoder.
    """

    def __init__(self, first: int) -> None:
        self._first, self._next, self._lock = first, first, threading.Lock()
        self._numbers: dict[LiveRequest, list[int]] = {}  # the least recently typed text first
        self._sheets: dict[int, Sheet] = {}

    def find(self, request: LiveRequest) -> list[int]:
        """The numbers of a text that was typed before and is still kept; it then counts as typed last."""
        with self._lock:
            numbers = self._numbers.pop(request, [])
            if numbers:
                self._numbers[request] = numbers
            return numbers

    def add(self, request: LiveRequest, sheets: list[Sheet]) -> list[int]:
        """Keep the sheets of a text, drop the oldest texts beyond the limits, and return the numbers of the sheets."""
        with self._lock:
            numbers = list(range(self._next, self._next + len(sheets)))
            self._next += len(sheets)
            self._numbers[request] = numbers
            self._sheets |= dict(zip(numbers, sheets, strict=True))
            while len(self._numbers) > 1 and (len(self._numbers) > KEPT or self._bytes() > KEPT_BYTES):
                for number in self._numbers.pop(next(iter(self._numbers))):
                    del self._sheets[number]
            return numbers

    def get(self, number: int) -> Sheet | None:
        """The sheet of a number; None if there is none, or none any more."""
        return self._sheets.get(number)

    def titles(self) -> list[tuple[int, str]]:
        """The numbers and titles of all kept sheets."""
        with self._lock:
            return [(number, sheet.about["title"]) for number, sheet in self._sheets.items()]

    def dropped(self, number: int) -> bool:
        """Whether a text had this number and is not kept any more."""
        return self._first <= number < self._next and number not in self._sheets

    def _bytes(self) -> int:
        return sum(exact_bytes(weights) for sheet in self._sheets.values() for weights in sheet.maps)
