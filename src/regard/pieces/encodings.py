"""Encodings that treat queries and keys differently: norms with learned scales, factors by position, polar vectors.

They act inside an attention, before the score. `Chain` applies several in order.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.base.checks import AtLeast, Number, PositiveConstant, Size, checked
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import at_least_float32
from regard.base.spans import Spans
from regard.pieces.call_tensors import needs_of, tensors_for
from regard.pieces.holder import HoldsPieces
from regard.pieces.position import Encoding, angles


class TwoSidedPosition(Encoding):
    """Base of encodings that differ between queries and keys. They are no encodings of embeddings.

    >>> import torch, regard as rg
    >>> rg.encodings.ScalableSoftmax(2).encode(torch.zeros(1, 2, 3, 4), torch.arange(3))
    Traceback (most recent call last):
        ...
    regard.RegardError: ScalableSoftmax encodes queries and keys differently, so it acts inside an attention:
      regard.Attention(position=ScalableSoftmax(...)).
    """

    def encode(self, x: Tensor, positions: Tensor) -> Tensor:
        name = type(self).__name__
        raise RegardError(
            f"{name} encodes queries and keys differently, so it acts inside an attention: "
            f"regard.Attention(position={name}(...))."
        )

    @abstractmethod
    def encode_query(self, x: Tensor, positions: Tensor) -> Tensor:
        """Queries (B, H, n, D) and their positions (n,) -> (B, H, n, D')."""

    @abstractmethod
    def encode_key(self, x: Tensor, positions: Tensor) -> Tensor:
        """Keys (B, G, n, D) and their positions (n,) -> (B, G, n, D')."""


class Chain(HoldsPieces, TwoSidedPosition):
    """Several encodings, in order: each encodes what the one before returns.

    >>> import torch, regard as rg
    >>> chain = rg.encodings.Chain(rg.encodings.QKNorm(8), rg.RoPE(8))  # as in Qwen 3
    >>> q = torch.randn(1, 2, 3, 8)
    >>> normed = torch.nn.functional.rms_norm(q, (8,), eps=1e-6)
    >>> torch.allclose(chain.encode_query(q, torch.arange(3)), rg.RoPE(8).encode(normed, torch.arange(3)), atol=1e-6)
    True
    """

    registered_as: ClassVar[dict[str, str]] = {"parts": "part"}

    def __init__(self, *parts: Encoding) -> None:
        super().__init__()
        wrong = [part for part in parts if not isinstance(part, Encoding)]
        if wrong or not parts:
            got = type(wrong[0]).__name__ if wrong else "none"
            raise RegardError(f"Chain(...): expected encodings, such as QKNorm(64) and RoPE(64), got {got}.")
        self.parts = parts

    def encode_query(self, x: Tensor, positions: Tensor) -> Tensor:
        for part in self.parts:
            x = part.encode_query(x, positions)
        return x

    def encode_key(self, x: Tensor, positions: Tensor) -> Tensor:
        for part in self.parts:
            x = part.encode_key(x, positions)
        return x

    @property
    def needs(self) -> Mapping[str, str]:
        """The tensors that the parts need for each call."""
        return {name: axes for part in self.parts for name, axes in needs_of(part).items()}

    def encode_both(self, query: Tensor, key: Tensor, positions: Positions, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        for part in self.parts:
            query, key = part.encode_both(query, key, positions, **tensors_for(part, tensors))
        return query, key

    def check(self, positions: Spans) -> None:
        for part in self.parts:
            part.check(positions)

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.parts))})"


