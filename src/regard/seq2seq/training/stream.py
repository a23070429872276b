"""What a training goes through, in order, and where it stands: everything but the weights."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from regard.data.batches import Batch
from regard.seq2seq.training.schedule import Plateau

#: The batches of an epoch, by its number.
Epochs = Callable[[int], Sequence[Batch]]


class UpdateBatches:
    """The batches that make one update of the weights, and where they stand. No dataclass: Lightning copies those."""

    def __init__(self, epoch: int, place: int, batches: Sequence[Batch], num_batches: int) -> None:
        self.epoch, self.place, self.batches, self.num_batches = epoch, place, batches, num_batches

    @property
    def following(self) -> tuple[int, int]:
        """The epoch and the place in it at which the next update begins."""
        after = self.place + len(self.batches)
        return (self.epoch, after) if after < self.num_batches else (self.epoch + 1, 0)


def update_batches(
    epochs: Epochs, accumulate: int = 1, start: tuple[int, int] = (0, 0), stop: int | None = None
) -> Iterator[UpdateBatches]:
    """All updates from a place on, up to the epoch `stop`; the last of an epoch may have fewer batches.

    >>> [(u.epoch, u.place, u.following) for u in update_batches(lambda n: [None] * 3, 2, (0, 2), 2)]
    [(0, 2, (1, 0)), (1, 0, (1, 2)), (1, 2, (2, 0))]
    """
    epoch, place = start
    while stop is None or epoch < stop:
        batches = epochs(epoch)
        for first in range(place, len(batches), accumulate):
            several = [batches[number] for number in range(first, min(first + accumulate, len(batches)))]
            yield UpdateBatches(epoch, first, several, len(batches))
        epoch, place = epoch + 1, 0


@dataclass
class TrainingProgress:
    """How far a training is. It is saved with the weights of the same moment, so that none of it can disagree.

    Args:
        step: Updates so far.
        epoch: Of the next batch.
        place: Of the next batch in its epoch.
        seconds: Spent on training steps, all sessions together, validation not counted.
        tokens: Target tokens trained on, and `pairs` sentence pairs, in all processes.
        share: Of the budget that is used.
        best: What `monitor` was at best, and `waited` the validations since.
        plateau: Of the learning rate.
        rows: Of metrics.csv.
        recent: Sums since the last row: "loss", "tokens", "pairs", "seconds".
        saved: The seconds at which the last state was saved.
    """

    step: int = 0
    epoch: int = 0
    place: int = 0
    seconds: float = 0.0
    tokens: int = 0
    pairs: int = 0
    share: float = 0.0
    best: float | None = None
    waited: int = 0
    plateau: Plateau = field(default_factory=Plateau)
    rows: list[dict[str, float | None]] = field(default_factory=list)
    recent: dict[str, float] = field(default_factory=dict)
    saved: float = 0.0

    def add(self, **amounts: float) -> None:
        """Add to the sums since the last row."""
        for name, amount in amounts.items():
            self.recent[name] = self.recent.get(name, 0.0) + amount

    def note(self, **numbers: float | None) -> None:
        """Numbers of this step, as a new row or in the one that the step has."""
        if not self.rows or self.rows[-1]["step"] != self.step:
            self.rows.append({"step": self.step, "epoch": self.epoch, "minutes": round(self.seconds / 60, 4)})
        self.rows[-1].update(numbers)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers for `json.dumps`, which writes floats so that they come back bit for bit."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> TrainingProgress:
        """What `to_json` wrote.

        >>> progress = TrainingProgress(step=3, seconds=0.1)
        >>> TrainingProgress.from_json(progress.to_json()) == progress
        True
        """
        return TrainingProgress(**{**data, "plateau": Plateau(**data["plateau"])})


class TimeLeft:
    """Wall-clock seconds until the budget is used up, at the pace since this object was made.

    A budget in minutes counts processor time; validation, saving and other programs take more.

    >>> times = iter([100.0, 130.0])
    >>> left, progress = TimeLeft(lambda: next(times)), TrainingProgress(plateau=Plateau(3, 0.5), share=0.5)
    >>> left(progress), left(dataclasses.replace(progress, share=0.75))
    (None, 30.0)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[float, float] | None = None

    def __call__(self, progress: TrainingProgress) -> float | None:
        now = self._clock()
        self._first = self._first or (now, progress.share)
        passed, used = now - self._first[0], progress.share - self._first[1]
        return passed * max(0.0, 1 - progress.share) / used if used > 0 else None
