"""Gated convolutions beside torch's conv1d and Fourier transforms, in the layout of their models."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

import regard as rg
from benchmarks.case import Aim, BenchSettings, Case, Side, random_inputs

#: Channels and tokens: those of LFM2-1.2B, and of a small Hyena.
CHANNELS, LENGTH = 2048, 1024
LONG_CHANNELS, LONG_LENGTH = 64, 8192


def cases(setting: BenchSettings) -> Iterator[Case]:
    """A short convolution of three tokens, and one as long as the text."""
    if setting.device == "cuda":
        return
    yield Case(
        group="convolutions",
        work=f"short_convolution, n = {LENGTH:,}, {CHANNELS:,} channels, forward",
        inputs=setting.inputs(*[(1, CHANNELS, LENGTH, 1)] * 3),
        mechanism="short_convolution",
        ours=short,
        peers=(Side("conv1d between gates, as in LFM2", short_in_torch, (Aim("time", 1.5),)),),
    )
    yield Case(
        group="convolutions",
        work=f"long_convolution, n = {LONG_LENGTH:,}, {LONG_CHANNELS} channels, forward",
        inputs=setting.inputs(*[(1, LONG_CHANNELS, LONG_LENGTH, 1)] * 3),
        mechanism="long_convolution",
        ours=long,
        peers=(Side("rfft, zero-padded to 2 n", long_in_torch, (Aim("time", 1.5),)),),
    )


def taps_of(channels: int, size: int) -> Tensor:
    """The same random filter at every call; the last number is a tenth of the first."""
    (numbers,) = random_inputs(((channels, size),), "cpu", torch.float32)
    return numbers * 0.1 ** torch.linspace(0, 1, size)


def convolved(taps: Tensor) -> Callable[..., rg.types.AttentionOutput]:
    """Between two gates, by `regard.attend`."""
    mask = rg.causal() & rg.window(taps.shape[1])
    attention = rg.Attention(
        rg.Dot(1.0), bias=rg.transitions.Taps(taps), mask=mask, normalizer=rg.normalizers.Unnormalized()
    )
    return lambda q, k, v: attention(q, k, v)


def short(*inputs: Tensor) -> Callable[..., rg.types.AttentionOutput]:
    """The convolution of LFM2 by `regard.attend`."""
    return convolved(taps_of(CHANNELS, 3))


def short_in_torch(*inputs: Tensor) -> Callable[..., Tensor]:
    """The same by a depthwise conv1d."""
    weight = taps_of(CHANNELS, 3).flip(-1)[:, None]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        written = F.conv1d((k * v)[..., 0], weight, groups=CHANNELS, padding=2)[..., :LENGTH]
        return q * written[..., None]

    return run


def long(*inputs: Tensor) -> Callable[..., rg.types.AttentionOutput]:
    """The convolution of Hyena by `regard.attend`."""
    return convolved(taps_of(LONG_CHANNELS, LONG_LENGTH))


def long_in_torch(*inputs: Tensor) -> Callable[..., Tensor]:
    """The same by Fourier transforms of twice the length, as the code of Hyena does."""
    taps = taps_of(LONG_CHANNELS, LONG_LENGTH)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        size = 2 * LONG_LENGTH
        spectrum = torch.fft.rfft((k * v)[..., 0], size) * torch.fft.rfft(taps, size)
        return q * torch.fft.irfft(spectrum, size)[..., :LONG_LENGTH, None]

    return run
