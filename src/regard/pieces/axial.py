"""RoPE on several axes: positions that are vectors, such as (row, column) of an image or (time, row, column)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.base.checks import Constant, PositiveConstant, Size, checked
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import at_least_float32, to_device
from regard.base.spans import Spans
from regard.pieces.position import Encoding, angles_of_pairs, rotated_pairs


@checked
@dataclass(frozen=True, eq=False)
class AxialRoPE(Encoding):
    """RoPE by coordinates: channel pair m is rotated by coordinate[axes[m]] * rates[m].

    `coordinates` are integers (A, n), one vector for each token, or (B, A, n) with vectors of each batch entry. They
    may repeat, go back, or be negative. With None each call gets them: `attend(..., coordinates=...)`, (B, A, J), those
    of the keys; a cache keeps them, and each query is one of the keys. Masks and biases still compare the places of
    tokens in the sequence. The two usual assignments of pairs have functions of their own:

    - `AxialRoPE.sections`: the pairs of one RoPE are divided among the axes (multimodal RoPE of Qwen2-VL and later,
      arXiv:2409.12191). With one axis it is RoPE with positions of your own for each batch entry.
    - `AxialRoPE.grid`: each axis has a RoPE of its own on a share of the channels (vision transformers).

    >>> import torch, regard as rg
    >>> where = torch.tensor([[5, 5, 6], [0, 1, 0]])  # rows and columns of three patches
    >>> q = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    >>> turned = rg.encodings.AxialRoPE.grid(where, head_dim=4).encode(q, torch.arange(3))
    >>> rows = rg.RoPE(2).encode(q[:, :, 2:, [0, 2]], torch.tensor([6]))  # patch 2: its first pair by its row
    >>> torch.allclose(turned[:, :, 2:, [0, 2]], rows)
    True
    """

    coordinates: Tensor | None
    axes: Sequence[int]
    rates: Sequence[Constant]
    interleaved: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(self.axes))
        object.__setattr__(self, "rates", tuple(map(float, self.rates)))
        if len(self.axes) != len(self.rates) or min(self.axes, default=0) < 0:
            raise RegardError(
                f"AxialRoPE: {len(self.axes)} axes {self.axes} and {len(self.rates)} rates. Give each channel pair one "
                "axis, from 0 on, and one rate."
            )
        if self.coordinates is not None:
            self._check_coordinates(self.coordinates)

    @property
    def needs(self) -> Mapping[str, str]:
        """The tensors of a call: its coordinates, if the encoding has none of its own."""
        return {} if self.coordinates is not None else {"coordinates": "B A J"}

    @classmethod
    @checked
    def sections(
        cls,
        coordinates: Tensor | None,
        sections: Sequence[int],
        base: PositiveConstant = 10_000.0,
        *,
        alternate: bool = False,
    ) -> AxialRoPE:
        """The pairs of one RoPE, `sections[a]` of them for axis a; their sum is half the width.

        Pair m has the rate base^(-m / sum(sections)). The first axis has the first pairs, with the highest rates, and
        so on (Qwen2-VL). With `alternate` the axes take turns, until an axis has its number; then the first axis has
        all other pairs (Qwen3-VL).

        >>> import torch, regard as rg
        >>> where = torch.zeros(3, 5, dtype=torch.long)
        >>> sections = rg.encodings.AxialRoPE.sections
        >>> sections(where, (2, 1, 1)).axes, sections(where, (2, 1, 1), alternate=True).axes
        ((0, 0, 1, 2), (0, 1, 2, 0))
        """
        total, count = sum(sections), len(sections)
        in_order = [axis for axis, pairs in enumerate(sections) for _ in range(pairs)]
        by_turns = [m % count if m < sections[m % count] * count else 0 for m in range(total)]
        rates = [base ** (-m / total) for m in range(total)]
        return cls(coordinates, by_turns if alternate else in_order, rates)

    @classmethod
    @checked
    def grid(
        cls,
        coordinates: Tensor | None,
        head_dim: Size,
        base: PositiveConstant = 10_000.0,
        *,
        alternate: bool = False,
        num_axes: Size = 2,
    ) -> AxialRoPE:
        """Each of A axes has head_dim / (2 A) pairs. `num_axes` is A if each call gets its coordinates.

        The rates of an axis are those of a RoPE of head_dim / A channels (Qwen2-VL's images). With `alternate` axis a
        has the rates a, a + A, a + 2 A, ... of a RoPE of the whole width (Pixtral).

        >>> import torch, regard as rg
        >>> rg.encodings.AxialRoPE.grid(torch.zeros(2, 9, dtype=torch.long), head_dim=8).rates
        (1.0, 0.01, 1.0, 0.01)
        """
        count = num_axes if coordinates is None else coordinates.shape[-2]
        if head_dim % (2 * count):
            raise RegardError(
                f"AxialRoPE.grid(head_dim={head_dim}): the width is a multiple of {2 * count}, 2 for each axis."
            )
        pairs = head_dim // (2 * count)
        axes = [axis for axis in range(count) for _ in range(pairs)]
        exponents = [
            (m * count + axis if alternate else m * count) / (head_dim // 2)
            for axis in range(count)
            for m in range(pairs)
        ]
        return cls(coordinates, axes, [base**-exponent for exponent in exponents])

    def encode(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.coordinates is None:
            raise RegardError("AxialRoPE(None, ...): each call gets its coordinates: attend(..., coordinates=...).")
        return self._turned(x, to_device(self.coordinates, x.device)[..., positions])

    def encode_both(
        self, query: Tensor, key: Tensor, positions: Positions, coordinates: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """With `coordinates` of the call, those of its keys, each query has those of the key at its position."""
        if coordinates is None:
            return super().encode_both(query, key, positions)
        self._check_coordinates(coordinates)
        queries = positions.queries(query.shape[2])
        if not positions.keys.covers(queries):
            raise RegardError(
                f"AxialRoPE: the queries have the positions {queries}, and the keys, whose coordinates are given, "
                f"{positions.keys}. Each query must be one of the keys."
            )
        of_queries = coordinates[..., positions.columns(queries).tensor(coordinates.device)]
        return self._turned(query, of_queries), self._turned(key, coordinates)

    def _turned(self, x: Tensor, coordinates: Tensor) -> Tensor:
        """Vectors (B, heads, n, D) rotated by their coordinates, (A, n) or (B, A, n)."""
        head_dim, num_entries = 2 * len(self.axes), coordinates.shape[0] if coordinates.ndim == 3 else 1
        if x.shape[-1] < head_dim or num_entries not in (1, x.shape[0]):
            raise RegardError(
                f"AxialRoPE: for {head_dim} channels and {num_entries} batch entries, got vectors of shape "
                f"{tuple(x.shape)}. "
                "Give coordinates (axes, tokens) for all entries, or (batch, axes, tokens)."
            )
        axes = to_device(torch.tensor(self.axes, dtype=torch.int64, device="cpu"), coordinates.device)
        of_pairs = coordinates.index_select(-2, axes).mT  # ((B,) n, pairs)
        wide = at_least_float32(x)
        angle = angles_of_pairs(of_pairs, torch.tensor(self.rates, dtype=torch.float64, device="cpu"), wide.dtype)
        angle = angle[:, None] if angle.ndim == 3 else angle  # all heads have the same angles
        rotated = rotated_pairs(wide[..., :head_dim], angle, self.interleaved).to(x.dtype)
        return torch.cat((rotated, x[..., head_dim:]), -1) if head_dim < x.shape[-1] else rotated

    def _check_coordinates(self, coordinates: Tensor) -> None:
        """Refuse coordinates that are not integers (axes, tokens) or (batch, axes, tokens) of all axes of the pairs."""
        shape, dtype = tuple(coordinates.shape), coordinates.dtype
        if coordinates.ndim not in (2, 3) or dtype.is_floating_point or dtype == torch.bool:
            raise RegardError(
                f"AxialRoPE: coordinates are integers (axes, tokens) or (batch, axes, tokens), got {dtype} of shape "
                f"{shape}."
            )
        if max(self.axes, default=0) >= shape[-2]:
            raise RegardError(
                f"AxialRoPE: the pairs have axes from 0 to {max(self.axes)}, the coordinates {shape[-2]} of shape "
                f"{shape}. Give coordinates (axes, tokens) or (batch, axes, tokens) for all axes."
            )

    def check(self, positions: Spans) -> None:
        if self.coordinates is None:
            return
        count = self.coordinates.shape[-1]
        if not Spans(((0, count),)).covers(positions):
            ((first, stop),) = positions.hull()
            raise RegardError(
                f"AxialRoPE: has coordinates of tokens 0 to {count - 1}, this call needs {first} to {stop - 1}. Give "
                "coordinates for all tokens, those in a cache too."
            )
