"""Scalings of RoPE's frequencies that treat each pair of channels differently, as models of today use them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from regard.base.checks import AtLeast, Constant, Number, PositiveConstant, Size, checked
from regard.base.errors import RegardError
from regard.pieces.position import Scaling


@checked
@dataclass(frozen=True)
class YaRNScaling(Scaling):
    """Low frequencies are divided by `factor`, with a ramp over the pairs (Peng et al. 2023, arXiv:2309.00071).

    A pair that makes at least `fast` turns in `trained_length` positions does not change, one that makes at most `slow`
    turns is divided by `factor`. Between them the share grows linearly with the number of the pair; Llama 3 has a ramp
    over turns instead. Rotated channels are multiplied by 0.1 log(factor) + 1, so scores by its square, unless
    `attention_factor` is given. `is_rounded=False` does not round the ends of the ramp to whole pairs (gpt-oss).

    DeepSeek V3 multiplies the scores by a further factor, which it computes from `mscale_all_dim`: `Dot(scale=...)`.

    >>> import torch, regard as rg
    >>> frequencies = rg.RoPE(16).frequencies()
    >>> rg.encodings.YaRNScaling(4.0, trained_length=4096)(frequencies) / frequencies
    tensor([1.0000, 1.0000, 1.0000, 0.8125, 0.6250, 0.4375, 0.2500, 0.2500],
           dtype=torch.float64)
    >>> round(rg.encodings.YaRNScaling(4.0, trained_length=4096).magnitude, 4)
    1.1386
    """

    factor: PositiveConstant
    trained_length: Size
    fast: PositiveConstant = 32.0
    slow: PositiveConstant = 1.0
    attention_factor: Number | None = None
    is_rounded: bool = True

    @property
    def magnitude(self) -> float:  # type: ignore[override]
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0

    def __call__(self, frequencies: Tensor) -> Tensor:
        """A share `ramp` of each frequency is divided by the factor: 0 up to the pair `first`, 1 from `last` on."""
        n = len(frequencies)
        if n < 2:
            return frequencies
        step = math.log(float(frequencies[0] / frequencies[1]))

        def pair_of(turns: float) -> float:
            """The number of the pair, as a fraction, that makes so many turns in the trained length."""
            return math.log(self.trained_length * float(frequencies[0]) / (2 * math.pi * turns)) / step

        first, last = pair_of(self.fast), pair_of(self.slow)
        if self.is_rounded:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * n - 1)  # the authors' code bounds it by the width, not the pairs
        numbers = torch.arange(n, dtype=frequencies.dtype, device=frequencies.device)
        ramp = ((numbers - first) / max(last - first, 0.001)).clamp(0, 1)
        return frequencies * (1 - ramp) + frequencies / self.factor * ramp


@checked
@dataclass(frozen=True)
class LongRoPEScaling(Scaling):
    """Each frequency is divided by a factor of its own, found by a search (Ding et al. 2024, arXiv:2402.13753).

    `factors` has one number for each pair. With `extension`, the longest length divided by the trained length, the
    rotated channels are multiplied by sqrt(1 + log(extension) / log(trained_length)).

    Phi-3 has two lists of factors, for texts up to the trained length and for longer ones. transformers chooses at each
    call, and does not rotate the keys of a cache again when a text passes that length. Here you give the list.

    >>> import torch, regard as rg
    >>> scaling = rg.encodings.LongRoPEScaling((1.0, 2.0), extension=4.0, trained_length=64)
    >>> rg.RoPE(4, scaling=scaling).frequencies().tolist(), round(scaling.magnitude, 4)
    ([1.0, 0.005], 1.1547)
    """

    factors: Sequence[PositiveConstant]
    extension: Constant = 1.0
    trained_length: Annotated[int, AtLeast(2)] = 4096

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", tuple(map(float, self.factors)))

    @property
    def magnitude(self) -> float:  # type: ignore[override]
        return math.sqrt(1 + math.log(max(self.extension, 1)) / math.log(self.trained_length))

    def __call__(self, frequencies: Tensor) -> Tensor:
        if len(self.factors) != len(frequencies):
            raise RegardError(
                f"LongRoPEScaling: {len(self.factors)} factors for {len(frequencies)} pairs of channels. Give one for "
                "each pair."
            )
        return frequencies / torch.tensor(self.factors, dtype=frequencies.dtype, device=frequencies.device)


@checked
@dataclass(frozen=True)
class ProportionalScaling(Scaling):
    """Only the first pairs rotate, a `share` of all, with the frequencies of the whole width (Gemma 4).

    The usual partial rotation, `RoPE(head_dim)` of fewer channels, has the frequencies of the smaller width.

    >>> import torch, regard as rg
    >>> rg.RoPE(8, scaling=rg.encodings.ProportionalScaling(0.5)).frequencies().tolist()
    [1.0, 0.1, 0.0, 0.0]
    """

    share: Constant
    factor: PositiveConstant = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise RegardError(f"ProportionalScaling(share={self.share}): the share of rotated pairs is in (0, 1].")

    def __call__(self, frequencies: Tensor) -> Tensor:
        rotates = torch.arange(len(frequencies), device=frequencies.device) < int(self.share * len(frequencies))
        return torch.where(rotates, frequencies / self.factor, 0.0)
