"""Where two files that should be aligned line by line begin to drift apart, told by the lengths of their lines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from regard.data.gale_church import VARIANCE

__all__ = ["suspicious_line"]

#: Lines by which one file may run ahead of the other after a break; the difference of their counts is tried, too.
FARTHEST = 20
#: The most that one pair of lines may say, in nats: a free translation is no break.
LARGEST = 8.0
#: Nats that a break must explain beyond what chance explains somewhere among all lines and shifts.
CERTAIN = 6.0
#: Nats that a break of short files must explain; below, the shorter file is taken to be cut at its end.
LIKELY = 3.5


def suspicious_line(source: Sequence[str], target: Sequence[str]) -> int:
    """The first line, counted from 1, from which on the lengths fit better when one file is shifted.

    Every pair of lines costs -log P(δ), δ of Gale & Church (1993), see `gale_church.cost`. For each shift the sum S_i
    of what the lines up to i cost more unshifted than shifted is watched (Page's CUSUM, 1954): the first shift of
    which S_i - min S_j, j <= i, passes a bound is a break, and it lies where that minimum does. So several breaks, on
    either side, do not hide the first. Where none passes, as in short files, one break is assumed that explains
    the counts, and the place where it costs least is given. That is the end of the shorter file, unless another place
    costs much less.

    >>> lines = ["word " * number for number in (3, 20, 9, 4, 30)]
    >>> suspicious_line(lines, [*lines[:1], *lines[2:]])
    2
    """
    lengths = [np.array([len(line.strip()) for line in text], dtype=float) for text in (source, target)]
    few = min(map(len, lengths))
    if not few:
        return 1
    ratio = max(lengths[1].sum(), 1.0) / max(lengths[0].sum(), 1.0)
    certain = _certain_break(lengths[0], lengths[1], ratio)
    return 1 + (_single_break(lengths[0], lengths[1], ratio) if certain is None else certain)


def _certain_break(source: np.ndarray, target: np.ndarray, ratio: float) -> int | None:
    """The place of the break that is noticed first."""
    few, difference = min(len(source), len(target)), len(target) - len(source)
    aligned = _costs(source[:few], target[:few], ratio)
    shifts = sorted({*range(-FARTHEST, FARTHEST + 1), difference} - {0}, key=abs)
    bound = CERTAIN + np.log(few * len(shifts))
    noticed: list[tuple[int, int]] = []
    for shift in shifts:
        mine, theirs = source[max(0, -shift) :], target[max(0, shift) :]  # a line in place, and the shifted one
        paired = min(len(mine), len(theirs), few)
        gains = aligned[:paired] - _costs(mine[:paired], theirs[:paired], ratio)
        sums = np.concatenate([[0.0], np.cumsum(gains)])
        above = np.flatnonzero(sums - np.minimum.accumulate(sums) > bound)
        if len(above):
            noticed.append((int(above[0]), int(np.argmin(sums[: above[0]]))))
    return min(noticed)[1] if noticed else None


def _single_break(source: np.ndarray, target: np.ndarray, ratio: float) -> int:
    """Where the lines before as they are, and those after shifted so that both ends meet, cost least together."""
    few = min(len(source), len(target))
    ahead, behind = _costs(source[:few], target[:few], ratio), _costs(source[-few:], target[-few:], ratio)
    before = np.concatenate([[0.0], np.cumsum(ahead)])
    after = np.concatenate([np.cumsum(behind[::-1])[::-1], [0.0]])
    costs = before + after
    return int(np.argmin(costs)) if costs[-1] - costs.min() > LIKELY else few


def _costs(source: np.ndarray, target: np.ndarray, ratio: float) -> np.ndarray:
    """-log 2 (1 - Φ(|δ|)) of pairs of lengths, at most `LARGEST`."""
    mean = np.maximum((source + target / ratio) / 2, 0.5)  # two empty lines fit
    deviation = np.abs(target - source * ratio) / np.sqrt(mean * VARIANCE)
    tail = torch.special.log_ndtr(torch.from_numpy(-deviation)).numpy()
    return np.minimum(LARGEST, -tail - np.log(2))
