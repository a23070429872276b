"""`ConvolutionMap`: a convolution over a few tokens between two gates, as weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from regard.attention import Attention
from regard.checks import checked
from regard.maps.attention_map import AttentionMap
from regard.maps.indices import Index, indices
from regard.pieces.grid import Grid
from regard.pieces.mask import causal, window
from regard.positions import Positions
from regard.shapes import to_device


@dataclass(frozen=True, eq=False)
class Convolution:
    """o_i = out_i sum_r taps_r in_{i-r} v_{i-r}: `out_gate` (B, H, I) of the last I tokens, `in_gate` (B, H, J).

    `taps` (H, K) are the numbers of the convolution; taps_0 is that of the token itself. Each channel is a head.
    """

    out_gate: Tensor
    in_gate: Tensor
    taps: Tensor


class ConvolutionMap(AttentionMap):
    """w_ij = out_i taps_{i-j} in_j, which is 0 for keys more than K - 1 tokens back. Gated short convolutions (LFM2).

    >>> import torch
    >>> from regard.maps.convolution_map import Convolution, ConvolutionMap
    >>> ones = torch.ones(1, 1, 3)
    >>> ConvolutionMap.of(Convolution(2 * ones, ones, torch.tensor([[1.0, 0.5]])))[0, 0]
    tensor([[2., 0., 0.],
            [1., 2., 0.],
            [0., 1., 2.]])
    """

    is_signed: ClassVar[bool] = True

    def __init__(self, convolution: Convolution, positions: Positions, grid: Grid) -> None:
        self.convolution, self.positions, self.grid = convolution, positions, grid
        self.attention = Attention(mask=causal() & window(convolution.taps.shape[1])).eval()

    @classmethod
    def of(cls, convolution: Convolution) -> ConvolutionMap:
        """The map of I queries, which are the last of J tokens."""
        (B, H, I), J = convolution.out_gate.shape, convolution.in_gate.shape[2]
        positions = Positions.aligned_to_end(I, J)
        return cls(convolution, positions, Grid.whole(positions, B, H, I, convolution.out_gate.device))

    @property
    def _dtype(self) -> torch.dtype:
        return self.convolution.in_gate.dtype

    @checked
    def select(self, batch: Index, head: Index) -> ConvolutionMap:
        """The map of some batch entries and heads (indices), still lazy."""
        b = to_device(indices("weights.select", "batch", batch, self.shape[0]), self.device)
        h = to_device(indices("weights.select", "head", head, self.shape[1]), self.device)
        whole = self.convolution
        part = Convolution(whole.out_gate[b][:, h], whole.in_gate[b][:, h], whole.taps[h])
        grid = replace(self.grid, batch=self.grid.batch[b], head=self.grid.head[h])
        return ConvolutionMap(part, self.positions, grid)

    def _weights(self, rows: Tensor | slice, cols: Tensor | slice) -> Tensor:
        rows, cols = (x if isinstance(x, slice) else to_device(x, self.device) for x in (rows, cols))
        out_gate, in_gate, taps = self.convolution.out_gate, self.convolution.in_gate, self.convolution.taps
        distance = self.grid.query[rows, None] - self.grid.key[cols]
        near = (distance >= 0) & (distance < taps.shape[1])
        kernel = taps[:, distance.clamp(0, taps.shape[1] - 1)] * near
        return out_gate[:, :, rows, None] * kernel * in_gate[:, :, None, cols]
