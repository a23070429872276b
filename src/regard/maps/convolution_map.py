"""`convolution_map`: a convolution over a few tokens between two gates, as weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from regard.attention import Attention, Prepared
from regard.base.positions import Positions
from regard.maps.scored_map import ScoredMap
from regard.pieces.convolution import Taps
from regard.pieces.grid import Grid
from regard.pieces.mask import causal, window
from regard.pieces.normalizer import Unnormalized
from regard.pieces.score import Dot


@dataclass(frozen=True, eq=False)
class Convolution:
    """o_i = out_i sum_r taps_r in_{i-r} v_{i-r}: `out_gate` (B, H, I) of the last I tokens, `in_gate` (B, H, J).

    `taps` (H, K) are the numbers of the convolution; taps_0 is that of the token itself. Each channel is a head.
    """

    out_gate: Tensor
    in_gate: Tensor
    taps: Tensor


def convolution_map(convolution: Convolution) -> ScoredMap:
    """w_ij = out_i taps_{i-j} in_j, for I queries that are the last of J tokens. Gated short convolutions (LFM2).

    >>> import torch
    >>> from regard.maps.convolution_map import Convolution, convolution_map
    >>> ones = torch.ones(1, 1, 3)
    >>> convolution_map(Convolution(2 * ones, ones, torch.tensor([[1.0, 0.5]])))[0, 0]
    tensor([[2., 0., 0.],
            [1., 2., 0.],
            [0., 1., 2.]])
    """
    taps, gates = convolution.taps, (convolution.out_gate[..., None], convolution.in_gate[..., None])
    mask, normalizer = causal() & window(taps.shape[1]), Unnormalized()
    attention = Attention(Dot(1.0), bias=Taps(taps.detach()), mask=mask, normalizer=normalizer).eval()
    (B, H, I), J = convolution.out_gate.shape, convolution.in_gate.shape[2]
    positions = Positions.aligned_to_end(I, J)
    grid = Grid.whole(positions, B, H, I, taps.device)
    return ScoredMap(
        attention, Prepared(*gates, (None,), (None,)), positions, grid, normalizer.row_statistic(gates[0], grid.key)
    )
