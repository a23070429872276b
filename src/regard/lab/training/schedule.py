"""Schedules of the learning rate: functions of the step, or of the used share of the budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from regard.base.errors import RegardError, nearest

#: The schedules by name, and their factor of the peak learning rate after the warm-up.
SCHEDULES = {
    "trapezoid": "the peak, then straight down to 0 over the last fifth of the budget",
    "cosine": "one half cosine from the peak to 0 over the budget, be it steps, epochs or minutes",
    "inverse_square_root": "sqrt(warm-up / step)",
    "noam": "width^-0.5 min(step^-0.5, step warm-up^-1.5), times the learning rate; 1 is the paper's",
    "plateau": "lower each time that the validation has not improved for a while",
    "constant": "1",
}


def warm_up(step: int, steps: int) -> float:
    """min(1, step / steps): linear from the first step, which is number 1, to the peak.

    >>> warm_up(1, 4), warm_up(4, 4), warm_up(9, 4), warm_up(1, 0)
    (0.25, 1.0, 1.0, 1.0)
    """
    return min(1.0, step / steps) if steps else 1.0


def inverse_square_root(step: int, steps: int) -> float:
    """min(step / steps, sqrt(steps / step)): fairseq's form of the Transformer's schedule, 1 at its peak.

    >>> inverse_square_root(2, 4), inverse_square_root(4, 4), inverse_square_root(16, 4)
    (0.5, 1.0, 0.5)
    """
    steps = max(steps, 1)
    return min(step / steps, math.sqrt(steps / step))


def noam(step: int, steps: int, width: int) -> float:
    """width^-0.5 min(step^-0.5, step steps^-1.5) (Vaswani et al. 2017, arXiv:1706.03762, equation 3).

    >>> round(noam(4000, 4000, 512), 6)
    0.000699
    """
    return width**-0.5 * min(step**-0.5, step * max(steps, 1) ** -1.5)


def cosine(share: float) -> float:
    """(1 + cos(pi share)) / 2: from 1 to 0 over the budget (Loshchilov & Hutter 2017, arXiv:1608.03983, one period).

    >>> cosine(0.0), round(cosine(0.5), 9), cosine(1.0), cosine(1.7)
    (1.0, 0.5, 0.0, 0.0)
    """
    return (1 + math.cos(math.pi * min(1.0, max(0.0, share)))) / 2


def trapezoid(share: float, decay: float = 0.2) -> float:
    """min(1, (1 - share) / decay): the peak, then straight down to 0 over the last part of the budget.

    Zhai et al. 2022, arXiv:2106.04560; Hägele et al. 2024, arXiv:2405.18392, compare it with the cosine.

    >>> trapezoid(0.0), trapezoid(0.75), round(trapezoid(0.9), 9), trapezoid(1.7)
    (1.0, 1.0, 0.5, 0.0)
    """
    return min(1.0, max(0.0, 1 - share) / decay)


@dataclass(frozen=True)
class Plateau:
    """A factor that falls when a loss has not been below its best for `patience` validations in a row.

    The object is immutable; `after` returns the next state. torch's `ReduceLROnPlateau` waits one validation longer.

    >>> state = Plateau(patience=2, decay=0.5)
    >>> for loss in (3.0, 2.0, 2.1, 2.2, 2.3):
    ...     state = state.after(loss)
    >>> state.factor, state.waited
    (0.5, 1)
    """

    patience: int = 3
    decay: float = 0.5
    factor: float = 1.0
    best: float = math.inf
    waited: int = 0

    def after(self, loss: float) -> Plateau:
        """The state after one more validation."""
        if loss < self.best:
            return replace(self, best=loss, waited=0)
        if self.waited + 1 < self.patience:
            return replace(self, waited=self.waited + 1)
        return replace(self, factor=self.factor * self.decay, waited=0)


@dataclass(frozen=True)
class Schedule:
    """A named schedule with its peak: `rate(step, share, plateau)` is the learning rate of a step.

    Args:
        name: One of `SCHEDULES`.
        peak: The highest learning rate; for "noam" the factor of the formula.
        warmup: Steps of the warm-up.
        width: Width of the model, for "noam".

    >>> Schedule("trapezoid", peak=0.01, warmup=100).rate(step=50, share=0.0)
    0.005
    """

    name: str = "trapezoid"
    peak: float = 1.0
    warmup: int = 0
    width: int = 512

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise RegardError(f"Schedule: there is no schedule {self.name!r}. {nearest(self.name, SCHEDULES)}")

    def rate(self, step: int, share: float = 0.0, plateau: float = 1.0) -> float:
        """The learning rate of step 1, 2, ...

        Args:
            step: The number of the step, from 1.
            share: Used share of the budget before the step, 0 to 1.
            plateau: `Plateau.factor`.
        """
        if self.name == "noam":
            return self.peak * noam(step, self.warmup, self.width)
        if self.name == "inverse_square_root":
            return self.peak * inverse_square_root(step, self.warmup)
        parts = {"trapezoid": trapezoid(share), "cosine": cosine(share), "plateau": plateau, "constant": 1.0}
        return self.peak * warm_up(step, self.warmup) * parts[self.name]
