"""Masks: which keys a query may attend to. True always means "may attend"; `&`, `|` and `~` compose masks.

A mask answers three questions:
- `allowed(grid)`: for each pair of a tile, may the query attend to the key?
- `any_allowed(start, stop)`: which keys are allowed for at least one query of [start, stop)? Engines skip the others.
- `all_allowed(start, stop)`: which keys are allowed for every query of [start, stop)? They need no mask.
The last two answers are intervals of key positions, so they cost no n x n work.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import and_, is_, or_
from typing import Any, ClassVar

from torch import Tensor

from regard.base.checks import Count, Size, checked
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import Sizes, to_device
from regard.base.spans import EMPTY, EVERYTHING, INFINITY, Spans
from regard.base.upper_layers import upper_layer
from regard.pieces.grid import Grid, at
from regard.pieces.mask_checks import check_batch, check_index, select_entries
from regard.pieces.mask_conventions import mask_remedy
from regard.pieces.piece import Piece, set_promises


class Mask(Piece):
    """Base of all masks. A new mask defines `allowed`; `any_allowed` and `all_allowed` make it fast.

    `relative`: the answer depends on j - i only, for every batch entry and head, so one tile serves a whole diagonal
    of blocks. `keys_only`: the answer does not depend on the query, so one sum over keys serves all queries.
    `batched`: batch entries may have different answers. `is_lower_triangular`: it allows exactly the pairs j <= i.
    `real_keys` (B, n): it hides the keys where this tensor is False, and no other pair; None for all other masks.

    A mask is a value: it copies the tensors that it receives, so a later change of these tensors does not change it.
    It has no truth value, because `and`, `or` and `not` would silently drop a mask.

    >>> import regard as rg
    >>> class every_other(rg.masks.Mask):
    ...     def allowed(self, grid):
    ...         return grid.distance % 2 == 0
    >>> grid = rg.types.Grid.whole(rg.types.Positions.aligned_to_end(3, 3), 1, 1, 3)
    >>> (rg.causal() & every_other()).allowed(grid)[0, 0].int().tolist()
    [[1, 0, 0], [0, 1, 0], [1, 0, 1]]
    """

    relative: bool = False
    keys_only: bool = False
    batched: bool = True
    is_lower_triangular: bool = False
    real_keys: Tensor | None = None
    #: Whether later calls use this same object, so that a plan for it is worth keeping although it holds a tensor.
    is_kept: bool = False
    #: Whether it holds other masks or functions. A mask of this package that holds none never changes.
    holds_parts: ClassVar[bool] = False

    @abstractmethod
    def allowed(self, grid: Grid) -> Tensor:
        """A boolean tensor that broadcasts against the (B, H, I, J) tile; True = may attend."""

    def _repr_svg_(self) -> str | None:
        return upper_layer("drawing").mask_svg(self)

    def any_allowed(self, start: int, stop: int) -> Spans:
        """Key positions that at least one query in [start, stop) may attend to; never too few, perhaps too many."""
        return EVERYTHING

    def all_allowed(self, start: int, stop: int) -> Spans:
        """Key positions that every query in [start, stop) may attend to; never too many, perhaps too few."""
        return EMPTY

    def remaining(self, start: int, stop: int, keys: Spans) -> Mask | None:
        """The sub-mask that has to be evaluated for queries [start, stop) and `keys`; None if it allows all pairs."""
        return None if self.all_allowed(start, stop).covers(keys) else self

    def is_same(self, other: Mask | None) -> bool:
        """Whether two masks are equal, and so are their parts; `==` compares combined masks by identity."""
        return self == other

    def numbers(self, grid: Grid) -> tuple[Tensor, Tensor] | None:
        """Group numbers (B or 1, I) and (B or 1, J), or (I,) and (J,); None if the mask has no groups.

        A pair is allowed if and only if its two numbers are equal and at least 0.
        """
        return None

    def edges(self, start: int, stop: int) -> Sequence[int]:
        """Query positions inside (start, stop), ascending, where the allowed keys jump: good places to cut blocks."""
        return ()

    def of_entry(self, entry: int) -> Mask:
        """A mask for one batch entry, if its spans are narrower than those of all entries; else this mask."""
        return self

    def select(self, index: Tensor) -> Mask:
        """The mask of the batch entries at `index`, in that order.

        Code that reorders or repeats the entries of a batch, for example beam search, must select from its masks too.

        >>> import torch, regard as rg
        >>> rows = rg.padding([3, 1]).select(torch.tensor([1, 0, 0]))
        >>> rows.allowed(rg.types.Grid.whole(rg.types.Positions.of(0, 1, 4), 3, 1, 1))[:, 0, 0].int().tolist()
        [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0]]
        """
        if self.relative or not self.batched:
            return self
        if type(self).check is not Mask.check:
            raise RegardError(
                f"{type(self).__name__}.select: this mask has its own check of sizes, so the default select does not "
                "fit it. Define select(index) in the class, or set batched = False if all batch entries are alike."
            )
        check_index(repr(self), index)
        return Selected(self, index.clone())

    def check(self, sizes: Sizes, positions: Positions) -> None:
        """Raise a `RegardError` if the mask does not fit these sizes."""

    def own_sizes(self) -> tuple[int | None, int | None]:
        """The batch entries and the heads that the mask was made for; None where it has no such axis."""
        return None, None

    @checked
    def dense(
        self,
        num_queries: Count,
        num_keys: Count | None = None,
        *,
        batch_size: Size | None = None,
        num_heads: Size | None = None,
    ) -> Tensor:
        """The mask as booleans; True = may attend. Without `num_keys` there are as many keys as queries.

        Queries and keys are aligned to the end, as in `attend`. The result is a matrix (I, J). If the mask has a batch
        or heads of its own, it is (B or 1, H or 1, I, J), which `mask_tensor` and torch's `attn_mask` accept. A
        predicate does not know its sizes: if it reads b or h, give `batch_size` or `num_heads`.

        >>> import regard as rg
        >>> rg.causal().dense(2, 3).int()
        tensor([[1, 1, 0],
                [1, 1, 1]], dtype=torch.int32)
        >>> rg.padding([3, 1]).dense(3).shape
        torch.Size([2, 1, 3, 3])
        """
        I, J = num_queries, num_queries if num_keys is None else num_keys
        positions, own = Positions.aligned_to_end(I, J), self.own_sizes()
        B, H = (mine if given is None else given for given, mine in zip((batch_size, num_heads), own, strict=True))
        num_heads = H or 1
        sizes = Sizes(1 if B is None else B, num_heads, num_heads, I, J, 1, 1)
        self.check(sizes, positions)
        if I and J:
            self._check_axes(positions, B, H)
        allowed = self.allowed(Grid.whole(positions, sizes.B, sizes.H, I)).expand(sizes.B, sizes.H, I, J)
        return (allowed[0, 0] if B is None and H is None else allowed).contiguous()

    def _check_axes(self, positions: Positions, B: int | None, H: int | None) -> None:
        """Refuse an unknown number of entries or heads if the mask reads their index.

        One pair is asked for two entries and two heads: where the mask reads the index, its answer has an axis of 2.
        """
        pair = Grid.whole(positions, 1, 1, 1).first_pair()
        twice = replace(pair, batch=pair.batch.repeat(2), head=pair.head.repeat(2))
        shape = (1,) * 4 + tuple(self.allowed(twice).shape)
        for axis, size, name, noun in ((-4, B, "batch_size", "batch entry"), (-3, H, "num_heads", "head")):
            if size is None and shape[axis] != 1:
                raise RegardError(
                    f"dense: {self!r} reads the index of the {noun} and does not know how many there are. "
                    f"Give {name}: mask.dense({len(positions.keys)}, {name}=...)."
                )

    def __bool__(self) -> bool:
        raise RegardError(
            f"{self!r}: a mask has no truth value, because Python's `and`, `or` and `not` would drop a mask. Compose "
            "masks with & (both), | (either) and ~ (not). To test whether there is a mask, write `mask is not None`."
        )

    def __and__(self, other: Mask) -> Mask:
        return Both(self, _checked(other, "&"))

    def __or__(self, other: Mask) -> Mask:
        return Either(self, _checked(other, "|"))

    def __rand__(self, other: object) -> Mask:
        return Both(_checked(other, "&"), self)

    def __ror__(self, other: object) -> Mask:
        return Either(_checked(other, "|"), self)

    def __invert__(self) -> Mask:
        return Not(self)


def _checked(other: object, sign: str) -> Mask:
    """The other side of `mask & other` or `mask | other`, which must be a mask."""
    if isinstance(other, Mask):
        return other
    raise RegardError(f"mask {sign} {type(other).__name__}: both sides must be masks. {mask_remedy(other)}")


set_promises(
    Mask,
    rules={"allowed"},
    promises={
        *("relative", "keys_only", "batched", "is_lower_triangular", "real_keys"),
        *("any_allowed", "all_allowed", "remaining", "numbers", "edges", "of_entry", "select"),
    },
)


class Composed(Mask):
    """A mask that other masks form: its `parts`, in the order of its arguments."""

    holds_parts = True

    @property
    @abstractmethod
    def parts(self) -> tuple[Mask, ...]: ...

    @property
    def relative(self) -> bool:  # type: ignore[override]
        return all(part.relative for part in self.parts)

    @property
    def keys_only(self) -> bool:  # type: ignore[override]
        return all(part.keys_only for part in self.parts)

    @property
    def batched(self) -> bool:  # type: ignore[override]
        return any(part.batched for part in self.parts)

    def edges(self, start: int, stop: int) -> Sequence[int]:
        return sorted({edge for part in self.parts for edge in part.edges(start, stop)})

    def of_entry(self, entry: int) -> Mask:
        return self._with_parts([part.of_entry(entry) for part in self.parts])

    def select(self, index: Tensor) -> Mask:
        return self._with_parts([part.select(index) for part in self.parts])

    def check(self, sizes: Sizes, positions: Positions) -> None:
        for part in self.parts:
            part.check(sizes, positions)

    def own_sizes(self) -> tuple[int | None, int | None]:
        entries, heads = zip(*(part.own_sizes() for part in self.parts), strict=True)
        return _joined(entries), _joined(heads)

    def _with_parts(self, parts: list[Mask]) -> Mask:
        """The same mask of other parts; this object itself if they are its own."""
        return self if all(map(is_, parts, self.parts)) else type(self)(*parts)


def _joined(sizes: Sequence[int | None]) -> int | None:
    """The size of one axis that parts share: a size of 1 fits every other size, and None is no axis."""
    axis_sizes = [size for size in sizes if size is not None]
    return next((size for size in axis_sizes if size != 1), 1 if axis_sizes else None)


@dataclass(frozen=True, eq=False)
class Pair(Composed):
    """Two masks and one operator, `join`, for the tensors of a tile and for the spans of keys alike."""

    left: Mask
    right: Mask

    @staticmethod
    @abstractmethod
    def join(left: Any, right: Any, /) -> Any: ...

    @property
    def parts(self) -> tuple[Mask, Mask]:
        return self.left, self.right

    def is_same(self, other: Mask | None) -> bool:
        if not isinstance(other, Pair) or type(other) is not type(self):
            return False
        return self.left.is_same(other.left) and self.right.is_same(other.right)

    @property
    def is_lower_triangular(self) -> bool:  # type: ignore[override]
        return self.left.is_lower_triangular and self.right.is_lower_triangular

    def allowed(self, grid: Grid) -> Tensor:
        return self.join(self.left.allowed(grid), self.right.allowed(grid))

    def any_allowed(self, start: int, stop: int) -> Spans:
        return self.join(self.left.any_allowed(start, stop), self.right.any_allowed(start, stop))

    def all_allowed(self, start: int, stop: int) -> Spans:
        return self.join(self.left.all_allowed(start, stop), self.right.all_allowed(start, stop))


class Both(Pair):
    """left & right: allowed where both allow."""

    join = staticmethod(and_)

    def remaining(self, start: int, stop: int, keys: Spans) -> Mask | None:
        """Without each side that allows all pairs here; None without both."""
        left, right = (part.remaining(start, stop, keys) for part in self.parts)
        if left is None or right is None:
            return right if left is None else left
        return self._with_parts([left, right])

    def __repr__(self) -> str:
        return f"({self.left!r} & {self.right!r})"


class Either(Pair):
    """left | right: allowed where at least one of the two allows."""

    join = staticmethod(or_)

    def remaining(self, start: int, stop: int, keys: Spans) -> Mask | None:
        """Without a side all of whose keys the other side allows to every query here; None if all pairs are allowed."""
        if super().remaining(start, stop, keys) is None:
            return None
        for narrow, wide in ((self.left, self.right), (self.right, self.left)):
            if wide.all_allowed(start, stop).covers(narrow.any_allowed(start, stop) & keys):
                return wide.remaining(start, stop, keys)
        return self

    def __repr__(self) -> str:
        return f"({self.left!r} | {self.right!r})"


@dataclass(frozen=True, eq=False)
class Not(Composed):
    """~mask: allowed where the mask forbids. `any_allowed` and `all_allowed` swap and complement."""

    mask: Mask

    @property
    def parts(self) -> tuple[Mask]:
        return (self.mask,)

    def is_same(self, other: Mask | None) -> bool:
        return isinstance(other, Not) and self.mask.is_same(other.mask)

    def allowed(self, grid: Grid) -> Tensor:
        return ~self.mask.allowed(grid)

    def any_allowed(self, start: int, stop: int) -> Spans:
        return ~self.mask.all_allowed(start, stop)

    def all_allowed(self, start: int, stop: int) -> Spans:
        return ~self.mask.any_allowed(start, stop)

    def __repr__(self) -> str:
        return f"~{self.mask!r}"


def conjuncts(mask: Mask) -> Iterator[Mask]:
    """The masks that `&` joins, from left to right; the mask itself if it is no `&`."""
    if isinstance(mask, Both):
        yield from conjuncts(mask.left)
        yield from conjuncts(mask.right)
    else:
        yield mask


def distance_range(relative: Mask) -> tuple[int, int, bool]:
    """The range [low, high) of the distances j - i that a `relative` mask allows, and whether it allows all in it.

    >>> from regard.masks import causal, dilated, window
    >>> distance_range(causal() & window(3)), distance_range(causal() & dilated(2, 2))
    ((-2, 1, True), (-2, 1, False))
    """
    allowed, always_allowed = relative.any_allowed(0, 1), relative.all_allowed(0, 1)  # position 0, so j is j - i
    if not allowed:
        return 0, 0, True
    ((low, high),) = allowed.hull().intervals
    return low, high, allowed == always_allowed and len(allowed.intervals) == 1


def leaves(mask: Mask | None) -> Iterator[Mask]:
    """The masks at the ends of a tree of `&`, `|` and `~`: the mask itself if it is none of these. No mask has none."""
    if isinstance(mask, Both | Either):
        yield from leaves(mask.left)
        yield from leaves(mask.right)
    elif isinstance(mask, Not):
        yield from leaves(mask.mask)
    elif mask is not None:
        yield mask


@dataclass(frozen=True, eq=False)
class Selected(Mask):
    """`mask` with batch entry b replaced by entry index[b]; the default result of `select`.

    `any_allowed` and `all_allowed` of `mask` hold for all its batch entries, so they hold for any selection.
    """

    mask: Mask
    index: Tensor
    holds_parts: ClassVar[bool] = True

    @property
    def keys_only(self) -> bool:  # type: ignore[override]
        return self.mask.keys_only

    def allowed(self, grid: Grid) -> Tensor:
        batch = at("a selected mask", "batch entries", to_device(self.index, grid.device), 0, grid.batch)
        return self.mask.allowed(replace(grid, batch=batch))

    def any_allowed(self, start: int, stop: int) -> Spans:
        return self.mask.any_allowed(start, stop)

    def all_allowed(self, start: int, stop: int) -> Spans:
        return self.mask.all_allowed(start, stop)

    def edges(self, start: int, stop: int) -> Sequence[int]:
        return self.mask.edges(start, stop)

    def select(self, index: Tensor) -> Mask:
        return Selected(self.mask, select_entries("a selected mask", self.index, index))

    def own_sizes(self) -> tuple[int, int | None]:
        return len(self.index), self.mask.own_sizes()[1]

    def check(self, sizes: Sizes, positions: Positions) -> None:
        check_batch(repr(self), len(self.index), sizes)

    def __repr__(self) -> str:
        return f"{self.mask!r} of {len(self.index)} selected batch entries"


def sees_no_later_key(mask: Mask | None) -> bool:
    """Whether the structure of the mask proves that no query may attend to a later key.

    >>> import regard as rg
    >>> masks = rg.causal() & rg.padding([3]), rg.causal() | rg.masks.prefix(2), ~rg.causal(), ~~rg.causal(), None
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
    """j <= i: no query attends to a later key (Vaswani et al. 2017, arXiv:1706.03762, section 3.1).

    The mask compares positions. Two queries with 5 keys have positions 3 and 4, and attend to 4 and 5 keys.
    With torch's `is_causal=True` they would attend to 1 and 2 keys.

    >>> import regard as rg
    >>> grid = rg.types.Grid.whole(rg.types.Positions.aligned_to_end(2, 5), 1, 1, 2)
    >>> rg.causal().allowed(grid)[0, 0].int().tolist()
    [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    """

    relative = True
    batched = False
    is_lower_triangular = True

    def allowed(self, grid: Grid) -> Tensor:
        return grid.j <= grid.i

    def any_allowed(self, start: int, stop: int) -> Spans:
        return Spans(((-INFINITY, stop),))

    def all_allowed(self, start: int, stop: int) -> Spans:
        return Spans(((-INFINITY, start + 1),))


