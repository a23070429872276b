"""Sentence alignment by length: Gale & Church, "A Program for Aligning Sentences in Bilingual Corpora" (1993)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from regard.base.errors import RegardError

__all__ = ["PRIORS", "VARIANCE", "Bead", "align", "cost"]

#: P(match) by (sentences of the source, sentences of the target), table 5 of the paper.
PRIORS = {(1, 1): 0.89, (1, 0): 0.0099, (0, 1): 0.0099, (2, 1): 0.089, (1, 2): 0.089, (2, 2): 0.011}
#: s²: the variance of the number of target characters per source character.
VARIANCE = 6.8
#: The largest cost of a difference of lengths, the same as in the program of the paper.
LARGEST = 25.0


@dataclass(frozen=True)
class Bead:
    """Neighboring sentences of the source, and the neighboring sentences of the target that translate them."""

    source: range
    target: range


def cost(source: float, target: float, kind: tuple[int, int] = (1, 1), ratio: float = 1.0) -> float:
    """-log P(δ | match) - log P(match), for lengths l1 and l2 in characters.

    δ = (l2 - l1 c) / sqrt(m s²) is standard normal for true translations. c is the number of target characters per
    source character (`ratio`), s² = 6.8 and m = (l1 + l2 / c) / 2. The formula of the paper has m = l1; its program has
    this mean, which is also right for l1 = 0. P(δ | match) = 2 (1 - Φ(|δ|)).

    >>> round(cost(100, 100), 4) == round(-math.log(0.89), 4)
    True
    """
    mean = (source + target / ratio) / 2
    delta = abs(target - source * ratio) / math.sqrt(mean * VARIANCE) if mean else 0.0
    tail = math.erfc(delta / math.sqrt(2))
    return min(LARGEST, -math.log(tail) if tail else LARGEST) - math.log(PRIORS[kind])


def align(source: Sequence[int], target: Sequence[int], ratio: float = 1.0) -> list[Bead]:
    """The cheapest alignment of two texts, given the lengths of their sentences in characters.

    `ratio` is the number of target characters per source character.
    D(i, j) = min over kinds (a, b) of D(i - a, j - b) + the cost of a bead of the last a and b sentences.

    >>> for bead in align([20, 21, 60], [40, 62]):
    ...     print(list(bead.source), list(bead.target))
    [0, 1] [0]
    [2] [1]
    """
    if not ratio > 0:
        raise RegardError(
            f"align: ratio={ratio} must be positive: it is the number of target characters per source character."
        )
    source_ends, target_ends = [0, *accumulate(source)], [0, *accumulate(target)]
    # for the first i and the first j sentences: the least cost, and the kind of the last bead
    best: dict[tuple[int, int], tuple[float, tuple[int, int]]] = {(0, 0): (0.0, (0, 0))}
    for i in range(len(source_ends)):
        for j in range(len(target_ends)):
            options = []
            for a, b in PRIORS:
                if (i - a, j - b) in best:
                    lengths = source_ends[i] - source_ends[i - a], target_ends[j] - target_ends[j - b]
                    options.append((best[i - a, j - b][0] + cost(*lengths, (a, b), ratio), (a, b)))
            if options:
                best[i, j] = min(options)
    beads, i, j = [], len(source), len(target)
    while i or j:
        a, b = best[i, j][1]
        beads.append(Bead(range(i - a, i), range(j - b, j)))
        i, j = i - a, j - b
    return beads[::-1]
