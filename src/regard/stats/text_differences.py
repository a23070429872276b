"""`differences` compares the heads of one model on several texts; the heads that change most come first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.stats.text_reading import TextReading

#: Statistics between 0 and 1. The others grow with the length of a text, so texts cannot be compared by them.
SHARES = ("evenness", "special", "previous", "next", "itself")


@dataclass(frozen=True)
class TextDifference:
    """One head: the statistic that differs most between the texts, its value on each text, and their range.

    >>> import torch, regard as rg
    >>> from regard.stats.text_differences import text_differences
    >>> from regard.types import TextReading
    >>> q, k = 20 * torch.eye(4).expand(1, 1, 4, 4), torch.eye(4).expand(1, 1, 4, 4)
    >>> maps = [rg.Attention()(query, k, k).weights for query in (q, q.flip(2))]
    >>> (head,) = text_differences([TextReading.of("", {"layers.0": weights}) for weights in maps])
    >>> head.statistic, [round(value) for value in head.values], round(head.spread)
    ('itself', [1, 0], 1)
    """

    layer: int
    head: int
    statistic: str
    values: tuple[float, ...]
    spread: float


@checked
def text_differences(readings: Sequence[TextReading]) -> list[TextDifference]:
    """One `TextDifference` for every head, the largest spread first. All readings must be of the same layers of one
    model.

    >>> import torch, regard as rg
    >>> from regard.types import TextReading
    >>> x = torch.zeros(1, 1, 3, 4)
    >>> reading = TextReading.of("", {"layers.0": rg.Attention()(x, x, x).weights})
    >>> [head.spread for head in text_differences([reading, reading])]
    [0.0]
    """
    if not readings or len({len(reading.profile.layers) for reading in readings}) > 1:
        raise RegardError(
            "differences: give at least one reading. All readings must be of the same layers of one model."
        )
    head_differences = []
    for layers in zip(*(reading.profile.layers for reading in readings), strict=True):
        for head in range(layers[0].num_heads):
            values = torch.stack([torch.stack([layer.values[name][head] for name in SHARES]) for layer in layers])
            spread = values.amax(0) - values.amin(0)
            largest = int(spread.argmax())
            numbers = tuple(values[:, largest].tolist())
            head_differences.append(
                TextDifference(layers[0].number, head, SHARES[largest], numbers, float(spread[largest]))
            )
    return sorted(head_differences, key=lambda difference: -difference.spread)
