"""Maps that are made of other maps: sums, products, and the map over the tokens of groups of keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, reduce
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.attention import Attention
from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import to_device
from regard.base.spans import Spans
from regard.maps.attention_map import AttentionMap, RecomputedMap
from regard.maps.gradients import LiveRows, Rows, extra_tensors, joined_rows
from regard.maps.indices import Index, indices
from regard.maps.reductions import are_shares
from regard.maps.scored_map import CHANGED
from regard.masks import causal
from regard.pieces.contents import Originals, autograd_records, split_tensors, tensor_snapshot, versions_of
from regard.pieces.grid import Grid
from regard.pieces.key_groups import GroupMask, KeyGroups
from regard.pieces.mask import Mask, sees_no_later_key

# `SumMap`: a weighted sum of maps, W = sum_m c_m W_m, such as the difference of two softmaxes.


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
        self._live = Originals.of(*split_tensors(live)) if autograd_records(live) else None
        self.positions, self.grid = first.positions, first.grid
        self.attention = Attention(mask=union([part.attention.mask for part in self.parts]))

    @cached_property
    def is_signed(self) -> bool:  # type: ignore[override]
        return any(part.is_signed for part in self.parts) or any(bool((factor < 0).any()) for factor in self.factors)

    @cached_property
    def has_shares(self) -> bool:  # type: ignore[override]
        """Whether the parts have shares, and the factors of each row are not negative and sum to 1."""
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
        b, h = self._selected_indices(batch, head)
        live = self.factors if self._live is None else self._live.template.around(self._live.tensors)
        factors = [_selected(_selected(factor, 0, b), 1, h) for factor in live]
        return SumMap([part.select(b, h) for part in self.parts], factors)

    def _weights(self, rows: Tensor | slice, cols: Tensor | slice) -> Tensor:
        return self._summed(self.factors, (part._weights(rows, cols) for part in self.parts), rows)

    def _summed(self, factors: Sequence[Tensor], weights: Iterable[Tensor], rows: Tensor | slice) -> Tensor:
        """sum_m c_m W_m of the weights of each part, (B, H, I', J'), on these rows."""
        terms = (_of_rows(c, rows).to(self._dtype) * w for c, w in zip(factors, weights, strict=True))
        return reduce(torch.add, terms)

    @property
    def requires_grad(self) -> bool:
        return any(part.requires_grad for part in self.parts) or self._live is not None

    def live_rows(self) -> LiveRows:
        """Sums of the live rows of the parts, with the factors that have graphs (or the snapshot of them)."""
        originals = self._live or Originals.of(*split_tensors(self.factors))
        if originals.are_changed:
            return LiveRows.refused(CHANGED)

        def combine(parts: list[Any]) -> Rows:
            *rows_of_parts, tensors = parts  # in the order of `joined_rows` below
            factors = originals.template.around(tensors)

            def rows(queries: Tensor | slice, keys: Spans) -> tuple[Tensor, None]:
                return self._summed(factors, (part(queries, keys)[0] for part in rows_of_parts), queries), None

            return rows

        return joined_rows([*(part.live_rows() for part in self.parts), extra_tensors(originals.tensors)], combine)


def _check_parts(parts: list[AttentionMap], factors: Sequence[float | Tensor]) -> None:
    """Refuse no maps, another number of factors, and maps of other queries or keys."""
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
    """The factor as a tensor (B or 1, H or 1, I or 1, 1) of the map `part`. `number` is its place, for the error."""
    B, H, I, _ = part.shape
    tensor = to_device(torch.as_tensor(factor), part.device)
    tensor = tensor.reshape(*[1] * (4 - tensor.ndim), *tensor.shape)
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
    """The factor of some batch entries (axis 0) or heads (axis 1); an axis of size 1 is the same for all."""
    return factor if factor.shape[axis] == 1 else factor.index_select(axis, to_device(index, factor.device))


def _of_rows(factor: Tensor, rows: Tensor | slice) -> Tensor:
    """The factor of some queries."""
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
    """sum_m c_m output_m, in the dtype of the outputs (B, H, I, E); without a temporary tensor for each product.

    A factor c_m is a number, or broadcasts against (B, H, I, 1).
    """
    shapes = [tuple(output.shape) for output in outputs]
    if any(shape != shapes[0] for shape in shapes):
        raise RegardError(
            f"combine: the outputs must have one shape, got {shapes}. The parts attend to the same values."
        )
    dtype, first = outputs[0].dtype, factors[0]
    total = outputs[0] * (first.to(dtype) if isinstance(first, Tensor) else first)
    for output, c in zip(outputs[1:], factors[1:], strict=True):
        total = torch.addcmul(total, output, c.to(dtype)) if isinstance(c, Tensor) else total.add(output, alpha=c)
    return total


# `ProductMap`: the product of maps, W = W_1 W_2 ..., for values that pass through several attentions.


class ProductMap(AttentionMap):
    """w_ij = sum_m u_im v_mj: the map of an attention that reads the output of another, and so on.

    The first map is the last attention: its keys are the queries of the next map. Only the rows and columns that are
    asked for are computed, so a product through few latents costs little more than its first and its last map.

    >>> import torch, regard as rg
    >>> latents, x = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 3, 4)
    >>> read = rg.Attention()(latents, x, x)  # 2 latents read 3 tokens
    >>> write = rg.Attention()(x, latents, read.output)  # 3 tokens read the latents
    >>> rg.maps.ProductMap([write.weights, read.weights])[0, 0, 0]
    tensor([0.3333, 0.3333, 0.3333])
    """

    _made_of: ClassVar[str] = "a product of maps, weights.factors"

    def __init__(self, factors: Sequence[AttentionMap], positions: Positions | None = None) -> None:
        """`positions` of queries and keys; by default the queries of the first map and the keys of the last."""
        self.factors = list(factors)
        _check_factors(self.factors)
        first, last = self.factors[0], self.factors[-1]
        self.positions = positions or Positions(first.positions.start, last.positions.keys)
        queries, keys = self.positions.query(slice(0, first.shape[2]), first.device), self.positions.key(first.device)
        self.grid = Grid(first.grid.batch, first.grid.head, queries, keys, self.positions)
        self.attention = Attention()  # without a mask: any pair may have a weight

    @cached_property
    def is_signed(self) -> bool:  # type: ignore[override]
        return any(factor.is_signed for factor in self.factors)

    @cached_property
    def has_shares(self) -> bool:  # type: ignore[override]
        return all(factor.has_shares for factor in self.factors)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (*self.factors[0].shape[:3], self.factors[-1].shape[3])

    @property
    def _dtype(self) -> torch.dtype:
        return reduce(torch.promote_types, (factor._dtype for factor in self.factors))

    @property
    def _bytes_per_weight(self) -> int:
        return 2 * self._item_bytes + max(factor._bytes_per_weight for factor in self.factors)

    @checked
    def select(self, batch: Index, head: Index) -> ProductMap:
        """The map of some batch entries and heads (indices), still lazy."""
        b, h = self._selected_indices(batch, head)
        return ProductMap([factor.select(b, h) for factor in self.factors], self.positions)

    def _weights(self, rows: Tensor | slice, cols: Tensor | slice) -> Tensor:
        """The wanted rows of the first map times all of the maps between, and the wanted columns of the last."""
        last = len(self.factors) - 1
        tiles = (
            factor._weights(
                rows if number == 0 else torch.arange(factor.shape[2]),
                cols if number == last else torch.arange(factor.shape[3]),
            )
            for number, factor in enumerate(self.factors)
        )
        return reduce(torch.matmul, (tile.to(self._dtype) for tile in tiles))

    @property
    def requires_grad(self) -> bool:
        return any(factor.requires_grad for factor in self.factors)

    def live_rows(self) -> LiveRows:
        """The wanted rows of the first map, times all rows of each other; then the wanted columns of the product."""
        sizes = [factor.shape[2:] for factor in self.factors]

        def combine(parts: list[Any]) -> Rows:
            def rows(queries: Tensor | slice, keys: Spans) -> tuple[Tensor, None]:
                tiles = (
                    part(queries if number == 0 else slice(0, I), Spans.of((0, J)))[0]
                    for number, (part, (I, J)) in enumerate(zip(parts, sizes, strict=True))
                )
                product = reduce(torch.matmul, (tile.to(self._dtype) for tile in tiles))
                return product[..., keys.tensor(product.device)], None

            return rows

        return joined_rows([factor.live_rows() for factor in self.factors], combine)


def _check_factors(factors: list[AttentionMap]) -> None:
    """Refuse maps that cannot be multiplied in this order."""
    shapes = [factor.shape for factor in factors]
    if not factors:
        raise RegardError("ProductMap: give at least one map.")
    for left, right in pairwise(shapes):
        if left[:2] != right[:2] or left[3] != right[2]:
            raise RegardError(
                f"ProductMap: maps of shapes {left} and {right} cannot be multiplied. They need the same batch and "
                "heads, and as many keys in the first as there are queries in the second."
            )


# `KeyGroupMap`: the map over tokens of an attention whose keys stand for many tokens.


class KeyGroupMap(RecomputedMap):
    """The weights (B, H, I, J) of tokens: W C, where W are the weights of the groups and C the tokens of each group.

    `by_group` is the map W (B, H, I, M) by group. The row of a query over tokens is computed from its row over groups.

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 1, 4, 8)
    >>> weights = rg.composites.Grouped(rg.Attention(), rg.composites.MeanGroups(2))(x, x, x).weights
    >>> weights[0, 0, 0], weights.by_group[0, 0, 0]
    (tensor([0.2500, 0.2500, 0.2500, 0.2500]), tensor([0.5000, 0.5000]))
    """

    _made_of: ClassVar[str] = "the map of groups of keys, weights.by_group, times the tokens of each group"
    _stale: ClassVar[str] = (
        "weights: the matrices of the groups were changed in place since attend ran (by an optimizer step, perhaps), "
        "so the weights cannot be recomputed. Read them before the change, or call attend again."
    )

    def __init__(self, by_group: AttentionMap, groups: KeyGroups, positions: Positions) -> None:
        """`groups` are C, of whose tensors the map keeps a snapshot; `positions` those of the queries and all tokens.

        The mask of the map is causal if that of the groups hides all later tokens; else every token may have a weight.
        """
        self.by_group, self.positions = by_group, positions
        originals = Originals.of(*split_tensors(groups))
        self._tensors = [tensor_snapshot(tensor) for tensor in originals.tensors]
        self._versions = versions_of(self._shared_tensors())
        self.groups: KeyGroups = originals.template.around(self._tensors)
        self._live = originals if autograd_records(originals.tensors) else None
        grid = by_group.grid
        self.grid = Grid(grid.batch, grid.head, grid.query, positions.key(grid.device), positions)
        mask = by_group.attention.mask
        is_causal = sees_no_later_key(mask.mask if isinstance(mask, GroupMask) else mask)
        self.attention = Attention(mask=causal() if is_causal else None)

    def _shared_tensors(self) -> list[Tensor]:
        return self._tensors

    @cached_property
    def is_signed(self) -> bool:  # type: ignore[override]
        return self.by_group.is_signed or any(bool((tensor < 0).any()) for tensor in self._tensors)

    @property
    def has_shares(self) -> bool:  # type: ignore[override]
        return self.by_group.has_shares and self.groups.are_means

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (*self.by_group.shape[:3], len(self.positions.keys))

    @property
    def _dtype(self) -> torch.dtype:
        return self.by_group._dtype

    @property
    def _bytes_per_weight(self) -> int:
        return 4 * self._item_bytes + self.by_group._bytes_per_weight

    @checked
    def select(self, batch: Index, head: Index) -> KeyGroupMap:
        """The map of some batch entries and heads (indices), still lazy."""
        groups = self.groups if self._live is None else self._live.template.around(self._live.tensors)
        groups = groups.select(indices("weights.select", "batch", batch, self.shape[0]))
        return KeyGroupMap(self.by_group.select(batch, head), groups, self.positions)

    @property
    def requires_grad(self) -> bool:
        return self.by_group.requires_grad or self._live is not None

    def live_rows(self) -> LiveRows:
        """Rows over tokens, of the live rows over groups and the tensors of C with their graphs (or the snapshot)."""
        self._check_unchanged()
        originals = self._live or Originals.of(*split_tensors(self.groups))
        if originals.are_changed:
            return LiveRows.refused(CHANGED)
        all_groups = Spans.of((0, self.by_group.shape[3]))

        def combine(parts: list[Any]) -> Rows:
            rows_by_group, tensors = parts  # in the order of `joined_rows` below
            groups: KeyGroups = originals.template.around(tensors)

            def rows(queries: Tensor | slice, keys: Spans) -> tuple[Tensor, None]:
                weights, _ = rows_by_group(queries, all_groups)
                return groups.unfolded(weights, keys.tensor("cpu"), self.shape[3]), None  # no more precise logarithms

            return rows

        return joined_rows([self.by_group.live_rows(), extra_tensors(originals.tensors)], combine)

    def _weights(self, rows: Tensor | slice, cols: Tensor | slice) -> Tensor:
        """The wanted rows of W on all groups, times the wanted columns of C."""
        self._check_unchanged()
        by_group = self.by_group._weights(rows, torch.arange(self.by_group.shape[3]))
        columns = torch.arange(self.shape[3])[cols] if isinstance(cols, slice) else cols
        return self.groups.unfolded(by_group, columns, self.shape[3])
