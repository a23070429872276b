"""Positional encodings: they change queries and keys by their positions, before the score compares them."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from regard.base.checks import Constant, PositiveConstant, Size, checked
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import at_least_float32, has_numbers, to_device, widest_float, without_transforms
from regard.base.spans import Spans
from regard.pieces.piece import Piece


class Encoding(Piece):
    """Base of all positional encodings: `encode` adds its position to each vector, or rotates the vector by it.

    >>> import torch, regard as rg
    >>> class Count(rg.encodings.Encoding):
    ...     def encode(self, x, positions):
    ...         return x + positions[:, None]
    >>> Count().encode(torch.zeros(1, 1, 3, 1), torch.arange(4, 7)).flatten()
    tensor([4., 5., 6.])
    """

    @abstractmethod
    def encode(self, x: Tensor, positions: Tensor) -> Tensor:
        """(B, heads, n, D) and their positions (n,) -> (B, heads, n, D)."""

    def encode_query(self, x: Tensor, positions: Tensor) -> Tensor:
        """`encode` for queries, if it differs from that for keys: (B, H, n, D), (n,) -> (B, H, n, D')."""
        return self.encode(x, positions)

    def encode_key(self, x: Tensor, positions: Tensor) -> Tensor:
        """`encode` for keys, if it differs from that for queries: (B, G, n, D), (n,) -> (B, G, n, D')."""
        return self.encode(x, positions)

    def encode_both(self, query: Tensor, key: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """Queries and keys of a call, each encoded at its positions.

        An encoding with `needs` gets the tensors that it names as further arguments, here only.
        """
        self.check(positions.queries(query.shape[2]) | positions.keys)
        at = positions.query(slice(0, query.shape[2]), query.device), positions.key(key.device)
        return self.encode_query(query, at[0]), self.encode_key(key, at[1])

    def check(self, positions: Spans) -> None:
        """Refuse positions that the encoding does not have. `encode` does not check: it would wait for a device."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """The learned tensors: none, unless the encoding is also an `nn.Module`.

        >>> import regard as rg
        >>> both = rg.encodings.Sinusoidal(), rg.encodings.LearnedPositions(512, 64)
        >>> [sum(p.numel() for p in x.parameters()) for x in both]
        [0, 32768]
        """
        return nn.Module.parameters(self) if isinstance(self, nn.Module) else iter(())


def angles(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Tensor:
    """position x frequency without whole turns, in radians: integers (n,), frequencies (m,) on the host -> (n, m).

    Angles are integers in units of 2^-64 of a turn. Integers of 64 bits overflow exactly where angles wrap around, so
    large positions are as precise as small ones, even in float32, the widest dtype of some devices.
    """
    return angles_of_pairs(positions[:, None], frequencies, dtype)


def angles_of_pairs(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Tensor:
    """The same for positions that may differ between pairs: integers (..., n, m) or (..., n, 1) -> (..., n, m)."""
    if positions.is_floating_point():
        raise RegardError(
            f"positions: they must be integers, got {positions.dtype}. "
            "To halve positions use RoPE(head_dim, scaling=LinearScaling(2.0))."
        )
    steps = to_device(turns_of(frequencies), positions.device)
    return (positions * steps).to(dtype) * (2 * math.pi / 2.0**64)


def turns_of(frequencies: Tensor) -> Tensor:
    """Frequencies as integers in units of 2^-64 of a turn; whole turns are left out."""
    turns = frequencies.to(torch.float64) / (2 * math.pi)
    return ((turns - turns.round()) * 2.0**64).clamp_max(2.0**63 - 1024).long()  # the greatest double below 2^63


#: Rotates vectors (B, heads, n, D) by positions (n,); None where it cannot. The third argument returns `turns_of` the
#: frequencies, the fourth is `interleaved`.
Rotation = Callable[[Tensor, Tensor, Callable[[], Tensor], bool], Tensor | None]
_rotation: Rotation | None = None


def rotate_by(rotation: Rotation) -> None:
    """Use a faster rotation where it can run: the compiled kernels, of a layer above, are passed in here."""
    global _rotation
    _rotation = rotation


class Scaling(Piece):
    """Base of all scalings: how RoPE's frequencies change for texts longer than those of training.

    A scaling with a `magnitude` also multiplies the rotated channels of queries and keys by this number.

    >>> import regard as rg
    >>> class Halved(rg.encodings.Scaling):
    ...     def __call__(self, frequencies):
    ...         return frequencies / 2
    >>> rg.RoPE(4).frequencies().tolist(), rg.RoPE(4, scaling=Halved()).frequencies().tolist()
    ([1.0, 0.01], [0.5, 0.005])
    """

    magnitude: float = 1.0

    @abstractmethod
    def __call__(self, frequencies: Tensor) -> Tensor:
        """The angles of each pair of channels for one position, (D / 2,), from those without a scaling."""


@checked
@dataclass(frozen=True)
class LinearScaling(Scaling):
    """Position interpolation: positions divided by `factor` (Chen et al. 2023, arXiv:2306.15595).

    >>> import torch, regard as rg
    >>> x = torch.randn(1, 1, 2, 8)
    >>> scaled = rg.RoPE(8, scaling=rg.encodings.LinearScaling(4.0)).encode(x, torch.tensor([40, 80]))
    >>> torch.allclose(scaled, rg.RoPE(8).encode(x, torch.tensor([10, 20])))
    True
    """

    factor: PositiveConstant

    def __call__(self, frequencies: Tensor) -> Tensor:
        return frequencies / self.factor


@checked
@dataclass(frozen=True)
class NTKScaling(Scaling):
    """A greater base: the lowest frequency is divided by `factor`, the highest does not change ("NTK-aware", 2023).

    "Dynamic NTK" takes the factor from the length of the text: `NTKScaling.for_length`.

    >>> import torch, regard as rg
    >>> frequencies = torch.tensor([1.0, 0.1, 0.01])
    >>> rg.encodings.NTKScaling(4.0)(frequencies) / frequencies  # 4^0, 4^-0.5, 4^-1
    tensor([1.0000, 0.5000, 0.2500])
    """

    factor: PositiveConstant

    @classmethod
    def for_length(cls, length: Size, trained_length: Size, factor: Constant = 1.0) -> NTKScaling:
        """Dynamic NTK: the factor is factor length / trained_length - (factor - 1), and 1 up to the trained length.

        transformers computes it again at each call, from the greatest position so far. Then one token is rotated
        differently in a long text than in a short one, and keys in a cache keep their old rotation. Here the length is
        given once.

        >>> import regard as rg
        >>> [rg.encodings.NTKScaling.for_length(n, trained_length=64, factor=2.0).factor for n in (10, 64, 128)]
        [1.0, 1.0, 3.0]
        """
        return cls(factor * max(length, trained_length) / trained_length - (factor - 1))

    def __call__(self, frequencies: Tensor) -> Tensor:
        n = len(frequencies)
        steps = torch.arange(n, dtype=frequencies.dtype, device=frequencies.device) / max(n - 1, 1)
        return frequencies * self.factor**-steps


@checked
@dataclass(frozen=True)
class Llama3Scaling(Scaling):
    """Low frequencies are divided by `factor`, high ones do not change (Llama 3.1, arXiv:2407.21783).

    A low frequency makes at most `low` turns in `trained_length` positions, a high one at least `high`; a linear ramp
    is between them.

    >>> import torch, regard as rg
    >>> frequencies = torch.tensor([1.0, 1e-5])  # 1,304 and 0.013 turns in the trained length
    >>> rg.encodings.Llama3Scaling(factor=8.0)(frequencies) / frequencies
    tensor([1.0000, 0.1250])
    """

    factor: PositiveConstant = 8.0
    low: Constant = 1.0
    high: Constant = 4.0
    trained_length: Size = 8192

    def __call__(self, frequencies: Tensor) -> Tensor:
        turns = self.trained_length * frequencies / (2 * math.pi)
        keep = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequencies * (keep + (1 - keep) / self.factor)


@checked
@dataclass(frozen=True)
class RoPE(Encoding):
    """Rotate pairs of channels by angles that grow with position (Su et al. 2021, arXiv:2104.09864).

    Channel pair m is rotated by position * base^(-2m / D), so q_i . k_j depends on j - i only. The pairs are
    (m, m + D/2) as in Llama and GPT-NeoX, or (2m, 2m + 1) with `interleaved=True` as in the paper and GPT-J. A model
    needs the order that it was trained with. Channels after the first `head_dim` do not change (partial rotation).

    >>> import torch, regard as rg
    >>> q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    >>> def score(i, j):
    ...     return rg.RoPE(8).encode(q, torch.tensor([i])) @ rg.RoPE(8).encode(k, torch.tensor([j])).mT
    >>> torch.allclose(score(3, 1), score(1003, 1001))
    True
    """

    head_dim: Size
    base: PositiveConstant = 10_000.0
    interleaved: bool = False
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        if self.head_dim % 2:
            raise RegardError(f"RoPE(head_dim={self.head_dim}): channels turn in pairs, so the width must be even.")

    def frequencies(self) -> Tensor:
        """The angle of each pair for one position, (D / 2,), float64 on the host."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device="cpu") / self.head_dim
        frequencies = self.base**-exponents
        if self.scaling is None:
            return frequencies
        scaled = self.scaling(frequencies)
        if scaled.shape != frequencies.shape:
            raise RegardError(
                f"RoPE(head_dim={self.head_dim}): {type(self.scaling).__name__} changed frequencies of shape "
                f"{tuple(frequencies.shape)} to {tuple(scaled.shape)}. A scaling returns one frequency for each."
            )
        return scaled.to("cpu")

    def encode(self, x: Tensor, positions: Tensor) -> Tensor:
        if x.shape[-1] < self.head_dim:
            raise RegardError(
                f"RoPE(head_dim={self.head_dim}): the vectors have only {x.shape[-1]} channels. Use a smaller width."
            )
        fast = None if _rotation is None else _rotation(x, positions, self._turns, self.interleaved)
        rotated = self._encoded(x, positions) if fast is None else fast
        magnitude = 1.0 if self.scaling is None else self.scaling.magnitude
        if magnitude == 1:
            return rotated
        return torch.cat((rotated[..., : self.head_dim] * magnitude, rotated[..., self.head_dim :]), -1)

    def _turns(self) -> Tensor:
        """`turns_of` the frequencies; kept for later calls if no code of the user computes them."""
        is_kept = self.scaling is None or type(self.scaling).__module__.startswith("regard.")  # others may change
        return _kept_turns(self) if is_kept else turns_of(self.frequencies())

    def _encoded(self, x: Tensor, positions: Tensor) -> Tensor:
        """The first `head_dim` channels rotated, by operations of torch; without the magnitude of a scaling."""
        wide = at_least_float32(x)
        angle = angles(positions, self.frequencies(), wide.dtype)
        rotated = rotated_pairs(wide[..., : self.head_dim], angle, self.interleaved).to(x.dtype)
        return torch.cat((rotated, x[..., self.head_dim :]), -1) if self.head_dim < x.shape[-1] else rotated


def rotated_pairs(x: Tensor, angle: Tensor, interleaved: bool) -> Tensor:
    """Pairs of channels rotated by their angles: (..., n, D), (..., n, D / 2) -> (..., n, D).

    Pairs are neighbors if `interleaved`, else channels of the two halves.
    """
    cos, sin = angle.cos(), angle.sin()
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


@lru_cache(maxsize=32)
def _kept_turns(rope: RoPE) -> Tensor:
    """`turns_of` the frequencies of a RoPE, computed once for all equal ones."""
    with without_transforms():
        return turns_of(rope.frequencies())


@checked
@dataclass(frozen=True, kw_only=True)
class Sinusoidal(Encoding):
    """Add sin and cos of position / 10000^(2m / D) (Vaswani et al. 2017, arXiv:1706.03762, section 3.5).

    Channel 2m is the sine, channel 2m + 1 the cosine; low channels have high frequencies. As the position of an
    `Attention` they are added to queries and keys; for embeddings, `table` returns them.

    >>> import torch, regard as rg
    >>> rg.encodings.Sinusoidal().table(torch.tensor([0]), 4).tolist()
    [[0.0, 1.0, 0.0, 1.0]]
    >>> rg.encodings.Sinusoidal().encode(torch.zeros(1, 1, 5, 8), torch.arange(5)).shape
    torch.Size([1, 1, 5, 8])
    """

    base: PositiveConstant = 10_000.0

    @checked
    def table(self, positions: Tensor | int, embed_dim: Size, dtype: torch.dtype | None = None) -> Tensor:
        """(n,) positions -> (n, embed_dim), rounded once to `dtype`; by default to torch's default dtype.

        A number n stands for the positions 0 to n - 1.

        >>> import torch, regard as rg
        >>> x = torch.randn(2, 5, 8)
        >>> torch.nn.Linear(8, 8)(x + rg.encodings.Sinusoidal().table(torch.arange(5), 8)).shape
        torch.Size([2, 5, 8])
        """
        positions = torch.arange(positions) if isinstance(positions, int) else positions
        return self._sines(positions, embed_dim, widest_float(positions.device)).to(dtype or torch.get_default_dtype())

    def _sines(self, positions: Tensor, embed_dim: int, dtype: torch.dtype) -> Tensor:
        """The table with angles, sines and cosines of `dtype`."""
        m = torch.arange(0, embed_dim, 2, dtype=torch.float64, device="cpu")
        angle = angles(positions, self.base ** (-m / embed_dim), dtype)
        return torch.stack((angle.sin(), angle.cos()), -1).flatten(-2)[:, :embed_dim]

    def encode(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self._sines(positions, x.shape[-1], at_least_float32(x).dtype).to(x.dtype)


@checked
class LearnedPositions(nn.Module, Encoding):
    """Add a learned vector for each position 0 ... length - 1 (Gehring et al. 2017, arXiv:1705.03122).

    >>> import torch, regard as rg
    >>> positions = rg.encodings.LearnedPositions(length=16, embed_dim=4)
    >>> encoded = positions.encode(torch.zeros(1, 1, 2, 4), torch.tensor([3, 7]))
    >>> torch.equal(encoded[0, 0], positions.table[[3, 7]])
    True
    """

    def __init__(self, length: Size, embed_dim: Size) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(length, embed_dim) * 0.02)

    def encode(self, x: Tensor, positions: Tensor) -> Tensor:
        embed_dim = self.table.shape[1]
        if x.shape[-1] != embed_dim:
            raise RegardError(
                f"LearnedPositions: made for width {embed_dim}, got {x.shape[-1]}. Create it with "
                f"embed_dim={x.shape[-1]}."
            )
        if positions.device.type == "cpu" and len(positions) and has_numbers(positions):
            self.check(Spans(((int(positions.min()), int(positions.max()) + 1),)))
        return x + self.table[positions].to(x.dtype)

    def check(self, positions: Spans) -> None:
        length = len(self.table)
        if not Spans(((0, length),)).covers(positions):
            ((first, stop),) = positions.hull()
            raise RegardError(
                f"LearnedPositions: has positions 0 to {length - 1}, this call needs {first} to {stop - 1}. "
                "Make a longer table, or use Sinusoidal or RoPE, which have no greatest position."
            )

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.table.shape))
