"""`SameGroup`: the mask of packed sequences, chunks or images in a text, which may differ between batch entries."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import Sizes, to_device
from regard.base.spans import EMPTY, Spans
from regard.pieces.data_masks import documents
from regard.pieces.grid import Grid, at
from regard.pieces.mask import Mask
from regard.pieces.mask_checks import own_copy, select_entries


def groups_mask(groups: Tensor) -> Mask:
    """The mask that allows pairs of the same group, for group numbers (B, n); `documents` if all entries are equal.

    B and n may be 0.

    >>> groups_mask(torch.tensor([[0, 0, 1, 1, 1]]))
    documents([2, 3])
    """
    equal = len(groups) > 0 and bool((groups == groups[:1]).all())
    if equal and bool((groups[0] >= 0).all() & (groups[0].diff() >= 0).all()):
        return documents(torch.unique_consecutive(groups[0], return_counts=True)[1].tolist())
    return SameGroup(groups[:1] if equal else groups)


@dataclass(frozen=True, eq=False)
class SameGroup(Mask):
    """Allows pairs with groups[b, i] = groups[b, j] >= 0; negative numbers are in no group. Groups may have gaps."""

    groups: Tensor = field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", own_copy(self.groups))

    def allowed(self, grid: Grid) -> Tensor:
        of_query, of_key = SameGroup.numbers(self, grid)  # a subclass may have none
        of_query = of_query[:, None, :, None]
        return (of_query == of_key[:, None, None]) & (of_query >= 0)

    def numbers(self, grid: Grid) -> tuple[Tensor, Tensor]:
        """The group of each query and of each key of a tile, (B or 1, I) and (B or 1, J)."""
        groups = to_device(self.groups, grid.device)
        groups = groups if len(groups) == 1 else at("SameGroup", "batch entries", groups, 0, grid.batch)
        return at("SameGroup", "queries", groups, 1, grid.query), at("SameGroup", "keys", groups, 1, grid.key)

    def any_allowed(self, start: int, stop: int) -> Spans:
        """From the first place of a group of these queries to the last one, with all groups between."""
        first, last, _, _ = self._ends
        rows = slice(max(start, 0), max(stop, 0))
        return Spans.of((int(first[rows].min()), int(last[rows].max()) + 1)) if len(first[rows]) else EMPTY

    def all_allowed(self, start: int, stop: int) -> Spans:
        """The run of the first query, if it has all these queries; a group may have more keys in other runs."""
        _, _, first, last = self._ends
        if not 0 <= start < stop <= len(first) or int(last[start]) < stop - 1:
            return EMPTY
        return Spans.of((int(first[start]), int(last[start]) + 1))

    def of_entry(self, entry: int) -> Mask:
        return self if len(self.groups) == 1 else groups_mask(self._entries(torch.tensor([entry], device="cpu")))

    def select(self, index: Tensor) -> Mask:
        return self if len(self.groups) == 1 else SameGroup(self._entries(index))

    def _entries(self, index: Tensor) -> Tensor:
        return select_entries("SameGroup", self.groups, index)

    def own_sizes(self) -> tuple[int | None, None]:
        return None if len(self.groups) == 1 else len(self.groups), None

    def check(self, sizes: Sizes, positions: Positions) -> None:
        batch, length = self.groups.shape
        used = positions.queries(sizes.I) | positions.keys
        if batch not in (1, sizes.B) or not Spans(((0, length),)).covers(used):
            positions_used = f"positions up to {used.hull().intervals[0][1] - 1}" if used else "no position"
            raise RegardError(
                f"SameGroup: made for a batch of {batch} and {length} positions, used with a batch of {sizes.B} and "
                f"{positions_used}. Give every position its group."
            )

    @cached_property
    def _ends(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Four tensors (n,), for each position: the first and last place of its group, and those of its unbroken run.

        Groups are as wide as in the entry where they are widest, for `any_allowed`. Runs are as narrow as in the entry
        where they are narrowest, for `all_allowed`. A position without a group has an empty interval in both. A batch
        without entries allows nothing, like an entry without groups.
        """
        groups = self.groups.cpu() if len(self.groups) else torch.full((1, self.groups.shape[1]), -1, device="cpu")
        batch, length = groups.shape
        place = torch.arange(length, device="cpu").expand(batch, -1)
        numbers, number = torch.unique(groups, return_inverse=True)
        greatest = place.new_full((batch, len(numbers)), length)
        first = greatest.scatter_reduce(1, number, place, "amin").gather(1, number)
        last = torch.zeros_like(greatest).scatter_reduce(1, number, place, "amax").gather(1, number)
        has_none = groups < 0
        begins = F.pad(groups.diff() != 0, (1, 0), value=True)
        run_first = place.masked_fill(~begins, 0).cummax(1).values
        ends = begins.roll(-1, 1)  # before a begin; the last position too, since the first begins a run
        run_last = place.masked_fill(~ends, length).flip(1).cummin(1).values.flip(1)
        return (
            first.masked_fill(has_none, length).amin(0),
            last.masked_fill(has_none, 0).amax(0),
            run_first.masked_fill(has_none, length).amax(0),
            run_last.amin(0),
        )

    def __repr__(self) -> str:
        num_groups = int(self.groups.max()) + 1 if self.groups.numel() else 0
        return f"SameGroup({num_groups} groups, batch {len(self.groups)})"
