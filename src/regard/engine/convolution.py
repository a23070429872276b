"""The engine `convolution`: sums over distances, or products of Fourier transforms."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.base.shapes import at_least_float32
from regard.engine.problem import Cost, Engine, Problem, Result, empty_result
from regard.pieces.convolution import ConvolutionFilter
from regard.pieces.piece import computes_as
from regard.pieces.score import dot_scale, scale_of_heads
from regard.pieces.transition import with_heads

#: Up to `FEW` taps one sum for each distance is fastest, above `MANY` Fourier transforms are, between them conv1d.
FEW, MANY = 4, 32
#: The most products k_d v_e of a token: all are convolved.
MOST_PRODUCTS = 256


class ConvolutionEngine(Engine):
    """o_i = sum_d q_id (h * k_d v)_i."""

    name = "convolution"
    description = "convolves keys times values with the filter, in O(n) memory"

    def _refusal(self, problem: Problem) -> str | None:
        attention, query = problem.attention, problem.prepared.query
        is_filter = len(attention.bias) == 1 and computes_as(attention.bias[0], ConvolutionFilter, "transform")
        if not is_filter or not attention.normalizer.is_linear or attention.normalizer.row_sum is not None:
            return "it needs one ConvolutionFilter, such as Taps, and the Unnormalized normalizer"
        if dot_scale(attention.score, query.shape[-1]) is None:
            return f"{type(attention.score).__name__} is no dot product"
        if attention.mask is not None and not attention.mask.relative:
            return f"its mask must depend on the distance only, and {attention.mask!r} does not"
        if problem.dropout:
            return "it computes no single weights, which dropout would drop"
        if len(problem.positions.keys.intervals) != 1:
            return "the keys have gaps between their positions"
        if (count := query.shape[-1] * problem.sizes.E) > MOST_PRODUCTS:
            return f"it convolves at most {MOST_PRODUCTS} products of key and value, and widths give {count}"
        return None

    def run(self, problem: Problem) -> Result:
        s, prepared = problem.sizes, problem.prepared
        # every product of a key channel and a value channel is convolved; then each query weights the sums
        first, num_taps = _first_query(problem), _num_taps(problem)
        if first + s.I <= 0 or first - num_taps + 1 >= s.J:  # all keys are later, or further away than the filter
            return empty_result(problem)
        query, key, value = (at_least_float32(t) for t in (prepared.query, prepared.key, problem.value))
        products = with_heads((key[..., None] * value[..., None, :]).flatten(3), s.H)  # (B, H, J, D E)
        taps = _taps(problem, num_taps).to(products.dtype)
        if num_taps <= FEW:
            convolved = _by_distances(products, taps, first, s.I)
        else:
            # the tokens from K - 1 before the first query to the last one; a negative padding cuts
            reached = F.pad(products, (0, 0, num_taps - 1 - first, first + s.I - s.J))
            convolved = (_by_channels if num_taps <= MANY else _by_transforms)(reached, taps)
        scale = scale_of_heads(problem.attention.score, query, problem.grid)
        assert scale is not None, "the refusal is None"
        query = query if scale == 1.0 else query * scale
        if (width := query.shape[-1]) == 1:
            output = query * convolved
        else:
            output = (query[..., None] * convolved.unflatten(3, (width, s.E))).sum(3)
        # `Unnormalized` reads no number of its scores, only their shape: any (B, H, I, ...) will do
        row_statistic = problem.attention.normalizer.row_statistic(query.detach(), problem.grid.key)
        return Result(output.to(problem.value.dtype), row_statistic)

    def cost(self, problem: Problem) -> Cost:
        """Each of the D E products of channels is convolved: directly, or by three Fourier transforms."""
        s, num_taps = problem.sizes, _num_taps(problem)
        length, channels = s.I + num_taps - 1, s.B * s.H * s.E * problem.prepared.query.shape[-1]
        operations = 2 * s.I * num_taps if num_taps <= MANY else 10 * length * length.bit_length()
        return Cost(0, channels * (operations + 3 * length), 4 * channels * length * (2 if num_taps <= MANY else 6))


def _first_query(problem: Problem) -> int:
    """The index of the key with the position of the first query; below 0 or beyond the keys if no key has it."""
    return problem.positions.start - problem.positions.keys.intervals[0][0]


def _num_taps(problem: Problem) -> int:
    """How many taps some query may use."""
    piece = problem.attention.bias[0]
    count = problem.planned("taps", lambda problem: piece.taps().shape[1])
    return max(1, min(count, _first_query(problem) + problem.sizes.I))


def _taps(problem: Problem, num_taps: int) -> Tensor:
    """The first `num_taps` numbers of the filter, (H, K), 0 where the mask forbids the distance."""
    taps, mask = problem.attention.bias[0].taps()[:, :num_taps], problem.attention.mask
    if mask is None:
        return taps
    allowed = mask.allowed(problem.grid.line(range(1 - num_taps, 1)))[0, :, 0]  # j - i from 1 - K to 0
    return taps * allowed.flip(-1)


def _by_distances(x: Tensor, taps: Tensor, first: int, num_queries: int) -> Tensor:
    """sum_r h_r x_(i-r) for I tokens i from `first` on: (B, H, J, C) and (H, K) -> (B, H, I, C); x is 0 outside.

    `taps` are the h_r, and `num_queries` is I.
    """
    out = x.new_zeros(*x.shape[:2], num_queries, x.shape[3])
    for r in range(taps.shape[1]):
        start, stop = max(0, r - first), min(num_queries, x.shape[2] + r - first)
        if start < stop:
            out[:, :, start:stop].addcmul_(x[:, :, start + first - r : stop + first - r], taps[:, r, None, None])
    return out


def _by_channels(x: Tensor, taps: Tensor) -> Tensor:
    """The same by conv1d, for I + K - 1 tokens (B, H, I + K - 1, C) of which the last I are queries."""
    B, H, length, C = x.shape
    weight = taps.flip(-1).repeat_interleave(C, 0)[:, None]
    out = F.conv1d(x.transpose(2, 3).reshape(B, H * C, length), weight, groups=H * C)
    return out.view(B, H, C, -1).transpose(2, 3)


def _by_transforms(x: Tensor, taps: Tensor) -> Tensor:
    """The same. A circle of I + K - 1 tokens is enough: only the first K - 1 outputs see its other end."""
    (_, _, length, _), K = x.shape, taps.shape[1]
    circle = _fast_length(length)
    spectrum = torch.fft.rfft(taps, circle)[:, None] * torch.fft.rfft(x.transpose(2, 3), circle)
    return torch.fft.irfft(spectrum, circle)[..., K - 1 : length].transpose(2, 3)


def _fast_length(length: int) -> int:
    """The least number of at least `length` without prime factors above 5.

    >>> [_fast_length(n) for n in (7, 11, 1025)]
    [8, 12, 1080]
    """
    while True:
        rest = length
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return length
        length += 1
