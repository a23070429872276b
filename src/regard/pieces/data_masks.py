"""Masks that hold data: lengths, documents, chosen tokens, random blocks, predicates, tensors."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from regard.base.checks import Count, Size, checked
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import Sizes, as_tensor, to_device, without_transforms
from regard.base.spans import EMPTY, EVERYTHING, INFINITY, Spans
from regard.pieces.grid import Grid, at
from regard.pieces.mask import Mask, block_local, prefix
from regard.pieces.mask_checks import (
    answered,
    check_batch,
    check_covers,
    check_predicate,
    integers,
    own_copy,
    select_entries,
    shortened,
)
from regard.pieces.mask_conventions import is_of_keys, mask_remedy


@checked
def padding(real: Tensor | Sequence[int]) -> Mask:
    """Only real keys are allowed. `real` holds lengths (B,), or booleans (B, J) with True = real.

    Booleans may have axes of size 1 for heads and queries, (B, 1, 1, J), as lectures write this mask. Real keys may
    follow padding, and padding may be anywhere. The mask keeps a copy. In torch's `key_padding_mask` True means
    padding: pass `~key_padding_mask`.

    >>> import torch, regard as rg
    >>> rg.padding([3, 1]).allowed(rg.types.Grid.whole(rg.types.Positions.of(0, 1, 4), 2, 1, 1))[:, 0, 0].int().tolist()
    [[1, 1, 1, 0], [1, 0, 0, 0]]
    """
    try:
        tensor = real if isinstance(real, Tensor) else as_tensor(real, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        kind, remedy = type(real).__name__, ""
    else:
        kind = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        is_integer = not (tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex())
        if tensor.ndim == 1 and (is_integer or not tensor.numel()):
            return Lengths(tensor.long())
        if tensor.dtype == torch.bool and (tensor.ndim == 2 or is_of_keys(tensor)):
            return RealKeys(tensor[(slice(None), *(0,) * (tensor.ndim - 2))])
        remedy = mask_remedy(tensor, "padding")
    raise RegardError(
        "padding: expected integer lengths of shape (batch,) or a boolean tensor of shape (batch, keys) with "
        f"True = real, got {kind}. {remedy}"
    )


@dataclass(frozen=True, eq=False)
class Lengths(Mask):
    """j < lengths[b]; the result of `padding(lengths)`."""

    lengths: Tensor
    keys_only = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", own_copy(self.lengths).cpu())

    def allowed(self, grid: Grid) -> Tensor:
        lengths = at("padding(lengths)", "batch entries", to_device(self.lengths, grid.device), 0, grid.batch)
        return grid.j < lengths.view(-1, 1, 1, 1)

    def own_sizes(self) -> tuple[int, None]:
        return len(self.lengths), None

    def check(self, sizes: Sizes, positions: Positions) -> None:
        check_batch("padding(lengths)", len(self.lengths), sizes)
        if self._ends[0] < 0:
            raise RegardError(f"padding(lengths): lengths are at least 0, got {self._ends[0]}.")

    def any_allowed(self, start: int, stop: int) -> Spans:
        return Spans(((-INFINITY, self._ends[1]),))

    def all_allowed(self, start: int, stop: int) -> Spans:
        return Spans(((-INFINITY, self._ends[0]),))

    def of_entry(self, entry: int) -> Mask:
        (length,) = select_entries("padding(lengths)", self.lengths, torch.tensor([entry], device="cpu")).tolist()
        return prefix(max(length, 0))

    def select(self, index: Tensor) -> Mask:
        return Lengths(select_entries("padding(lengths)", self.lengths, index))

    def __repr__(self) -> str:
        shortest, longest = self._ends
        return f"padding(lengths {shortest} to {longest})"

    @cached_property
    def _ends(self) -> tuple[int, int]:
        """The shortest and the longest length."""
        return (int(self.lengths.min()), int(self.lengths.max())) if len(self.lengths) else (0, 0)


@dataclass(frozen=True, eq=False)
class RealKeys(Mask):
    """real[b, j]; the result of `padding(boolean tensor)`."""

    real: Tensor
    keys_only = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "real", own_copy(self.real).cpu())

    @property
    def real_keys(self) -> Tensor:  # type: ignore[override]
        return self.real

    def allowed(self, grid: Grid) -> Tensor:
        real = at("padding(vector)", "batch entries", to_device(self.real, grid.device), 0, grid.batch)
        return at("padding(vector)", "keys", real, 1, grid.key)[:, None, None]

    def own_sizes(self) -> tuple[int, None]:
        return len(self.real), None

    def check(self, sizes: Sizes, positions: Positions) -> None:
        check_batch("padding(vector)", len(self.real), sizes)
        check_covers("padding(vector)", "keys", positions.keys, self.real.shape[1])

    def any_allowed(self, start: int, stop: int) -> Spans:
        return self._runs[1]

    def all_allowed(self, start: int, stop: int) -> Spans:
        return self._runs[0]

    def of_entry(self, entry: int) -> Mask:
        """The entry repeated, so that `check` and `allowed` accept the whole batch."""
        real = select_entries("padding(vector)", self.real, torch.tensor([entry], device="cpu"))
        return RealKeys(real.expand(self.real.shape))

    def select(self, index: Tensor) -> Mask:
        return RealKeys(select_entries("padding(vector)", self.real, index))

    def __repr__(self) -> str:
        return f"padding({int(self.real.sum())} of {self.real.numel()} keys are real)"

    @cached_property
    def _runs(self) -> tuple[Spans, Spans]:
        """The keys that are real in all batch entries, and those that are real in one of them."""
        return Spans.where(self.real.all(0)), Spans.where(self.real.any(0))


@checked
@dataclass(frozen=True)
class documents(Mask):
    """A query may attend to the keys of its own document, where documents are packed into one sequence.

    `documents([100, 40, 7])` packs three documents of these lengths. The lengths must cover the whole sequence:
    padding at its end is a document of its own. `key_lengths` gives the keys other lengths than the queries
    (cross-attention between packed pairs).

    >>> import regard as rg
    >>> grid = rg.types.Grid.whole(rg.types.Positions.aligned_to_end(4, 4), 1, 1, 4)
    >>> (rg.causal() & rg.documents([3, 1])).allowed(grid)[0, 0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]]
    """

    lengths: tuple[int, ...]
    key_lengths: tuple[int, ...] | None = None
    batched = False

    def __init__(self, lengths: Sequence[int], key_lengths: Sequence[int] | None = None) -> None:
        object.__setattr__(self, "lengths", integers("documents", "lengths", lengths))
        keys = None if key_lengths is None else integers("documents", "key_lengths", key_lengths)
        object.__setattr__(self, "key_lengths", keys)
        if any(length < 1 for length in (*self.lengths, *(self.key_lengths or ()))):
            raise RegardError(
                f"documents({shortened(self.lengths)}): every document has at least one token. Of document numbers, "
                "lengths are torch.unique_consecutive(numbers, return_counts=True)[1]; of the ends that flash-attn "
                "takes, cu_seqlens.diff()."
            )
        if self.key_lengths is not None and len(self.key_lengths) != len(self.lengths):
            raise RegardError(
                f"documents: {len(self.lengths)} query documents against {len(self.key_lengths)} key documents; "
                "both lists must have the same length: one key document for each query document."
            )

    def allowed(self, grid: Grid) -> Tensor:
        of_queries, of_keys = documents.numbers(self, grid)  # a subclass may have none
        return ((of_queries[:, None] == of_keys) & (of_queries >= 0)[:, None])[None, None]

    def numbers(self, grid: Grid) -> tuple[Tensor, Tensor]:
        """The document of each query and of each key of a tile, (I,) and (J,).

        A query outside all documents has -1. A key after the last document has a number that no query has.
        """
        of_queries = self._num_begun(grid.query - self._start, self._edges)
        of_queries = of_queries.masked_fill(of_queries >= len(self._edges), 0) - 1
        return of_queries, self._num_begun(grid.key, self._key_edges) - 1

    def any_allowed(self, start: int, stop: int) -> Spans:
        """The keys of all documents from that of the first query to that of the last."""
        first, last = self._documents_of(start, stop)
        edges = self._key_edges
        first, last = max(first, 1), min(last, len(edges) - 1)  # a query outside all documents has no keys
        return Spans.of((edges[first - 1], edges[last])) if first <= last else EMPTY

    def all_allowed(self, start: int, stop: int) -> Spans:
        first, last = self._documents_of(start, stop)
        return self.any_allowed(start, stop) if first == last else EMPTY

    def edges(self, start: int, stop: int) -> Sequence[int]:
        """Where documents begin."""
        first, last = (bisect_right(self._edges, position - self._start) for position in (start, stop - 1))
        return [edge + self._start for edge in self._edges[first:last]]

    def check(self, sizes: Sizes, positions: Positions) -> None:
        queries = positions.queries(sizes.I).shift(-self._start)
        check_covers("documents", "queries", queries, self._edges[-1])
        check_covers("documents", "keys", positions.keys, self._key_edges[-1])

    def _documents_of(self, start: int, stop: int) -> tuple[int, int]:
        """The documents of the first and the last query of [start, stop), counted from 1; 0 before all documents."""
        return bisect_right(self._edges, start - self._start), bisect_right(self._edges, stop - 1 - self._start)

    @staticmethod
    def _num_begun(positions: Tensor, edges: list[int]) -> Tensor:
        """How many of the edges are at or before each position."""
        return torch.bucketize(positions, to_device(torch.tensor(edges, device="cpu"), positions.device), right=True)

    def __repr__(self) -> str:
        keys = "" if self.key_lengths is None else f", keys {shortened(self.key_lengths)}"
        return f"documents({shortened(self.lengths)}{keys})"

    @cached_property
    def _edges(self) -> list[int]:
        """Where each document begins among the queries, and the number of all queries."""
        return [0, *accumulate(self.lengths)]

    @cached_property
    def _key_edges(self) -> list[int]:
        return [0, *accumulate(self.key_lengths or self.lengths)]

    @cached_property
    def _start(self) -> int:
        """The position of the first query: the last query has the position of the last key."""
        return self._key_edges[-1] - self._edges[-1]


@checked
@dataclass(frozen=True)
class global_tokens(Mask):
    """i or j is in `positions`: these tokens attend to all tokens, and all attend to them (Longformer, ETC).

    >>> import regard as rg
    >>> grid = rg.types.Grid.whole(rg.types.Positions.aligned_to_end(3, 3), 1, 1, 3)
    >>> rg.masks.global_tokens([0]).allowed(grid)[0, 0].int().tolist()
    [[1, 1, 1], [1, 0, 0], [1, 0, 0]]
    """

    positions: tuple[int, ...]
    batched = False

    def __init__(self, positions: Sequence[int]) -> None:
        chosen = integers("global_tokens", "positions", positions)
        if min(chosen, default=0) < 0:
            raise RegardError(
                f"global_tokens({shortened(chosen)}): positions are at least 0, the first key. A negative position "
                "cannot count from the end, because the mask does not know the length; the last position is length - 1."
            )
        object.__setattr__(self, "positions", tuple(sorted(set(chosen))))

    def allowed(self, grid: Grid) -> Tensor:
        chosen = to_device(torch.tensor(self.positions, dtype=torch.int64, device="cpu"), grid.device)
        return torch.isin(grid.i, chosen) | torch.isin(grid.j, chosen)

    def any_allowed(self, start: int, stop: int) -> Spans:
        return EVERYTHING if self._spans & Spans.of((start, stop)) else self._spans

    def all_allowed(self, start: int, stop: int) -> Spans:
        return EVERYTHING if self._spans.covers(Spans.of((start, stop))) else self._spans

    def __repr__(self) -> str:
        return f"global_tokens({shortened(self.positions)})"

    @cached_property
    def _spans(self) -> Spans:
        return Spans.union((p, p + 1) for p in self.positions)


@checked
@dataclass(frozen=True)
class random_blocks(Mask):
    """Each block of `size` queries attends to `count` random blocks of keys (BigBird, arXiv:2007.14062).

    They are `count` different blocks of the ceil(length / size) blocks of the sequence. They depend on `seed` only, so
    the mask is the same on every machine, in every layer and in every call.

    >>> import regard as rg
    >>> grid = rg.types.Grid.whole(rg.types.Positions.aligned_to_end(8, 8), 1, 1, 8)
    >>> rg.masks.random_blocks(size=2, count=3, length=8).allowed(grid)[0, 0].sum(-1).tolist()  # 3 blocks of 2 keys
    [6, 6, 6, 6, 6, 6, 6, 6]
    """

    size: Size
    count: Size
    length: Size
    seed: Count = 0
    batched = False

    def __post_init__(self) -> None:
        blocks = -(-self.length // self.size)
        if self.count > blocks:
            raise RegardError(
                f"random_blocks(count={self.count}): a length of {self.length} has {blocks} blocks of {self.size}, so "
                f"count must be between 1 and {blocks}."
            )

    def allowed(self, grid: Grid) -> Tensor:
        table = to_device(self.table, grid.device)
        chosen = at("random_blocks", "blocks of queries", table, 0, grid.query // self.size)
        flags = torch.zeros(len(grid.query), len(table), dtype=torch.bool, device=grid.device)
        flags = flags.scatter_(1, chosen, True)[None, None]
        return at("random_blocks", "blocks of keys", flags, 3, grid.key // self.size)

    def any_allowed(self, start: int, stop: int) -> Spans:
        rows = self._rows[max(start, 0) // self.size : -(-stop // self.size)]
        return rows[0] if len(rows) == 1 else Spans.union(interval for row in rows for interval in row)

    def all_allowed(self, start: int, stop: int) -> Spans:
        is_one_block = start // self.size == (stop - 1) // self.size
        return self.any_allowed(start, stop) if is_one_block else EMPTY

    def edges(self, start: int, stop: int) -> Sequence[int]:
        return range((start // self.size + 1) * self.size, stop, self.size)

    def check(self, sizes: Sizes, positions: Positions) -> None:
        check_covers("random_blocks", "queries", positions.queries(sizes.I), self.length)
        check_covers("random_blocks", "keys", positions.keys, self.length)

    @cached_property
    def _rows(self) -> list[Spans]:
        """The keys of each block of queries."""
        ends = [[(b * self.size, min((b + 1) * self.size, self.length)) for b in row] for row in self.table.tolist()]
        return [Spans.union(row) for row in ends]

    @cached_property
    def table(self) -> Tensor:
        """The numbers of the blocks of keys of each block of queries, (blocks, count): the `count` lowest of a draw."""
        blocks = -(-self.length // self.size)
        generator = torch.Generator().manual_seed(self.seed)
        with without_transforms():
            drawn = torch.rand(blocks, blocks, generator=generator, dtype=torch.float32, device="cpu")
            return drawn.topk(self.count, 1, largest=False).indices


@checked
def bigbird(
    length: int,
    block: int = 64,
    window_blocks: Count = 3,
    global_blocks: Count = 1,
    num_random: int = 3,
    seed: int = 0,
) -> Mask:
    """Window + global + seeded random blocks (Zaheer et al. 2020, arXiv:2007.14062).

    Each block of queries attends to the `window_blocks` blocks around it, to the first `global_blocks` blocks of the
    sequence, and to `num_random` random blocks. The window has as many blocks on each side, so an even number counts as
    the next odd one. Queries of the global blocks attend to all keys. In Hugging Face the last block is global too, and
    in eval mode every random block is block 0.

    >>> import regard as rg
    >>> grid = rg.types.Grid.whole(rg.types.Positions.aligned_to_end(80, 80), 1, 1, 80)
    >>> keys = rg.masks.bigbird(80, block=4).allowed(grid)[0, 0].sum(-1)
    >>> keys[0].item(), bool(keys[4:].max() <= (3 + 1 + 3) * 4)  # the first block is global
    (80, True)
    """
    side = window_blocks // 2
    near = block_local(block, before=side, after=side)
    return near | global_tokens(range(global_blocks * block)) | random_blocks(block, num_random, length, seed)


@checked
@dataclass(frozen=True, eq=False)
class mask_mod(Mask):
    """A mask from a predicate of (b, h, i, j), integer tensors that broadcast; True = may attend.

    Regard cannot read intervals from a predicate, so engines cannot skip keys for it. Combine it with other masks, for
    example `causal() & mask_mod(...)`: engines skip the keys that the other masks exclude. The predicate is called for
    every tile, again in the backward pass, and whenever weights are read. So the values that it closes over must not
    change. For a tensor that changes later use `mask_tensor` or `padding`, which keep copies.

    >>> import regard as rg
    >>> even = rg.mask_mod(lambda b, h, i, j: j % 2 == 0)
    >>> (rg.causal() & even).allowed(rg.types.Grid.whole(rg.types.Positions.of(0, 3, 3), 1, 1, 3))[0, 0].int().tolist()
    [[1, 0, 0], [1, 0, 0], [1, 0, 1]]
    """

    predicate: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    holds_parts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_predicate(self.predicate)

    def allowed(self, grid: Grid) -> Tensor:
        answer = answered(self.predicate, grid)
        if not isinstance(answer, Tensor) or answer.dtype != torch.bool:
            kind = answer.dtype if isinstance(answer, Tensor) else type(answer).__name__
            raise RegardError(f"mask_mod(predicate): the predicate must return a boolean tensor, got {kind}.")
        return answer


@checked
@dataclass(frozen=True, eq=False)
class mask_tensor(Mask):
    """A boolean tensor (I, J), (B, 1, I, J), (1, H, I, J) or (B, H, I, J); True = may attend.

    The tensor is aligned to the end, like `causal`: its last row is for the last query, its last column for the last
    key. A float mask (0 and -inf, added to the scores) raises an error. So does a shape with a missing axis: (B, I, J)
    does not show where the heads are. The mask keeps a copy (one byte for each pair, much less than the scores), so a
    later change of the tensor changes neither the output nor the map.

    >>> import torch, regard as rg
    >>> tensor = torch.tensor([[True, False], [True, True]])
    >>> x = torch.randn(1, 2, 2, 8)
    >>> rg.Attention(mask=rg.mask_tensor(tensor))(x, x, x).weights[0, 1].gt(0).tolist()
    [[True, False], [True, True]]
    """

    tensor: Tensor = field(repr=False)

    def __post_init__(self) -> None:
        t = self.tensor
        if not isinstance(t, Tensor) or t.dtype != torch.bool:
            kind = t.dtype if isinstance(t, Tensor) else type(t).__name__
            raise RegardError(
                f"mask_tensor: expected a boolean tensor with True = may attend, got {kind}. {mask_remedy(t)}"
            )
        if t.ndim not in (2, 4):
            raise RegardError(
                f"mask_tensor: expected shape (queries, keys) or (batch or 1, heads or 1, queries, keys), got "
                f"{tuple(t.shape)}. A (batch, queries, keys) mask becomes mask[:, None]; for a (batch, keys) "
                "tensor of real tokens use regard.padding(tensor)."
            )
        object.__setattr__(self, "tensor", own_copy(t))

    @property
    def batched(self) -> bool:  # type: ignore[override]
        return len(self._full) != 1

    def select(self, index: Tensor) -> Mask:
        return mask_tensor(select_entries("mask_tensor", self.tensor, index)) if self.batched else self

    def allowed(self, grid: Grid) -> Tensor:
        t = to_device(self._full, grid.device)
        axes = ("queries", 2, grid.query - self._offset), ("keys", 3, grid.key)
        for name, axis, index in (*axes, ("batch entries", 0, grid.batch), ("heads", 1, grid.head)):
            t = t if axis < 2 and t.shape[axis] == 1 else at("mask_tensor", name, t, axis, index)
        return t

    def own_sizes(self) -> tuple[int | None, int | None]:
        return (None, None) if self.tensor.ndim == 2 else tuple(self.tensor.shape[:2])  # type: ignore[return-value]

    def check(self, sizes: Sizes, positions: Positions) -> None:
        B, H, I, J = self._full.shape
        if B != 1:
            check_batch("mask_tensor", B, sizes)
        if H not in (1, sizes.H):
            raise RegardError(
                f"mask_tensor: the mask has {H} heads on axis 1, the query has {sizes.H}. The axes are (batch or 1, "
                "heads or 1, queries, keys): "
                f"{tuple(self.tensor.shape)} against {(sizes.B, sizes.H, sizes.I, sizes.J)}."
            )
        if (I, J) == (sizes.B, sizes.J) != (sizes.I, sizes.J) and self.tensor.ndim == 2:
            raise RegardError(
                f"mask_tensor: a tensor of two axes is (queries, keys), here {(sizes.I, sizes.J)}; got {(I, J)}, "
                "which looks "
                "like (batch, keys). For real tokens of each batch entry use regard.padding(tensor)."
            )
        # keys with gaps, of a cache that forgets, are fewer than the columns
        if I < sizes.I or (J != sizes.J and len(positions.keys.intervals) == 1):
            raise RegardError(
                f"mask_tensor: the mask is for {I} queries and {J} keys, this call has {sizes.I} queries and "
                f"{sizes.J} keys. {self._remedy(sizes)}"
            )
        check_covers("mask_tensor", "queries", positions.queries(sizes.I).shift(-self._offset), I)
        check_covers("mask_tensor", "keys", positions.keys, J)

    def _remedy(self, sizes: Sizes) -> str:
        """The remedy for a mask of another length."""
        if is_of_keys(self.tensor) and self.tensor.shape[-1] == sizes.J:
            return f"The shape {tuple(self.tensor.shape)} is that of padding: regard.padding(mask), with True = real."
        return "Make the mask for the whole length; a shorter mask never broadcasts."

    def any_allowed(self, start: int, stop: int) -> Spans:
        return Spans.where(self._rows(start, stop).any(0))

    def all_allowed(self, start: int, stop: int) -> Spans:
        return Spans.where(self._rows(start, stop).all(0))

    @property
    def _full(self) -> Tensor:
        """The tensor with four axes."""
        return self.tensor[(None,) * (4 - self.tensor.ndim)]

    @cached_property
    def _offset(self) -> int:
        """The position of the first row; the first column has position 0."""
        return self._full.shape[3] - self._full.shape[2]

    @cached_property
    def _on_host(self) -> Tensor:
        """The mask on the host: one copy, from which all blocks read spans."""
        with without_transforms():
            return self._full.cpu()

    def _rows(self, start: int, stop: int) -> Tensor:
        """The rows of the queries [start, stop) of all batch entries and heads, on the host: (their number, J)."""
        rows = self._full if self.tensor.device.type == "cpu" else self._on_host
        return rows[:, :, max(start - self._offset, 0) : max(stop - self._offset, 0)].flatten(0, 2)

    def __repr__(self) -> str:
        return f"mask_tensor(shape={tuple(self.tensor.shape)})"
