"""Convolution filters: a number for each distance, which multiplies the score of a query with an earlier key."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from regard.base.checks import Size, checked
from regard.base.errors import RegardError
from regard.base.shapes import Sizes
from regard.pieces.bias import Bias, by_distance, check_heads
from regard.pieces.grid import Grid, at


class ConvolutionFilter(nn.Module, Bias):
    """s_ij h_(i-j), and 0 for later keys and for distances of K and more: the filter of a causal convolution.

    A filter computes its numbers h in `taps`, (H, K). With `Unnormalized` the weights are w_ij = q_i . k_j h_(i-j), so
    the output is a convolution between two gates: q_i sum_j h_(i-j) k_j v_j. Its heads are channels, of width 1. A
    plain convolution has queries and keys of ones. The engine `convolution` sums over distances, or uses Fourier
    transforms if the filter is long.

    >>> import torch, regard as rg
    >>> class Halving(rg.transitions.ConvolutionFilter):
    ...     def taps(self):
    ...         return 0.5 ** torch.arange(3.0)[None]  # one head: 1, 1/2, 1/4
    >>> one = torch.ones(1, 1, 5, 1)
    >>> unnormalized = rg.normalizers.Unnormalized()
    >>> attention = rg.Attention(rg.Dot(1.0), bias=Halving(), mask=rg.causal(), normalizer=unnormalized)
    >>> attention(one, one, one).weights[0, 0, 4]
    tensor([0.0000, 0.0000, 0.2500, 0.5000, 1.0000])
    """

    @abstractmethod
    def taps(self) -> Tensor:
        """The numbers h_0, ..., h_(K-1) of each head, (H, K); h_0 is that of the token itself."""

    def transform(self, score: Tensor, grid: Grid, rows: Tensor | None, cols: Tensor | None) -> Tensor:
        taps = at(type(self).__name__, "heads", self.taps(), 0, grid.head).to(score.dtype)
        return score * by_distance(grid, lambda distance: _at(taps, -distance))

    def check(self, sizes: Sizes) -> None:
        name, taps = type(self).__name__, self.taps()
        if not isinstance(taps, Tensor) or taps.ndim != 2:
            given = tuple(taps.shape) if isinstance(taps, Tensor) else type(taps).__name__
            raise RegardError(
                f"{name}.taps: must return numbers (heads, K), one for each distance from 0 to K - 1; got {given}."
            )
        check_heads(name, taps.shape[0], sizes)


def _at(taps: Tensor, behind: Tensor) -> Tensor:
    """The number of each distance i - j: taps (H, K) and distances (...) -> (H, ...); 0 below 0 and above K - 1."""
    last = taps.shape[1] - 1
    return taps[:, behind.clamp(0, last)] * ((behind >= 0) & (behind <= last))


@checked
class Taps(ConvolutionFilter):
    """A filter of given numbers (H, K); an `nn.Parameter` is learned. Short convolutions have K = 3 or 4.

    In LFM2 (Liquid AI 2025, arXiv:2511.23404) and in the blocks of Hyena (Poli et al. 2023, arXiv:2302.10866) queries
    and keys are gates. torch's `conv1d` has its numbers in the other order: the last is that of the token itself.

    >>> import torch, regard as rg
    >>> one, taps = torch.ones(1, 1, 3, 1), torch.tensor([[1.0, 0.5]])
    >>> filtered = {"bias": rg.transitions.Taps(taps), "normalizer": rg.normalizers.Unnormalized()}
    >>> attention = rg.Attention(rg.Dot(1.0), mask=rg.causal(), **filtered)
    >>> attention(2 * one, one, one).weights[0, 0]
    tensor([[2., 0., 0.],
            [1., 2., 0.],
            [0., 1., 2.]])
    """

    def __init__(self, numbers: Tensor) -> None:
        super().__init__()
        if numbers.ndim != 2 or not numbers.shape[1] or not numbers.is_floating_point():
            raise RegardError(
                "Taps: needs floating-point numbers (heads, K), one for each distance from 0 to K - 1; got "
                f"{numbers.dtype} of shape {tuple(numbers.shape)}."
            )
        if isinstance(numbers, nn.Parameter):
            self.numbers = numbers
        else:
            self.register_buffer("numbers", numbers)

    @staticmethod
    @checked
    def random(num_heads: Size, size: Size) -> Taps:
        """Learned numbers that begin within 1 / sqrt(K) of 0, as those of torch's `conv1d`."""
        return Taps(nn.Parameter(torch.empty(num_heads, size).uniform_(-1, 1) * size**-0.5))

    def taps(self) -> Tensor:
        return self.numbers

    def extra_repr(self) -> str:
        return f"{self.numbers.shape[0]} heads, {self.numbers.shape[1]} numbers"


@checked
class TokenShift(ConvolutionFilter):
    """h_0 = m and h_1 = 1 - m: each head mixes a token with the token before it (RWKV, Peng et al. 2023).

    The share m (H,) is learned and begins at 1/2. RWKV (arXiv:2305.13048, eq. 11-13) mixes the inputs of its layers so,
    one channel a head; before the first token are zeros. RWKV-6 computes m from the token, which is no convolution.

    >>> import torch, regard as rg
    >>> one, shift = torch.ones(1, 1, 3, 1), rg.transitions.TokenShift(num_heads=1)
    >>> shift.share.data[:] = 0.75
    >>> attention = rg.Attention(rg.Dot(1.0), bias=shift, mask=rg.causal(), normalizer=rg.normalizers.Unnormalized())
    >>> attention(one, one, one).weights[0, 0, 2].tolist()
    [0.0, 0.25, 0.75]
    """

    def __init__(self, num_heads: Size) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.full((num_heads,), 0.5))

    def taps(self) -> Tensor:
        return torch.stack((self.share, 1 - self.share), 1)

    def extra_repr(self) -> str:
        return str(len(self.share))
