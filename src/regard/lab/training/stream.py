"""The order of batches in a training, its progress, and the time that is left."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from regard.lab.data.batches import Batch
from regard.lab.training.schedule import Plateau

#: The batches of an epoch, by its number.
Epochs = Callable[[int], Sequence[Batch]]


class UpdateBatches:
    """The batches of one update of the weights, and the place of the first one among the `num_batches` of its epoch.

    This is not a dataclass, because Lightning copies dataclasses.
    """

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
    """All updates from `start` to the epoch `stop`, of `accumulate` batches each; without `stop` they do not end.

    `start` is (epoch, batch). The last update of an epoch may have fewer batches.

    >>> [(u.epoch, u.place, u.following) for u in update_batches(lambda n: [None] * 3, 2, (0, 2), 2)]
    [(0, 2, (1, 0)), (1, 0, (1, 2)), (1, 2, (2, 0))]
    """
    epoch, place = start
    while stop is None or epoch < stop:
        batches = epochs(epoch)
        for first in range(place, len(batches), accumulate):
            update = [batches[number] for number in range(first, min(first + accumulate, len(batches)))]
            yield UpdateBatches(epoch, first, update, len(batches))
        epoch, place = epoch + 1, 0


@dataclass
class TrainingProgress:
    """The progress of a training. It is saved in one file with the weights of the same step.

    Args:
        step: Number of updates.
        epoch: Epoch of the next batch.
        place: Place of the next batch in its epoch.
        seconds: Time of the training steps of all sessions, without validation.
        tokens: Number of target tokens so far, in all processes; `pairs` is the number of sentence pairs.
        share: Used share of the budget.
        best: Best value of `monitor` so far; `waited` is the number of validations since then.
        plateau: State of the plateau schedule.
        rows: Rows of metrics.csv.
        recent: Sums since the last row: "loss" (a part in each process), "tokens", "pairs", "seconds".
        saved: Value of `seconds` when the state was last saved.
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
        """Add numbers to the row of this step, or begin it."""
        if not self.rows or self.rows[-1]["step"] != self.step:
            self.rows.append({"step": self.step, "epoch": self.epoch, "minutes": round(self.seconds / 60, 4)})
        self.rows[-1].update(numbers)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers for `json.dumps`, which keeps every bit of a float."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> TrainingProgress:
        """The progress that `to_json` wrote.

        >>> progress = TrainingProgress(step=3, seconds=0.1)
        >>> TrainingProgress.from_json(progress.to_json()) == progress
        True
        """
        return TrainingProgress(**{**data, "plateau": Plateau(**data["plateau"])})


class TimeLeft:
    """Wall-clock seconds until the budget is used up, at the speed since this object was made.

    On a CPU a budget in minutes counts only processor time of training steps, so the wall-clock time is longer.

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
