"""`chosen_keys`: the mask of keys, or blocks of keys, that were chosen for each query."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import and_

import torch
from torch import Tensor

from regard.base.checks import Count, Size, checked
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import Sizes, to_device, without_transforms
from regard.base.spans import EMPTY, Spans
from regard.pieces.grid import Grid, at
from regard.pieces.mask import Mask, conjuncts
from regard.pieces.mask_checks import check_batch, own_copy, select_entries

#: A place in a row of ids that holds no id. It is greater than every id, so it stands at the end of a sorted row.
NO_ID = torch.iinfo(torch.int32).max
#: Shorter gaps between chosen keys are not skipped: many short intervals cost more than the pairs between them.
SHORT_GAP = 63
#: Ids are below this number, so a count of every id fits in memory.
LARGEST = 1 << 27


@checked
@dataclass(frozen=True, eq=False)
class chosen_keys(Mask):
    """Each query may attend to the keys that were chosen for it.

    `ids` are integers (B or 1, heads, I, K): row i has at most K positions of keys, in any order, and a negative number
    is no key. With `size` above 1 they are numbers of blocks, and block n has the keys n * size to (n + 1) * size - 1.
    One head of ids holds for all query heads, or each for `num_heads` / heads of them, as key heads do. `start` is the
    position of the first query. The mask keeps a copy of the ids, as 4-byte integers: 4 I K bytes for each head.

    >>> import torch, regard as rg
    >>> mask = rg.causal() & rg.masks.chosen_keys(torch.tensor([[[[0, -1], [0, 1], [2, 0]]]]))
    >>> mask.dense(3).int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """

    ids: Tensor = field(repr=False)
    size: Size = 1
    num_heads: Size | None = None
    start: Count = 0
    #: The block of each position, (B or 1, n), if blocks begin anew with each document; None: position // size.
    blocks: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        ids = self.ids
        if not isinstance(ids, Tensor) or ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
            kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            raise RegardError(f"chosen_keys: expected integers, the positions of the chosen keys, got {kind}.")
        if ids.ndim != 4 or 0 in ids.shape[:2]:
            raise RegardError(
                f"chosen_keys: expected ids of shape (batch or 1, heads or 1, queries, number of keys), got "
                f"{tuple(ids.shape)}. For ids (batch, queries, keys) of all heads: ids[:, None]."
            )
        heads = ids.shape[1]
        if self.num_heads is not None and self.num_heads % heads:
            raise RegardError(
                f"chosen_keys: {heads} heads of ids for {self.num_heads} query heads: the first must divide the second."
            )
        ids = ids.long()  # smaller integers would overflow
        if ids.numel() and ids.max() >= LARGEST:
            raise RegardError(f"chosen_keys: {int(ids.max())} is no position of a key. A negative number is no key.")
        ids = own_copy(torch.where(ids < 0, NO_ID, ids).int()).sort(-1).values
        ids[..., 1:].masked_fill_(ids.diff() == 0, NO_ID)  # a key that is named twice counts once
        object.__setattr__(self, "ids", ids.sort(-1).values)  # sorted again, now with these at the end

    @staticmethod
    def of_sorted(ids: Tensor, size: int, num_heads: int, start: int, blocks: Tensor | None = None) -> chosen_keys:
        """The mask of new ids (B or 1, heads, I, K), int32, sorted and each once, then `NO_ID`: no check, no copy."""
        mask = object.__new__(chosen_keys)
        vars(mask).update(ids=ids, size=size, num_heads=num_heads, start=start, blocks=blocks)
        return mask

    @property
    def batched(self) -> bool:  # type: ignore[override]
        return len(self.ids) != 1

    def allowed(self, grid: Grid) -> Tensor:
        """A flag for each block of the tile, set at the ids of each row, and then copied to the keys of the block."""
        ids = self._rows(grid)
        if self.blocks is not None:
            return self._in_blocks(ids, to_device(self.blocks, grid.device), grid)
        blocks, inverse = torch.unique(grid.key // self.size, return_inverse=True)
        if not len(blocks):
            return torch.zeros(*ids.shape[:3], 0, dtype=torch.bool, device=grid.device)
        place = torch.searchsorted(blocks, ids.long()).clamp_(max=len(blocks) - 1)
        place.masked_fill_(blocks[place] != ids, len(blocks))  # ids of other tiles set a last flag, which is dropped
        flags = torch.zeros(*ids.shape[:3], len(blocks) + 1, dtype=torch.bool, device=grid.device)
        flags = flags.scatter_(3, place, True)[..., :-1]
        is_every_block = len(blocks) == len(inverse) and bool((grid.key.diff() > 0).all())
        return flags if is_every_block else flags[..., inverse]

    @staticmethod
    def _in_blocks(ids: Tensor, blocks: Tensor, grid: Grid) -> Tensor:
        """`allowed` if `blocks` (B or 1, n) gives the block of each position. `NO_ID` sets a flag that is not read."""
        count = int(blocks.max()) + 1 if blocks.numel() else 0
        flags = torch.zeros(*ids.shape[:3], count + 1, dtype=torch.bool, device=grid.device)
        flags.scatter_(3, ids.long().clamp_(max=count), True)
        of_keys = (blocks if len(blocks) == 1 else blocks[grid.batch])[:, None, None, grid.key]
        return flags[..., :count].gather(3, of_keys.expand(*flags.shape[:3], -1))

    def any_allowed(self, start: int, stop: int) -> Spans:
        """The keys that a query of some entry and head has chosen, and those in short gaps between them."""
        ids = self._on_host[:, :, max(start - self.start, 0) : max(stop - self.start, 0)]
        return self._keys(self._counts(ids) > 0).gaps_up_to(SHORT_GAP)

    def all_allowed(self, start: int, stop: int) -> Spans:
        """The keys whose id every row has: as often as there are rows, because a row names an id once."""
        if start < self.start or stop - self.start > self.ids.shape[2]:
            return EMPTY
        ids = self._on_host[:, :, start - self.start : stop - self.start]
        return self._keys(self._counts(ids) == ids.shape[:3].numel(), for_all=True) if ids.numel() else EMPTY

    def of_entry(self, entry: int) -> Mask:
        return self.select(torch.tensor([entry], device="cpu"))

    def select(self, index: Tensor) -> Mask:
        if not self.batched:
            return self
        ids, blocks = (
            x if x is None or len(x) == 1 else select_entries("chosen_keys", x, index) for x in (self.ids, self.blocks)
        )
        return chosen_keys.of_sorted(ids, self.size, self.num_heads, self.start, blocks)  # type: ignore[arg-type]

    def own_sizes(self) -> tuple[int | None, int | None]:
        num_id_heads = self.ids.shape[1]
        return len(self.ids) if self.batched else None, None if num_id_heads == 1 else self.num_heads or num_id_heads

    def check(self, sizes: Sizes, positions: Positions) -> None:
        if self.batched:
            check_batch("chosen_keys", len(self.ids), sizes)
        heads = self.own_sizes()[1]
        if heads not in (None, sizes.H):
            raise RegardError(f"chosen_keys: made for {heads} query heads, used with {sizes.H}.")
        rows = Spans.of((self.start, self.start + self.ids.shape[2]))
        if not rows.covers(positions.queries(sizes.I)):
            raise RegardError(
                f"chosen_keys: has ids for {self.ids.shape[2]} queries from position {self.start} on; this call has "
                f"{sizes.I} queries from position {positions.start} on. Give ids for each query."
            )

    def __repr__(self) -> str:
        what = "keys" if self.size == 1 else f"blocks of {self.size} keys"
        return f"chosen_keys(at most {self.ids.shape[3]} {what} a query, ids {tuple(self.ids.shape)})"

    def _rows(self, grid: Grid) -> Tensor:
        """The ids of a tile, (B or 1, heads of the tile or 1, I, K)."""
        ids = at("chosen_keys", "queries", to_device(self.ids, grid.device), 2, grid.query - self.start)
        ids = at("chosen_keys", "batch entries", ids, 0, grid.batch) if self.batched else ids
        if ids.shape[1] == 1:
            return ids
        of_heads = grid.head // ((self.num_heads or ids.shape[1]) // ids.shape[1])
        return at("chosen_keys", "heads of ids", ids, 1, of_heads)

    def _counts(self, ids: Tensor) -> Tensor:
        """How many rows have each id: element n counts the rows with id n. It has an element for each given block."""
        num_blocks = 0 if self.blocks is None else int(self.blocks.max()) + 1
        return torch.bincount(ids[ids != NO_ID], minlength=num_blocks)

    def _keys(self, flags: Tensor, for_all: bool = False) -> Spans:
        """Positions of the keys in the blocks n with `flags[n]`.

        Given blocks may differ between batch entries: a key must be in such a block in one entry, or in all.
        """
        if self.blocks is not None:
            flagged = flags[self.blocks.cpu()]
            return Spans.where(flagged.all(0) if for_all else flagged.any(0))
        return Spans(tuple((first * self.size, last * self.size) for first, last in Spans.where(flags)))

    @cached_property
    def _on_host(self) -> Tensor:
        with without_transforms():
            return self.ids.cpu()


def chosen_and_rest(mask: Mask | None) -> tuple[chosen_keys | None, Mask | None]:
    """The first `chosen_keys` among the masks that `&` joins, and all others; None for each that is missing.

    >>> import torch, regard as rg
    >>> chosen, rest = chosen_and_rest(rg.causal() & rg.masks.chosen_keys(torch.zeros(1, 1, 3, 1, dtype=int)))
    >>> chosen.size, rest
    (1, causal())
    """
    parts = [] if mask is None else list(conjuncts(mask))
    at = next((n for n, part in enumerate(parts) if isinstance(part, chosen_keys)), None)
    if at is None:
        return None, mask
    rest = parts[:at] + parts[at + 1 :]
    return parts[at], reduce(and_, rest) if rest else None  # type: ignore[return-value]