@checked
class QKNorm(nn.Module, TwoSidedPosition):
    """q / rms(q) * g and k / rms(k) * g', with learned g and g': no score can explode (Henry et al. 2020).

    The paper (arXiv:2010.04245) divides by the length of the vector and learns one factor: that is `Cosine`. Models of
    today divide by the root mean square, rms(x)^2 = mean_d x_d^2 + eps, and learn a scale for each channel:

    - `QKNorm(head_dim)`: one scale for all heads (Qwen 3, Gemma 3).
    - `QKNorm(head_dim, num_heads, num_key_value_heads)`: one for each head.
    - The same with `joint=True`: the mean is taken over the channels of all heads together (OLMo 2).
    - `learned=False`: no scale (Llama 4, which normalizes after its rotation).

    Gemma 3 stores g - 1. With RoPE the norm comes first: `Chain(QKNorm(head_dim), RoPE(head_dim))`.

    >>> import torch, regard as rg
    >>> norm = rg.encodings.QKNorm(4)
    >>> norm.encode_query(torch.tensor([[[[1.0, -1.0, 7.0, 7.0]]]]), torch.arange(1)).detach()  # the rms is 5
    tensor([[[[ 0.2000, -0.2000,  1.4000,  1.4000]]]])
    """

    def __init__(
        self,
        head_dim: Size,
        num_heads: Size = 1,
        num_key_value_heads: Size | None = None,
        *,
        joint: bool = False,
        learned: bool = True,
        eps: Annotated[Number, AtLeast(0)] = 1e-6,
    ) -> None:
        super().__init__()
        self.joint, self.eps, self.head_dim = joint, eps, head_dim
        num_key_value_heads = num_heads if num_key_value_heads is None else num_key_value_heads
        self.query_scale = nn.Parameter(torch.ones(num_heads, 1, head_dim)) if learned else None
        self.key_scale = nn.Parameter(torch.ones(num_key_value_heads, 1, head_dim)) if learned else None

    def encode_query(self, x: Tensor, positions: Tensor) -> Tensor:
        return self._normed(x, self.query_scale, "num_heads")

    def encode_key(self, x: Tensor, positions: Tensor) -> Tensor:
        return self._normed(x, self.key_scale, "num_key_value_heads")

    def _normed(self, x: Tensor, scale: Tensor | None, argument: str) -> Tensor:
        """x / rms(x) * scale, for x (B, heads, n, D) and a scale (heads or 1, 1, D). Errors name the `argument`."""
        if x.shape[-1] != self.head_dim or (scale is not None and len(scale) not in (1, x.shape[1])):
            raise RegardError(
                f"QKNorm: made for width {self.head_dim} and {argument}={1 if scale is None else len(scale)}, got "
                f"{x.shape[1]} heads of width {x.shape[-1]}. Create it for these; 1 head means one scale for all."
            )
        wide = at_least_float32(x)
        mean = wide.square().mean((1, 3) if self.joint else 3, keepdim=True)
        normed = wide * (mean + self.eps).rsqrt()
        return (normed if scale is None else normed * scale).to(x.dtype)

    def extra_repr(self) -> str:
        num_heads = 1 if self.query_scale is None else len(self.query_scale)
        return f"{self.head_dim}, {num_heads}, joint={self.joint}, learned={self.query_scale is not None}"


@checked
class ScalableSoftmax(nn.Module, TwoSidedPosition):
    """Scores times s_h log n, so that long rows stay sharp (Nakanishi 2025, SSMax, arXiv:2501.19399).

    n = i + 1 is the number of keys up to the query, so it is for causal attention: query i is multiplied by
    s_h log(i + 1). s_h is learned, one number for each head, and begins at 0.43, the value of the paper's figure 1.
    Without a causal mask n is the same for all rows: use `Dot(scale=...)`. The engines see plain softmax.

    >>> import torch, regard as rg
    >>> q = torch.ones(1, 1, 3, 2)
    >>> rg.encodings.ScalableSoftmax(1).encode_query(q, torch.tensor([0, 9, 99]))[0, 0, :, 0].detach()
    tensor([0.0000, 0.9901, 1.9802])
    """

    def __init__(self, num_heads: Size) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((num_heads, 1, 1), 0.43))

    def encode_query(self, x: Tensor, positions: Tensor) -> Tensor:
        if len(self.factor) != x.shape[1]:
            raise RegardError(
                f"ScalableSoftmax: made for {len(self.factor)} heads, the query has {x.shape[1]}. "
                f"Create it for {x.shape[1]}."
            )
        wide = at_least_float32(x)
        logs = (positions + 1).clamp_min(1).to(wide.dtype).log()
        return (wide * self.factor * logs[:, None]).to(x.dtype)

    def encode_key(self, x: Tensor, positions: Tensor) -> Tensor:
        return x

    def extra_repr(self) -> str:
        return str(len(self.factor))


