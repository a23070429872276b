"""Finds the line where two files stop being translations of each other line by line, from the lengths of the lines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from regard.lab.data.gale_church import VARIANCE

__all__ = ["suspicious_line"]

#: The largest shift, in lines, that is tried. The difference of the numbers of lines is tried, too.
LARGEST_SHIFT = 20
#: The largest cost of one pair of lines, in nats: a free translation is no break.
LARGEST_COST = 8.0
#: The nats by which a break must fit better than the best of all lines and shifts fits by chance.
CERTAIN = 6.0
#: The nats by which a break of short files must fit better. Otherwise the shorter file is taken as cut at its end.
LIKELY = 3.5


def suspicious_line(source: Sequence[str], target: Sequence[str]) -> int:
    """The first line, counted from 1, after which the lengths fit better if one file is shifted.

    A pair of lines costs -log P(δ), with δ of Gale & Church (1993), see `gale_church.cost`. For each shift, S_i is the
    cost of the lines up to i unshifted, minus their cost shifted. The test is Page's CUSUM (1954): a break is detected
    at the first i where S_i - min S_j, j <= i, is above a bound, and its line is that of the minimum. So later breaks
    do not hide the first.

    If no shift is above the bound, as in short files, one break must explain the difference of the numbers of lines.
    The result is the line where it costs least. That is the end of the shorter file, unless another line costs much
    less.

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
    """The line of the break that the CUSUM test detects first, counted from 0; None if it detects none.

    A shift s pairs source line i with target line i + s. The lengths are vectors of lines; `ratio` is the number of
    target characters per source character.
    """
    few, difference = min(len(source), len(target)), len(target) - len(source)
    aligned = _costs(source[:few], target[:few], ratio)
    shifts = sorted({*range(-LARGEST_SHIFT, LARGEST_SHIFT + 1), difference} - {0}, key=abs)
    # by chance the best of N lines and shifts gains about log N nats
    bound = CERTAIN + np.log(few * len(shifts))
    detected: list[tuple[int, int]] = []  # (line of the detection, line of the break)
    for shift in shifts:
        shifted_source, shifted_target = source[max(0, -shift) :], target[max(0, shift) :]
        paired = min(len(shifted_source), len(shifted_target), few)
        gains = aligned[:paired] - _costs(shifted_source[:paired], shifted_target[:paired], ratio)
        sums = np.concatenate([[0.0], np.cumsum(gains)])
        above = np.flatnonzero(sums - np.minimum.accumulate(sums) > bound)
        if len(above):
            detected.append((int(above[0]), int(np.argmin(sums[: above[0]]))))
    return min(detected)[1] if detected else None


def _single_break(source: np.ndarray, target: np.ndarray, ratio: float) -> int:
    """The line, from 0, of the cheapest break: lines after it are shifted so that both files end together.

    It is the end of the shorter file, unless another line costs less by more than `LIKELY` nats. The arguments are
    those of `_certain_break`.
    """
    few = min(len(source), len(target))
    ahead, behind = _costs(source[:few], target[:few], ratio), _costs(source[-few:], target[-few:], ratio)
    before = np.concatenate([[0.0], np.cumsum(ahead)])
    after = np.concatenate([np.cumsum(behind[::-1])[::-1], [0.0]])
    costs = before + after
    return int(np.argmin(costs)) if costs[-1] - costs.min() > LIKELY else few


def _costs(source: np.ndarray, target: np.ndarray, ratio: float) -> np.ndarray:
    """-log 2 (1 - Φ(|δ|)) of pairs of lengths, in nats, at most `LARGEST_COST`; all are vectors of lines.

    `ratio` as in `_certain_break`.
    """
    mean = np.maximum((source + target / ratio) / 2, 0.5)  # two empty lines fit
    deviation = np.abs(target - source * ratio) / np.sqrt(mean * VARIANCE)
    tail = torch.special.log_ndtr(torch.from_numpy(-deviation)).numpy()
    return np.minimum(LARGEST_COST, -tail - np.log(2))
