"""Masks: who may attend to whom. True = may attend, everywhere; `&`, `|` and `~` compose.

A mask answers three questions. `allowed(grid)` decides every pair of a tile. `any_allowed(start, stop)`
and `all_allowed(start, stop)` speak of whole stretches without touching n x n: the key positions that
SOME query of [start, stop) may attend to, and those that EVERY one attends to. Engines skip
what lies outside the first, and need no mask inside the second.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from regard.checks import Count, Size, checked
from regard.errors import RegardError
from regard.pieces.grid import Grid
from regard.pieces.mask_checks import check_batch
from regard.positions import Positions
from regard.shapes import Sizes, to_device
from regard.spans import EMPTY, EVERYTHING, INFINITY, Spans


class Mask(ABC):
    """Base of all masks. A new one defines `allowed`; `any_allowed` and `all_allowed` make it fast.

    `relative` says that the answer depends on j - i alone, for every batch entry and head;
    then one tile serves a whole diagonal of blocks. `keys_only` says that it does not depend on
    the query; then sums over keys serve all queries. `batched` says that batch entries may differ.

    A mask is a value: it copies the tensors it is given, so a later change of these does not reach it.
    It has no truth value, since `and`, `or` and `not` would silently drop a mask.

    >>> import regard as rg
    >>> class every_other(rg.Mask):
    ...     def allowed(self, grid):
    ...         return grid.distance % 2 == 0
    >>> grid = rg.Grid.whole(rg.Positions.aligned_to_end(3, 3), 1, 1, 3)
    >>> (rg.causal() & every_other()).allowed(grid)[0, 0].int().tolist()
    [[1, 0, 0], [0, 1, 0], [1, 0, 1]]
    """

    relative: bool = False
    keys_only: bool = False
    batched: bool = True

    @abstractmethod
    def allowed(self, grid: Grid) -> Tensor:
        """A boolean tensor that broadcasts against the (B, H, I, J) tile; True = may attend."""

    def any_allowed(self, start: int, stop: int) -> Spans:
        """Key positions that some query in [start, stop) may attend to (or more, never fewer)."""
        return EVERYTHING

    def all_allowed(self, start: int, stop: int) -> Spans:
        """Key positions that every query in [start, stop) attends to (or fewer, never more)."""
        return EMPTY

    def edges(self, start: int, stop: int) -> Sequence[int]:
        """Query positions inside (start, stop), ascending, at which the answer changes at once: where to cut."""
        return ()

    def of_entry(self, entry: int) -> Mask:
        """The same mask for one batch entry, where its spans are narrower than those of all; itself if they are not."""
        return self

    def select(self, index: Tensor) -> Mask:
        """The mask of the batch entries at `index`, in that order.

        Whatever reorders or repeats a batch, as a beam search does, must select from its masks too.

        >>> import torch, regard as rg
        >>> rows = rg.padding([3, 1]).select(torch.tensor([1, 0, 0]))
        >>> rows.allowed(rg.Grid.whole(rg.Positions.of(0, 1, 4), 3, 1, 1))[:, 0, 0].int().tolist()
        [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0]]
        """
        if self.relative or not self.batched:
            return self
        if type(self).check is not Mask.check:
            raise RegardError(
                f"{type(self).__name__}.select: this mask checks the sizes it was made for, so only it can say what "
                "its rows are. Define select(index) in it, or batched = False if all batch entries are alike."
            )
        return Selected(self, index.clone())

    def check(self, sizes: Sizes, positions: Positions) -> None:  # noqa: B027 - most masks fit any size
        """Refuse sizes that the mask was not made for."""

    def __bool__(self) -> bool:
        raise RegardError(
            f"{self!r}: a mask has no truth value. Compose masks with & (both), | (either) and ~ (not), where Python's "
            "`and`, `or` and `not` would drop one of them; whether there is a mask is `mask is not None`."
        )

    def __and__(self, other: Mask) -> Mask:
        return Both(self, _mask(other, "&"))

    def __or__(self, other: Mask) -> Mask:
        return Either(self, _mask(other, "|"))

    def __rand__(self, other: object) -> Mask:
        return Both(_mask(other, "&"), self)

    def __ror__(self, other: object) -> Mask:
        return Either(_mask(other, "|"), self)

    def __invert__(self) -> Mask:
        return Not(self)


def _mask(other: object, sign: str) -> Mask:
    if isinstance(other, Mask):
        return other
    raise RegardError(
        f"mask {sign} {type(other).__name__}: only masks compose. Wrap a boolean tensor as regard.mask_tensor(tensor)."
    )


@dataclass(frozen=True, eq=False)
class Both(Mask):
    """left & right: allowed where both allow."""

    left: Mask
    right: Mask

    @property
    def relative(self) -> bool:  # type: ignore[override]
        return self.left.relative and self.right.relative

    @property
    def keys_only(self) -> bool:  # type: ignore[override]
        return self.left.keys_only and self.right.keys_only

    @property
    def batched(self) -> bool:  # type: ignore[override]
        return self.left.batched or self.right.batched

    def allowed(self, grid: Grid) -> Tensor:
        return self.left.allowed(grid) & self.right.allowed(grid)

    def any_allowed(self, start: int, stop: int) -> Spans:
        return self.left.any_allowed(start, stop) & self.right.any_allowed(start, stop)

    def all_allowed(self, start: int, stop: int) -> Spans:
        return self.left.all_allowed(start, stop) & self.right.all_allowed(start, stop)

    def edges(self, start: int, stop: int) -> Sequence[int]:
        return sorted({*self.left.edges(start, stop), *self.right.edges(start, stop)})

    def of_entry(self, entry: int) -> Mask:
        left, right = self.left.of_entry(entry), self.right.of_entry(entry)
        return self if left is self.left and right is self.right else Both(left, right)

    def select(self, index: Tensor) -> Mask:
        left, right = self.left.select(index), self.right.select(index)
        return self if left is self.left and right is self.right else Both(left, right)

    def check(self, sizes: Sizes, positions: Positions) -> None:
        self.left.check(sizes, positions)
        self.right.check(sizes, positions)

    def __repr__(self) -> str:
        return f"({self.left!r} & {self.right!r})"


@dataclass(frozen=True, eq=False)
class Either(Mask):
    """left | right: allowed where at least one allows."""

    left: Mask
    right: Mask

    @property
    def relative(self) -> bool:  # type: ignore[override]
        return self.left.relative and self.right.relative

    @property
    def keys_only(self) -> bool:  # type: ignore[override]
        return self.left.keys_only and self.right.keys_only

    @property
    def batched(self) -> bool:  # type: ignore[override]
        return self.left.batched or self.right.batched

    def allowed(self, grid: Grid) -> Tensor:
        return self.left.allowed(grid) | self.right.allowed(grid)

    def any_allowed(self, start: int, stop: int) -> Spans:
        return self.left.any_allowed(start, stop) | self.right.any_allowed(start, stop)

    def all_allowed(self, start: int, stop: int) -> Spans:
        return self.left.all_allowed(start, stop) | self.right.all_allowed(start, stop)

    def edges(self, start: int, stop: int) -> Sequence[int]:
        return sorted({*self.left.edges(start, stop), *self.right.edges(start, stop)})

    def of_entry(self, entry: int) -> Mask:
        left, right = self.left.of_entry(entry), self.right.of_entry(entry)
        return self if left is self.left and right is self.right else Either(left, right)

    def select(self, index: Tensor) -> Mask:
        left, right = self.left.select(index), self.right.select(index)
        return self if left is self.left and right is self.right else Either(left, right)

    def check(self, sizes: Sizes, positions: Positions) -> None:
        self.left.check(sizes, positions)
        self.right.check(sizes, positions)

    def __repr__(self) -> str:
        return f"({self.left!r} | {self.right!r})"


@dataclass(frozen=True, eq=False)
class Not(Mask):
    """~mask: allowed where the mask forbids. `any_allowed` and `all_allowed` swap and complement."""

    mask: Mask

    @property
    def relative(self) -> bool:  # type: ignore[override]
        return self.mask.relative

    @property
    def keys_only(self) -> bool:  # type: ignore[override]
        return self.mask.keys_only

    @property
    def batched(self) -> bool:  # type: ignore[override]
        return self.mask.batched

    def allowed(self, grid: Grid) -> Tensor:
        return ~self.mask.allowed(grid)

    def any_allowed(self, start: int, stop: int) -> Spans:
        return ~self.mask.all_allowed(start, stop)

    def all_allowed(self, start: int, stop: int) -> Spans:
        return ~self.mask.any_allowed(start, stop)

    def edges(self, start: int, stop: int) -> Sequence[int]:
        return self.mask.edges(start, stop)

    def of_entry(self, entry: int) -> Mask:
        mask = self.mask.of_entry(entry)
        return self if mask is self.mask else Not(mask)

    def select(self, index: Tensor) -> Mask:
        mask = self.mask.select(index)
        return self if mask is self.mask else Not(mask)

    def check(self, sizes: Sizes, positions: Positions) -> None:
        self.mask.check(sizes, positions)

    def __repr__(self) -> str:
        return f"~{self.mask!r}"


@dataclass(frozen=True, eq=False)
class Selected(Mask):
    """`mask` with batch entry b replaced by entry index[b]; the default result of `select`.

    `any_allowed` and `all_allowed` speak of all batch entries, so those of `mask` are valid for any selection.
    """

    mask: Mask
    index: Tensor

    @property
    def keys_only(self) -> bool:  # type: ignore[override]
        return self.mask.keys_only

    def allowed(self, grid: Grid) -> Tensor:
        return self.mask.allowed(replace(grid, batch=to_device(self.index, grid.device)[grid.batch]))

    def any_allowed(self, start: int, stop: int) -> Spans:
        return self.mask.any_allowed(start, stop)

    def all_allowed(self, start: int, stop: int) -> Spans:
        return self.mask.all_allowed(start, stop)

    def edges(self, start: int, stop: int) -> Sequence[int]:
        return self.mask.edges(start, stop)

    def select(self, index: Tensor) -> Mask:
        return Selected(self.mask, self.index.index_select(0, index.to(self.index.device)))

    def check(self, sizes: Sizes, positions: Positions) -> None:
        check_batch(repr(self), len(self.index), sizes)

    def __repr__(self) -> str:
        return f"{self.mask!r} of {len(self.index)} selected batch entries"


def sees_no_later_key(mask: Mask | None) -> bool:
    """Whether no query may attend to a later key, as far as the structure of the mask tells.

    >>> import regard as rg
    >>> masks = rg.causal() & rg.padding([3]), rg.causal() | rg.prefix(2), ~rg.causal(), ~~rg.causal(), None
    >>> [sees_no_later_key(mask) for mask in masks]
    [True, False, False, True, False]
    """
    if isinstance(mask, Both):
        return sees_no_later_key(mask.left) or sees_no_later_key(mask.right)
    if isinstance(mask, Either):
        return sees_no_later_key(mask.left) and sees_no_later_key(mask.right)
    return mask is not None and mask.relative and Spans(((-INFINITY, 1),)).covers(mask.any_allowed(0, 1))


@dataclass(frozen=True)
class causal(Mask):
    """j <= i: no query sees a later key (Vaswani et al. 2017, arXiv:1706.03762, section 3.1).

    Positions are compared, so 2 queries against 5 keys stand at positions 3 and 4 and see
    4 and 5 keys. torch's `is_causal=True` would let them see 1 and 2.

    >>> import regard as rg
    >>> grid = rg.Grid.whole(rg.Positions.aligned_to_end(2, 5), 1, 1, 2)
    >>> rg.causal().allowed(grid)[0, 0].int().tolist()
    [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    """

    relative = True
    batched = False

    def allowed(self, grid: Grid) -> Tensor:
        return grid.j <= grid.i

    def any_allowed(self, start: int, stop: int) -> Spans:
        return Spans(((-INFINITY, stop),))

    def all_allowed(self, start: int, stop: int) -> Spans:
        return Spans(((-INFINITY, start + 1),))


@checked
@dataclass(frozen=True)
class window(Mask):
    """i - size < j < i + size: the `size` nearest keys on each side, the query's own included.

    `causal() & window(w)` sees w keys, the rule of Mistral and Hugging Face. attention-gym,
    x-transformers, jax and local-attention see w + 1 for the same number.

    >>> import regard as rg
    >>> grid = rg.Grid.whole(rg.Positions.aligned_to_end(4, 4), 1, 1, 4)
    >>> rg.window(2).allowed(grid)[0, 0].int().tolist()
    [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    """

    size: Size
    relative = True
    batched = False

    def allowed(self, grid: Grid) -> Tensor:
        return grid.distance.abs() < self.size

    def any_allowed(self, start: int, stop: int) -> Spans:
        return Spans.of((start - self.size + 1, stop + self.size - 1))

    def all_allowed(self, start: int, stop: int) -> Spans:
        return Spans.of((stop - self.size, start + self.size))


@checked
@dataclass(frozen=True)
class dilated(Mask):
    """j = i + m * `dilation`, |m| < `size`: a window with gaps (Longformer, arXiv:2004.05150, 3.1).

    >>> import regard as rg
    >>> grid = rg.Grid.whole(rg.Positions.of(3, 1, 7), 1, 1, 1)  # one query, at position 3 of 7
    >>> rg.dilated(size=2, dilation=3).allowed(grid)[0, 0, 0].int().tolist()
    [1, 0, 0, 1, 0, 0, 1]
    """

    size: Size
    dilation: Size
    relative = True
    batched = False

    @property
    def _reach(self) -> int:
        return (self.size - 1) * self.dilation + 1

    def allowed(self, grid: Grid) -> Tensor:
        distance = grid.distance
        return (distance.abs() < self._reach) & (distance % self.dilation == 0)

    def any_allowed(self, start: int, stop: int) -> Spans:
        return window(self._reach).any_allowed(start, stop)

    def all_allowed(self, start: int, stop: int) -> Spans:
        return window(self._reach).all_allowed(start, stop) if self.dilation == 1 else EMPTY


@checked
@dataclass(frozen=True)
class prefix(Mask):
    """j < `length`: the first keys, open to everyone. `causal() | prefix(p)` is a prefix LM (Raffel 2020).

    >>> import regard as rg
    >>> grid = rg.Grid.whole(rg.Positions.aligned_to_end(4, 4), 1, 1, 4)
    >>> (rg.causal() | rg.prefix(2)).allowed(grid)[0, 0].int().tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    """

    length: Count
    keys_only = True
    batched = False

    def allowed(self, grid: Grid) -> Tensor:
        return grid.j < self.length

    def any_allowed(self, start: int, stop: int) -> Spans:
        return Spans(((-INFINITY, self.length),))

    def all_allowed(self, start: int, stop: int) -> Spans:
        return self.any_allowed(start, stop)


@checked
@dataclass(frozen=True)
class block_local(Mask):
    """Keys of the query's own block of `size`, and of `before` / `after` neighbouring blocks.

    floor(j / size) - floor(i / size) lies in [-before, after]. Blocks of BigBird and of
    local-attention are these; a window slides with the query, a block does not.

    >>> import regard as rg
    >>> grid = rg.Grid.whole(rg.Positions.aligned_to_end(4, 4), 1, 1, 4)
    >>> rg.block_local(2).allowed(grid)[0, 0].int().tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    """

    size: Size
    before: Count = 0
    after: Count = 0
    batched = False

    def allowed(self, grid: Grid) -> Tensor:
        apart = grid.j // self.size - grid.i // self.size
        return (apart >= -self.before) & (apart <= self.after)

    def any_allowed(self, start: int, stop: int) -> Spans:
        first, last = start // self.size, (stop - 1) // self.size
        return Spans.of(((first - self.before) * self.size, (last + self.after + 1) * self.size))

    def all_allowed(self, start: int, stop: int) -> Spans:
        first, last = start // self.size, (stop - 1) // self.size
        return Spans.of(((last - self.before) * self.size, (first + self.after + 1) * self.size))

    def edges(self, start: int, stop: int) -> Sequence[int]:
        return range((start // self.size + 1) * self.size, stop, self.size)
