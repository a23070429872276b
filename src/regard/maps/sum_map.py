"""`SumMap`: a weighted sum of maps, W = sum_m c_m W_m, such as the difference of two softmaxes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.attention import Attention
from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.base.shapes import to_device
from regard.base.spans import Spans
from regard.maps.attention_map import AttentionMap
from regard.maps.gradients import LiveRows, Rows, given, joined_rows
from regard.maps.indices import Index, indices
from regard.maps.reductions import are_shares
from regard.maps.scored_map import CHANGED
from regard.pieces.contents import Originals, split_tensors
from regard.pieces.mask import Mask


class SumMap(AttentionMap):
    """w_ij = sum_m c_m,i w_m,ij: a sum of maps of the same queries and keys, with a factor for each part and row.

    A factor is a number or a tensor that broadcasts against (B, H, I, 1). The weights are signed if a part is, or if a
    factor is negative.

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 1, 2, 4)
    >>> near, all_keys = (rg.Attention(mask=mask)(x, x, x).weights for mask in (rg.causal(), None))
    >>> rg.maps.SumMap([near, all_keys], factors=[1.0, -0.5])[0, 0]
    tensor([[ 0.7500, -0.2500],
            [ 0.2500,  0.2500]])
    """

    _made_of: ClassVar[str] = "a sum of maps, weights.parts"

    def __init__(self, parts: Sequence[AttentionMap], factors: Sequence[float | Tensor]) -> None:
        self.parts = list(parts)
        _check_parts(self.parts, factors)
        first = self.parts[0]
        live = [_factor(number, factor, first) for number, factor in enumerate(factors)]
        self.factors = [factor.detach().clone() for factor in live]
        is_live = torch.is_grad_enabled() and any(factor.requires_grad for factor in live)
        self._live = Originals.of(*split_tensors(live)) if is_live else None
        self.positions, self.grid = first.positions, first.grid
        self.attention = Attention(mask=union([part.attention.mask for part in self.parts]))

    @cached_property
    def is_signed(self) -> bool:  # type: ignore[override]
        return any(part.is_signed for part in self.parts) or any(bool((factor < 0).any()) for factor in self.factors)

    @cached_property
    def has_shares(self) -> bool:  # type: ignore[override]
        if not all(part.has_shares for part in self.parts):
            return False
        return are_shares(torch.stack(torch.broadcast_tensors(*(factor.float() for factor in self.factors)), -1))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.parts[0].shape

    @property
    def _dtype(self) -> torch.dtype:
        return reduce(torch.promote_types, (part._dtype for part in self.parts))

    @property
    def _bytes_per_weight(self) -> int:
        return 2 * self._item_bytes + max(part._bytes_per_weight for part in self.parts)

    @checked
    def select(self, batch: Index, head: Index) -> SumMap:
        """The map of some batch entries and heads (indices), still lazy."""
        b = indices("weights.select", "batch", batch, self.shape[0])
        h = indices("weights.select", "head", head, self.shape[1])
        live = self.factors if self._live is None else self._live.template.around(self._live.tensors)
        factors = [_selected(_selected(factor, 0, b), 1, h) for factor in live]
        return SumMap([part.select(b, h) for part in self.parts], factors)

    def _weights(self, rows: Tensor | slice, cols: Tensor | slice) -> Tensor:
        return self._summed(self.factors, (part._weights(rows, cols) for part in self.parts), rows)

    def _summed(self, factors: Sequence[Tensor], weights: Iterable[Tensor], rows: Tensor | slice) -> Tensor:
        terms = (_of_rows(c, rows).to(self._dtype) * w for c, w in zip(factors, weights, strict=True))
        return reduce(torch.add, terms)

    @property
    def requires_grad(self) -> bool:
        return any(part.requires_grad for part in self.parts) or self._live is not None

    def live_rows(self) -> LiveRows:
        originals = self._live or Originals.of(*split_tensors(self.factors))
        if originals.are_changed:
            return LiveRows.refused(CHANGED)

        def combine(parts: list[Any]) -> Rows:
            *parts, tensors = parts
            factors = originals.template.around(tensors)

            def rows(queries: Tensor | slice, keys: Spans) -> tuple[Tensor, None]:
                return self._summed(factors, (part(queries, keys)[0] for part in parts), queries), None

            return rows

        return joined_rows([*(part.live_rows() for part in self.parts), given(originals.tensors)], combine)


def _check_parts(parts: list[AttentionMap], factors: Sequence[float | Tensor]) -> None:
    if not parts or len(parts) != len(factors):
        raise RegardError(
            f"SumMap: {len(parts)} maps and {len(factors)} factors were given. Give one factor for each map, and at "
            "least one map."
        )
    shapes, positions = [part.shape for part in parts], [part.positions for part in parts]
    if any(shape != shapes[0] for shape in shapes) or any(other != positions[0] for other in positions):
        raise RegardError(
            f"SumMap: the maps must have the same queries and keys at the same positions, got shapes {shapes}. A map "
            "by groups of keys has its own columns: sum the maps over tokens, as `attend` returns them."
        )


def _factor(number: int, factor: float | Tensor, part: AttentionMap) -> Tensor:
    """The factor as a tensor with four axes, each of size 1 or of the size of the map."""
    B, H, I, _ = part.shape
    tensor = to_device(torch.as_tensor(factor), part.device)
    tensor = tensor.reshape(*[1] * (4 - tensor.ndim), *tensor.shape) if tensor.ndim < 4 else tensor
    fits = tensor.ndim == 4 and all(n in (1, m) for n, m in zip(tensor.shape, (B, H, I, 1), strict=True))
    if not fits:
        shape = tuple(factor.shape) if isinstance(factor, Tensor) else factor
        raise RegardError(
            f"SumMap: factor {number} has shape {shape}, and the map has (B, H, I, J) = {part.shape}. A factor is a "
            f"number, or a tensor that broadcasts against (B, H, I, 1) = {(B, H, I, 1)}: factor[..., None] for one "
            "number a row."
        )
    return tensor


def _selected(factor: Tensor, axis: int, index: Tensor) -> Tensor:
    return factor if factor.shape[axis] == 1 else factor.index_select(axis, to_device(index, factor.device))


def _of_rows(factor: Tensor, rows: Tensor | slice) -> Tensor:
    if factor.shape[2] == 1:
        return factor
    return factor[:, :, rows if isinstance(rows, slice) else to_device(rows, factor.device)]


def union(masks: Sequence[Mask | None]) -> Mask | None:
    """The mask that allows what at least one of them allows; None (every key) if one of them is None."""
    different = [mask for number, mask in enumerate(masks) if not any(mask is other for other in masks[:number])]
    if not different or any(mask is None for mask in different):
        return None
    return reduce(lambda left, right: left | right, different)  # type: ignore[operator, return-value]


def weighted_sum(outputs: Sequence[Tensor], factors: Sequence[float | Tensor]) -> Tensor:
    """sum_m c_m output_m, in the dtype of the outputs."""
    shapes = [tuple(output.shape) for output in outputs]
    if any(shape != shapes[0] for shape in shapes):
        raise RegardError(
            f"combine: the outputs must have one shape, got {shapes}. The parts attend to the same values."
        )
    dtype = outputs[0].dtype
    terms = (output * (c.to(dtype) if isinstance(c, Tensor) else c) for output, c in zip(outputs, factors, strict=True))
    return sum(terms, start=outputs[0].new_zeros(()))
