"""`Divergence`: how far the rows of a map are from given rows, or from those of another map."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.base.shapes import to_device
from regard.maps.attention_map import AttentionMap
from regard.maps.reductions import (
    ANY_SUM,
    NEGATIVE,
    Entropy,
    Reduction,
    Shape,
    SignedMass,
    State,
    Tile,
    times_log,
    zeros,
)

#: The least weight: a key with a target and weight 0 counts as if it had this weight, the least normal float32.
LEAST = torch.finfo(torch.float32).tiny
#: A share of a row's target that is below this is rounding.
ROUNDING = 1e-5


@checked
@dataclass(frozen=True, eq=False)
class Divergence(Reduction[Tensor]):
    """KL(p_i || w_i) = sum_j p_ij (log p_ij - log w_ij) of every row, in nats: 0 if w_i = p_i; (B, H, I).

    `to` are the target rows p: a tensor (I, J), (H, I, J) or (B, H, I, J) whose batch and heads may be 1, such as gold
    alignments, or another map with the same queries and keys and as many heads, or one. Targets are constants: no
    gradient goes into them. Their rows should sum to 1; a row of zeros has divergence 0. If a key has a target but
    weight 0, the divergence is infinite; here such a key has the weight 2^-126, so it costs 87 nats for its share of
    the row. (Kullback and Leibler 1951.)

    Errors: `RegardError` if `to` is negative or not finite, has no shares, or does not fit the map.

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 1, 2, 4)
    >>> weights = rg.Attention()(x, x, x).weights  # one half on each key
    >>> weights.summarize(rg.maps.Divergence(to=torch.tensor([[0.5, 0.5], [1.0, 0.0]])))[0]  # 0 and log 2
    tensor([[[0.0000, 0.6931]]])
    """

    needs_shares = True
    adds_rows = True
    to: Tensor | AttentionMap

    def __post_init__(self) -> None:
        if isinstance(self.to, AttentionMap):
            if not self.to.has_shares:
                reason = NEGATIVE if self.to.is_signed else ANY_SUM
                raise RegardError(f"Divergence: targets are shares. {reason} Give to=map.shares().")
            return
        if not 2 <= self.to.ndim <= 4 or not self.to.is_floating_point():
            raise RegardError(
                "Divergence: the target rows are floats of shape (queries, keys), (heads, queries, keys) or (batch, "
                f"heads, queries, keys), got {self.to.dtype} of shape {tuple(self.to.shape)}."
            )
        target = self.to.detach()
        if bool((target < 0).any()) or not bool(target.isfinite().all()):
            raise RegardError("Divergence: target rows must not be negative, infinite or NaN. Normalize them first.")
        rows = target.reshape(*[1] * (4 - target.ndim), *target.shape)
        object.__setattr__(self, "to", rows.clone())  # the caller may change its tensor later

    @cached_property
    def _totals(self) -> tuple[Tensor, Tensor]:
        """sum_j p_ij log p_ij and sum_j p_ij of every target row."""
        with torch.no_grad():
            if isinstance(self.to, AttentionMap):
                entropy, mass = self.to.summarize(Entropy(), SignedMass())
                return -entropy, mass.positive
            return times_log(self.to).sum(-1), self.to.sum(-1)

    def init(self, shape: Shape, device: torch.device) -> State:
        given, (B, H, I, J) = tuple(self.to.shape), shape
        if given[2:] != (I, J) or given[0] not in (1, B) or given[1] not in (1, H):
            raise RegardError(
                f"Divergence: the map has (batch, heads, queries, keys) = {tuple(shape)}, and the target {given}. They "
                "need the same queries and keys; batch and heads of the target are those of the map, or 1."
            )
        return [zeros(device, B, H, I), zeros(device, B, H, I)]  # -sum_j p_ij log w_ij and sum_j p_ij over all tiles

    def _target(self, tile: Tile) -> Tensor:
        """The target rows of a tile, (B or 1, H or 1, i, j)."""
        with torch.no_grad():
            if isinstance(self.to, AttentionMap):
                return self.to._weights(tile.rows, tile.cols)
            return to_device(self.to[:, :, tile.rows, tile.cols], tile.weights.device)

    def add(self, state: State, tile: Tile) -> None:
        """Add -sum_j p_ij log w_ij and sum_j p_ij of the keys of the tile."""
        target = self._target(tile).to(tile.weights.dtype)
        if (logs := tile.log_weights) is None:
            logs = tile.weights.clamp_min(LEAST).log()
        else:
            logs = logs.masked_fill(logs.isneginf(), math.log(LEAST))
        state[0][:, :, tile.rows] -= (target * logs).sum(-1)
        state[1][:, :, tile.rows] += target.sum(-1)

    def finish(self, state: State) -> Tensor:
        negative_entropy, mass = (to_device(total, state[0].device) for total in self._totals)
        outside = mass - state[1]  # the share of keys that the mask hides, in no tile
        outside = outside.masked_fill(outside <= ROUNDING * mass, 0.0)
        return (negative_entropy + state[0] - math.log(LEAST) * outside).to(state[0].dtype)