@checked
@dataclass(frozen=True)
class PositionTemperature(TwoSidedPosition):
    """Scores times 1 + factor log(1 + floor((i + first) / floor)): sharper, step by step, after `floor` positions.

    Llama 4 has it in its layers without positions ("NoPE"), with first = 1, floor = 8192 and factor = 0.1. Ministral 3
    has it after RoPE with first = 0: `Chain(RoPE(head_dim), PositionTemperature(16384, first=0))`.

    >>> import torch, regard as rg
    >>> q = torch.ones(1, 1, 4, 1)
    >>> rg.encodings.PositionTemperature(floor=100).encode_query(q, torch.tensor([0, 98, 99, 999])).flatten()
    tensor([1.0000, 1.0000, 1.0693, 1.2398])
    """

    floor: Size = 8192
    factor: Number = 0.1
    first: int = 1

    def encode_query(self, x: Tensor, positions: Tensor) -> Tensor:
        wide = at_least_float32(x)
        steps = ((positions + self.first) // self.floor).clamp_min(0)
        return (wide * (1 + self.factor * steps.to(wide.dtype).log1p())[:, None]).to(x.dtype)

    def encode_key(self, x: Tensor, positions: Tensor) -> Tensor:
        return x


@checked
class PoPE(nn.Module, TwoSidedPosition):
    """Polar coordinates: softplus gives the length, the position the angle (Gopalakrishnan et al. 2025).

    s_ij = c sum_d softplus(q_id) softplus(k_jd) cos((i - j) base^(-d / D) - delta_hd), arXiv:2509.10534. In RoPE the
    angle of a pair of channels is that of its content plus that of its position; here it is that of the position alone.
    Each channel turns by itself, so encoded vectors have 2 D channels, and c is the factor of the score: give it as
    `Dot(scale=head_dim**-0.5)`. The phase delta of each head and channel is learned, and is used between -2 pi and 0.

    >>> import torch, regard as rg
    >>> q = torch.zeros(1, 1, 1, 2)  # softplus(0) = log 2
    >>> rg.encodings.PoPE(num_heads=1, head_dim=2).encode_query(q, torch.tensor([0])).detach()
    tensor([[[[0.6931, 0.6931, 0.0000, 0.0000]]]])
    """

    def __init__(self, num_heads: Size, head_dim: Size, base: PositiveConstant = 10_000.0) -> None:
        super().__init__()
        self.head_dim, self.base = head_dim, base
        self.phase = nn.Parameter(torch.zeros(num_heads, 1, head_dim))

    def encode_query(self, x: Tensor, positions: Tensor) -> Tensor:
        return self._polar(x, self._angles(positions, x))

    def encode_key(self, x: Tensor, positions: Tensor) -> Tensor:
        """With the phase added to the angle of the position, so that it is subtracted in the score."""
        phase = self.phase.clamp(-2 * math.pi, 0)
        if len(phase) not in (1, x.shape[1]):
            raise RegardError(
                f"PoPE: made for {len(phase)} heads, the keys have {x.shape[1]}. Create it for {x.shape[1]} heads."
            )
        return self._polar(x, self._angles(positions, x) + phase)

    def _angles(self, positions: Tensor, x: Tensor) -> Tensor:
        """The angle of each channel at each position, (n, D)."""
        exponents = torch.arange(self.head_dim, dtype=torch.float64, device="cpu") / self.head_dim
        return angles(positions, self.base**-exponents, at_least_float32(x).dtype)

    def _polar(self, x: Tensor, angle: Tensor) -> Tensor:
        """Channels of length softplus(x) at their angles: the D first coordinates, then the D second ones."""
        if x.shape[-1] != self.head_dim:
            raise RegardError(f"PoPE: made for width {self.head_dim}, got {x.shape[-1]}. Create it for {x.shape[-1]}.")
        length = F.softplus(at_least_float32(x))
        return torch.cat((length * angle.cos(), length * angle.sin()), -1).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{len(self.phase)}, {self.head_dim}"
