"""`Grouped`: attention to groups of tokens, such as block means or learned projections along the sequence."""

from __future__ import annotations

from typing import Any

from regard.attention import Attention
from regard.base.checks import checked
from regard.base.shapes import Sizes
from regard.composites.composite import Composite, CompositeCall, Part, PreparedParts
from regard.maps.combined_map import KeyGroupMap
from regard.masks import causal
from regard.pieces.grid import Grid
from regard.pieces.key_groups import KeyGroups
from regard.pieces.mask import Mask, sees_no_later_key


@checked
class Grouped(Composite):
    """output_i = sum_m w_im (C v)_m: an attention to the keys of M groups, each a sum of tokens.

    The map is over tokens, W C, and its `by_group` is W. The mask is one of tokens: a query attends to a group if the
    mask shows it all tokens of the group.

    >>> import torch, regard as rg
    >>> q, k, v = torch.randn(3, 1, 2, 12, 8)
    >>> weights = rg.composites.Grouped(rg.Attention(), rg.composites.MeanGroups(size=4))(q, k, v).weights
    >>> weights.shape, weights.by_group.shape
    ((1, 2, 12, 12), (1, 2, 12, 3))
    """

    def __init__(self, attention: Attention, groups: KeyGroups) -> None:
        super().__init__()
        self.attention, self.groups = attention, groups

    def pieces(self) -> list[Any]:
        return self.attention.pieces()

    @property
    def mask(self) -> Mask | None:  # type: ignore[override]
        """Causal if no query attends to a later token, else None. `attention.mask` decides about whole groups."""
        return causal() if sees_no_later_key(self.attention.mask) else None

    def prepare(self, call: CompositeCall) -> PreparedParts:
        """One part: the attention, with a mask of groups, to the keys and values of the groups."""
        sizes, mask = Sizes.of(call.query, call.key, call.value), self.attention.mask
        self.groups.check(sizes.J, mask)
        grid = Grid.whole(call.positions, sizes.B, sizes.H, sizes.I, call.key.device)
        groups, of_groups = self.groups.visible(mask, sizes, grid)
        attention = self.attention if of_groups is mask else self.attention.with_mask(of_groups)
        key, value = groups.keys(call.key), groups.values(call.value)
        part = Part(attention, call.query, key, value, groups.positions(call.positions, key.shape[2]))
        return PreparedParts(
            [part], lambda seen: (seen[0].output, KeyGroupMap(seen[0].weights, groups, call.positions))
        )

    def __repr__(self) -> str:
        return f"Grouped({self.attention!r}, {self.groups!r})"
