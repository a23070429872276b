"""`KeyGroupMap`: the map over tokens of an attention whose keys stand for many tokens."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.attention import Attention
from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.spans import Spans
from regard.maps.attention_map import AttentionMap
from regard.maps.gradients import LiveRows, Rows, given, joined_rows
from regard.maps.indices import Index, indices
from regard.maps.scored_map import CHANGED
from regard.masks import causal
from regard.pieces.contents import Originals, split_tensors, tensor_snapshot, versions_of
from regard.pieces.grid import Grid
from regard.pieces.key_groups import GroupMask, KeyGroups
from regard.pieces.mask import sees_no_later_key


class KeyGroupMap(AttentionMap):
    """The weights (B, H, I, J) of tokens: W C, where W are the weights of the groups and C the tokens of each group.

    `by_group` is the map W (B, H, I, M) by group. The row of a query over tokens is computed from its row over groups.

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 1, 4, 8)
    >>> weights = rg.composites.Grouped(rg.Attention(), rg.composites.MeanGroups(2))(x, x, x).weights
    >>> weights[0, 0, 0], weights.by_group[0, 0, 0]
    (tensor([0.2500, 0.2500, 0.2500, 0.2500]), tensor([0.5000, 0.5000]))
    """

    _made_of: ClassVar[str] = "the map of groups of keys, weights.by_group, times the tokens of each group"

    def __init__(self, by_group: AttentionMap, groups: KeyGroups, positions: Positions) -> None:
        """`positions` are those of the queries and of all tokens."""
        self.by_group, self.positions = by_group, positions
        originals = Originals.of(*split_tensors(groups))
        self._tensors = [tensor_snapshot(tensor) for tensor in originals.tensors]
        self._versions = versions_of(self._tensors)
        self.groups: KeyGroups = originals.template.around(self._tensors)
        is_live = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in originals.tensors)
        self._live = originals if is_live else None
        grid = by_group.grid
        self.grid = Grid(grid.batch, grid.head, grid.query, positions.key(grid.device), positions)
        mask = by_group.attention.mask
        is_causal = sees_no_later_key(mask.mask if isinstance(mask, GroupMask) else mask)
        self.attention = Attention(mask=causal() if is_causal else None)

    @cached_property
    def is_signed(self) -> bool:  # type: ignore[override]
        return self.by_group.is_signed or any(bool((tensor < 0).any()) for tensor in self._tensors)

    @property
    def has_shares(self) -> bool:  # type: ignore[override]
        return self.by_group.has_shares and self.groups.are_means

    def _check_unchanged(self) -> None:
        if versions_of(self._tensors) != self._versions:
            raise RegardError(
                "weights: the matrices of the groups were changed in place since attend ran (by an optimizer step, "
                "perhaps), so the weights cannot be recomputed. Read them before the change, or call attend again."
            )

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
        self._check_unchanged()
        originals = self._live or Originals.of(*split_tensors(self.groups))
        if originals.are_changed:
            return LiveRows.refused(CHANGED)
        all_groups = Spans.of((0, self.by_group.shape[3]))

        def combine(parts: list[Any]) -> Rows:
            groups: KeyGroups = originals.template.around(parts[1])

            def rows(queries: Tensor | slice, keys: Spans) -> tuple[Tensor, None]:
                by_group = parts[0](queries, all_groups)[0]
                return groups.unfolded(by_group, keys.tensor("cpu"), self.shape[3]), None

            return rows

        return joined_rows([self.by_group.live_rows(), given(originals.tensors)], combine)

    def _weights(self, rows: Tensor | slice, cols: Tensor | slice) -> Tensor:
        self._check_unchanged()
        by_group = self.by_group._weights(rows, torch.arange(self.by_group.shape[3]))
        columns = torch.arange(self.shape[3])[cols] if isinstance(cols, slice) else cols
        return self.groups.unfolded(by_group, columns, self.shape[3])