@checked
@dataclass(frozen=True)
class window(Mask):
    """i - size < j < i + size: the `size` nearest keys on each side, including the query's own position.

    `causal() & window(w)` allows w keys, the rule of Mistral and Hugging Face. attention-gym,
    x-transformers, jax and local-attention allow w + 1 keys for the same number.

    >>> import regard as rg
    >>> grid = rg.types.Grid.whole(rg.types.Positions.aligned_to_end(4, 4), 1, 1, 4)
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
    >>> grid = rg.types.Grid.whole(rg.types.Positions.of(3, 1, 7), 1, 1, 1)  # one query, at position 3 of 7
    >>> rg.masks.dilated(size=2, dilation=3).allowed(grid)[0, 0, 0].int().tolist()
    [1, 0, 0, 1, 0, 0, 1]
    """

    size: Size
    dilation: Size
    relative = True
    batched = False

    @property
    def _reach(self) -> int:
        """The size of the window without gaps that has the same first and last key."""
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
    """j < `length`: every query may attend to the first keys. `causal() | prefix(p)` is a prefix LM (Raffel 2020).

    >>> import regard as rg
    >>> grid = rg.types.Grid.whole(rg.types.Positions.aligned_to_end(4, 4), 1, 1, 4)
    >>> (rg.causal() | rg.masks.prefix(2)).allowed(grid)[0, 0].int().tolist()
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
    """Keys of the query's own block of `size`, and of `before` / `after` neighboring blocks.

    floor(j / size) - floor(i / size) is in [-before, after]. BigBird and local-attention use such blocks.
    A window moves with the query; a block does not.

    >>> import regard as rg
    >>> grid = rg.types.Grid.whole(rg.types.Positions.aligned_to_end(4, 4), 1, 1, 4)
    >>> rg.masks.block_local(2).allowed(grid)[0, 0].int().tolist()
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
