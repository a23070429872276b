"""Attention rollout through all layers, and the norms of the vectors that keys send to queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.base.checks import Count, checked
from regard.base.errors import RegardError
from regard.base.shapes import at_least_float32
from regard.maps import AttentionMap, Reduction, Tile
from regard.maps.indices import indices
from regard.maps.reductions import Shape, State, zeros
from regard.maps.value_weighted_map import ValueWeightedMap
from regard.stats.profile import one_text


@checked
@torch.no_grad()
def rollout(
    maps: Mapping[str, AttentionMap] | Sequence[AttentionMap],
    rows: Sequence[int] | Tensor,
    batch: Count = 0,
    residual: float = 0.5,
) -> Tensor:
    """Attention rollout: how much rows of the last layer depend on each input token, by weights alone; (rows, n).

    Abnar & Zuidema 2020, arXiv:2005.00928: with A_l the mean of a layer's heads and A'_l = 0.5 A_l + 0.5 I
    for the residual, the rollout is A'_L ... A'_1. No n x n matrix is needed: a row e_i is multiplied by A'_L,
    then by A'_(L-1), and so on, tile by tile. `maps` are the self-attention maps in the order of the model;
    `residual` is the share of I. Values, norms and feed-forward layers are ignored.

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 1, 2, 4)
    >>> rollout([rg.Attention()(x, x, x).weights], [0])
    tensor([[0.7500, 0.2500]])
    """
    layers = list(maps.values()) if isinstance(maps, Mapping) else list(maps)
    if not layers or len({layer.shape[2:] for layer in layers}) > 1 or layers[0].shape[2] != layers[0].shape[3]:
        raise RegardError(
            "rollout: the maps are multiplied, so every map must be of self-attention over the same whole text, "
            f"got {[tuple(layer.shape) for layer in layers]}. Leave cross-attention out; watch one pass, not decoding."
        )
    n, device = layers[0].shape[2], layers[0].device
    chosen = indices("rollout", "row", rows, n).to(device)
    flow = zeros(device, len(chosen), n)
    flow[torch.arange(len(chosen), device=device), chosen] = 1.0
    for layer in reversed(layers):
        text_map = one_text("rollout", layer, batch)
        flow = residual * flow + (1 - residual) * text_map.summarize(RowsTimesMap(flow))[0]
    return flow


@dataclass(frozen=True, eq=False)
class RowsTimesMap(Reduction):
    """Row vectors times the mean map of the heads, sum_i flow_i mean_h w_hij, for the first text; (rows, J)."""

    flow: Tensor

    def init(self, shape: Shape, device: torch.device) -> State:
        return [zeros(device, len(self.flow), shape[3])]

    def add(self, state: State, tile: Tile) -> None:
        flow = self.flow[:, tile.rows]
        if flow.any():
            state[0][:, tile.cols] += flow @ tile.weights[0].mean(0).to(flow.dtype)


@checked
def value_weighted(map: AttentionMap, value: Tensor, projection: Tensor | None = None) -> ValueWeightedMap:
    """The map of the norms ||w_ij v_j W_O^h|| = |w_ij| ||v_j W_O^h|| (Kobayashi et al. 2020, arXiv:2004.10102).

    A key with a large weight may contribute little, because its value is small. Special tokens often do.
    `value` is (B, G, J, E) with G dividing H; `projection` is (H, E, C), or the weight (C, H E) of the
    `nn.Linear` that follows the heads. Without it the norms are |w_ij| ||v_j||. The values and the projection of a
    watched model are known: `seen.value_weighted(layer)`.

    >>> import torch, regard as rg
    >>> x = torch.randn(1, 2, 5, 4)
    >>> value_weighted(rg.Attention()(x, x, x).weights, x, torch.randn(8, 8)).per_head().shape
    torch.Size([1, 2])
    """
    B, H, _, J = map.shape
    E = value.shape[-1] if value.ndim else 0
    fits = value.ndim == 4 and (value.shape[0], value.shape[2]) == (B, J) and H % value.shape[1] == 0
    if not fits or not value.is_floating_point() or value.device != map.device:
        raise RegardError(
            f"value_weighted: values are floats of shape (batch {B}, heads that divide {H}, keys {J}, width) "
            f"on {map.device}, got {value.dtype} of shape {tuple(value.shape)} on {value.device}."
        )
    values = at_least_float32(value).repeat_interleave(H // value.shape[1], 1)
    if projection is None:
        return ValueWeightedMap(map, values.norm(dim=-1))
    if projection.ndim == 2 and projection.shape[1] == H * E:
        projection = projection.T.reshape(H, E, -1)
    if projection.ndim != 3 or projection.shape[:2] != (H, E):
        raise RegardError(
            f"value_weighted: the projection is ({H}, {E}, C), or the weight (C, {H * E}) of nn.Linear, "
            f"got {tuple(projection.shape)}."
        )
    if torch.is_grad_enabled() and (value.requires_grad or projection.requires_grad):
        return ValueWeightedMap(
            map, (values @ at_least_float32(projection)).norm(dim=-1)
        )  # a triangle has no derivative
    # ||v W|| = ||v R'||, where W' = Q R: a triangle of (E, E) numbers per head instead of C numbers per key
    triangle = torch.linalg.qr(at_least_float32(projection.detach()).mT, mode="r").R
    return ValueWeightedMap(map, (values.to(triangle.dtype) @ triangle.mT).norm(dim=-1))
