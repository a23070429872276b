"""Statistics of a map in one pass over its tiles, in O(n) memory: entropy, strongest links, totals by key, and more.

A reduction describes a statistic. Its state is a list of tensors: `init` creates it, `add` updates it with one tile,
`finish` reads the result, and `merge` joins the states of disjoint tiles. So one pass can be split over blocks,
devices or machines, and one pass computes any number of reductions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple

import torch
from torch import Tensor

from regard.base.checks import Size, checked
from regard.base.errors import RegardError
from regard.base.shapes import known_none, to_device, without_zeros
from regard.base.spans import Spans
from regard.pieces.grid import Grid
from regard.pieces.mask import Mask

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    ReductionResult = TypeVar("ReductionResult", default=Any)
else:
    from typing import TypeVar

    ReductionResult = TypeVar("ReductionResult")
from torch.nn import functional as F

State = list[Tensor]
#: Why the weights of a map are no shares.
NEGATIVE = "The weights of this map may be negative."
ANY_SUM = "The rows of this map may have any sum."
#: The shape of a map: batch, heads, queries, keys.
Shape = tuple[int, int, int, int]


@dataclass(frozen=True, eq=False)
class Tile:
    """Weights (B, H, i, j) of the queries `rows` and keys `cols` (slices of indices) at positions `grid`.

    `log_weights` are their logarithms if they cost nothing, else None. Every query may attend to every key of the
    tile, except for the keys in `undecided` (spans of key indices), where the mask decides for each pair.

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 2, 4, 8)
    >>> tile = next(rg.Attention()(x, x, x).weights.tiles())
    >>> tile.weights.shape, tile.rows, tile.cols, tile.grid.distance.min().item()
    (torch.Size([1, 2, 4, 4]), slice(0, 4, None), slice(0, 4, None), -3)
    """

    weights: Tensor
    log_weights: Tensor | None
    rows: slice
    cols: slice
    grid: Grid
    undecided: Spans


class Reduction(ABC, Generic[ReductionResult]):
    """The base class of all statistics that are computed tile by tile. A new statistic is one subclass.

    >>> import torch, regard as rg
    >>> class Strongest(rg.maps.Reduction):
    ...     def init(self, shape, device):
    ...         return [torch.zeros(shape[:2], device=device)]
    ...     def add(self, state, tile):
    ...         state[0].copy_(state[0].maximum(tile.weights.amax((-2, -1))))
    ...     def merge(self, state, other):
    ...         return [state[0].maximum(other[0])]
    >>> x = torch.zeros(1, 2, 4, 8)
    >>> rg.Attention()(x, x, x).weights.summarize(Strongest())[0]
    tensor([[0.2500, 0.2500]])
    """

    #: Whether `add` reads the weights of a tile. If it reads their shape alone, they are not computed for this
    #: reduction.
    reads_weights: ClassVar[bool] = True
    #: Whether the statistic needs weights that are shares: not negative, with the sum 1 in each row.
    needs_shares: ClassVar[bool] = False
    #: Whether the statistic needs weights that are not negative, of any sum.
    needs_nonnegative: ClassVar[bool] = False
    #: Whether states of disjoint queries add up, in what depends on weights. None: they do if `merge` is the sum. This
    #: decides about memory only: gradients of other reductions keep the state before each range of queries.
    adds_rows: ClassVar[bool | None] = None

    @abstractmethod
    def init(self, shape: Shape, device: torch.device) -> State:
        """The state of a map of this shape before any tile."""

    @abstractmethod
    def add(self, state: State, tile: Tile) -> None:
        """Update the state with one tile, in place."""

    def finish(self, state: State) -> ReductionResult:
        """The result, by default the first tensor of the state."""
        return state[0]  # type: ignore[return-value]

    def merge(self, state: State, other: State) -> State:
        """The state of both sets of tiles; by default the sum."""
        return [a + b for a, b in zip(state, other, strict=True)]


def check_reductions(reductions: Iterable[Reduction], weights: Any) -> list[Reduction]:
    """The reductions; refuse those that need shares or weights of one sign if the weights of the map are others."""
    reductions = list(reductions)
    for reduction in reductions:
        if reduction.needs_nonnegative and weights.is_signed:
            raise RegardError(
                f"weights.summarize: {type(reduction).__name__} needs weights that are not negative. {NEGATIVE} Ask "
                "weights.shares(), the map of |w_ij| / sum_j |w_ij|, or use Pool, which averages weights of both signs."
            )
        if reduction.needs_shares and not weights.has_shares:
            raise RegardError(
                f"weights.summarize: {type(reduction).__name__} needs shares, weights that are not negative and sum "
                "to 1. "
                f"{NEGATIVE if weights.is_signed else ANY_SUM} Ask weights.shares(), the map of |w_ij| / sum_j |w_ij|, "
                "or use SignedMass, which sums weights of each sign."
            )
    return reductions


def are_shares(weights: Tensor) -> bool:
    """Whether no weight is negative and each row (the last axis) sums to 1, is empty or has a NaN, up to rounding."""
    rounding, totals = max(1e-3, 4 * torch.finfo(weights.dtype).eps), weights.sum(-1)
    fits = (totals - 1).abs().le(rounding) | (totals == 0) | totals.isnan()
    return bool(fits.all()) and not bool((weights < -1e-6).any())


def zeros(device: torch.device, *shape: int) -> Tensor:
    """Zeros for sums of weights: float32, whatever the default dtype."""
    return torch.zeros(shape, dtype=torch.float32, device=device)


@dataclass(frozen=True)
class Entropy(Reduction[Tensor]):
    """-sum_j w_ij log w_ij of every row, in nats: 0 for one key, log n for n keys of equal weight; (B, H, I).

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 1, 3, 8)
    >>> (entropy,) = rg.Attention(mask=rg.causal())(x, x, x).weights.summarize(rg.maps.Entropy())
    >>> entropy.exp().round(decimals=4)  # the effective number of keys
    tensor([[[1., 2., 3.]]])
    """

    needs_shares = True

    def init(self, shape: Shape, device: torch.device) -> State:
        return [zeros(device, *shape[:3])]

    def add(self, state: State, tile: Tile) -> None:
        state[0][:, :, tile.rows] -= weighted_log(tile)

    def finish(self, state: State) -> Tensor:
        return state[0].clamp_min(0.0)  # a weight that was rounded above 1 has a logarithm above 0


#: A finite logarithm of a weight that rounds to 0, so that weight times logarithm is 0.
NEARLY_ZERO = -1e30


def weighted_log(tile: Tile) -> Tensor:
    """sum_j w_ij log w_ij over a tile, 0 log 0 being 0; (B, H, i)."""
    if tile.log_weights is not None:
        total = torch.einsum("...j,...j->...", tile.weights, tile.log_weights)
        if not known_none(total.isnan()):
            total = torch.einsum("...j,...j->...", tile.weights, tile.log_weights.clamp_min(NEARLY_ZERO))
        return total
    return times_log(tile.weights).sum(-1)


def times_log(weights: Tensor) -> Tensor:
    """w log w, 0 log 0 being 0; the gradient at 0 is 0, because a key without weight is no part of the sum."""
    if not weights.requires_grad:
        return torch.xlogy(weights, weights)
    return weights * without_zeros(weights).log()


class RowLinks(NamedTuple):
    """The strongest links of every row: `weights` and key indices `keys`, both (B, H, I, k), strongest first.

    >>> import torch, regard as rg
    >>> x = 20 * torch.eye(3).expand(1, 1, 3, 3)
    >>> weights, keys = rg.Attention()(x, x, x).weights.summarize(rg.maps.TopLinks(1))[0]
    >>> keys.flatten().tolist(), weights.shape
    ([0, 1, 2], torch.Size([1, 1, 3, 1]))
    """

    weights: Tensor
    keys: Tensor


@checked
@dataclass(frozen=True)
class TopLinks(Reduction[RowLinks]):
    """The k largest weights of every row and their keys; key -1 where a row has fewer.

    >>> import torch, regard as rg
    >>> x = torch.randn(1, 1, 2, 8)
    >>> rg.Attention(mask=rg.causal())(x, x, x).weights.summarize(rg.maps.TopLinks(2))[0].keys[0, 0, 0]
    tensor([ 0, -1])
    """

    adds_rows = True
    k: Size = 1

    def init(self, shape: Shape, device: torch.device) -> State:
        kept = (*shape[:3], min(self.k, shape[3]))
        return [zeros(device, *kept), torch.zeros(kept, dtype=torch.int64, device=device)]

    def add(self, state: State, tile: Tile) -> None:
        """Merge the strongest links of the tile with those of the same rows so far."""
        mine = [part[:, :, tile.rows] for part in state]
        weights, keys = greatest(tile.weights, min(self.k, tile.weights.shape[-1]))
        for part, new in zip(mine, self.merge(mine, [weights, keys + tile.cols.start]), strict=True):
            part.copy_(new)

    def merge(self, state: State, other: State) -> State:
        values, indices = (torch.cat(pair, -1) for pair in zip(state, other, strict=True))
        best = values.topk(state[0].shape[-1], dim=-1)
        return [best.values, indices.gather(-1, best.indices)]

    def finish(self, state: State) -> RowLinks:
        return RowLinks(state[0], state[1].masked_fill(state[0] <= 0, -1))


#: How many numbers of a row `greatest` puts into one class.
MEMBERS = 8


def greatest(weights: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest numbers of the last axis in descending order, and their indices: a faster `topk`.

    A class is MEMBERS numbers at equal distances; fewer than MEMBERS numbers are in no class. The k largest are among
    these and the k classes with the largest maxima. A recursive call finds those classes; the row is read once.
    """
    classes = weights.shape[-1] // MEMBERS
    if classes < max(2 * k, MEMBERS):
        return weights.max(-1, keepdim=True) if k == 1 else weights.topk(k)
    maxima = weights[..., : MEMBERS * classes].unflatten(-1, (MEMBERS, classes)).amax(-2)
    steps = torch.arange(0, MEMBERS * classes, classes, device=weights.device)
    rest = torch.arange(MEMBERS * classes, weights.shape[-1], device=weights.device)
    chosen = (greatest(maxima, k)[1][..., None] + steps).flatten(-2)
    places = torch.cat([chosen, rest.expand(*chosen.shape[:-1], -1)], -1)
    best = weights.gather(-1, places).topk(k)
    return best.values, places.gather(-1, best.indices)


@dataclass(frozen=True)
class KeyTotals(Reduction[Tensor]):
    """sum_i w_ij: the weight that each key receives from all queries; (B, H, J).

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 1, 2, 8)
    >>> rg.Attention(mask=rg.causal())(x, x, x).weights.summarize(rg.maps.KeyTotals())[0]
    tensor([[[1.5000, 0.5000]]])
    """

    def init(self, shape: Shape, device: torch.device) -> State:
        return [zeros(device, *shape[:2], shape[3])]

    def add(self, state: State, tile: Tile) -> None:
        state[0][:, :, tile.cols] += tile.weights.sum(2)


@dataclass(frozen=True)
class Distance(Reduction[Tensor]):
    """sum_j w_ij |i - j|: the mean distance of every query to its keys, in positions; (B, H, I).

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 1, 3, 8)
    >>> rg.Attention(mask=rg.causal())(x, x, x).weights.summarize(rg.maps.Distance())[0]
    tensor([[[0.0000, 0.5000, 1.0000]]])
    """

    needs_shares = True

    def init(self, shape: Shape, device: torch.device) -> State:
        return [zeros(device, *shape[:3])]

    def add(self, state: State, tile: Tile) -> None:
        distance = tile.grid.distance.abs().to(tile.weights.dtype)
        state[0][:, :, tile.rows] += (tile.weights * distance).sum(-1)


class Signs(NamedTuple):
    """The sums of the positive and of the negative weights of every row, (B, H, I) each."""

    positive: Tensor
    negative: Tensor


@dataclass(frozen=True)
class SignedMass(Reduction[Signs]):
    """sum_j max(w_ij, 0) and sum_j min(w_ij, 0) of every row: the weight of each sign; (B, H, I) each.

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 1, 2, 8)
    >>> (mass,) = rg.Attention()(x, x, x).weights.summarize(rg.maps.SignedMass())
    >>> mass.positive, mass.negative  # weights of a softmax are not negative
    (tensor([[[1., 1.]]]), tensor([[[0., 0.]]]))
    """

    def init(self, shape: Shape, device: torch.device) -> State:
        return [zeros(device, *shape[:3]), zeros(device, *shape[:3])]

    def add(self, state: State, tile: Tile) -> None:
        state[0][:, :, tile.rows] += tile.weights.clamp_min(0).sum(-1)
        state[1][:, :, tile.rows] += tile.weights.clamp_max(0).sum(-1)

    def finish(self, state: State) -> Signs:
        return Signs(*state)


@checked
@dataclass(frozen=True, eq=False)
class MassOn(Reduction[Tensor]):
    """The sum of w_ij over selected keys: indices, or a boolean vector (J,) or (B, J); (B, H, I).

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 1, 4, 8)
    >>> rg.Attention(mask=rg.causal())(x, x, x).weights.summarize(rg.maps.MassOn([0, 1]))[0]
    tensor([[[1.0000, 1.0000, 0.6667, 0.5000]]])
    """

    adds_rows = True
    keys: Tensor

    def __init__(self, keys: Tensor | list[int] | tuple[int, ...]) -> None:
        if isinstance(keys, Tensor) and keys.is_meta:
            raise RegardError("mass: the keys are on the meta device, where tensors hold no numbers.")
        given = keys if isinstance(keys, Tensor) else torch.as_tensor(keys, device="cpu")
        selected = given.clone()  # the caller may change its tensor later
        if selected.is_floating_point() and not selected.numel():
            selected = selected.long()  # an empty list is float32 in torch, and `_flags` refuses floats
        object.__setattr__(self, "keys", selected)

    def init(self, shape: Shape, device: torch.device) -> State:
        return [zeros(device, *shape[:3]), self._flags(shape[0], shape[3], device)]

    def _flags(self, B: int, J: int, device: torch.device) -> Tensor:
        """1.0 for each selected key, else 0.0: (B, J)."""
        keys = self.keys.cpu()
        if keys.dtype == torch.bool:
            if keys.shape not in ((J,), (B, J)):
                raise RegardError(
                    f"mass: a boolean selection of keys has shape ({J},) or ({B}, {J}), got {tuple(keys.shape)}."
                )
            return to_device(keys.float().expand(B, J), device)
        if keys.is_floating_point() or keys.ndim != 1 or (len(keys) and not (keys >= -J).logical_and(keys < J).all()):
            raise RegardError(f"mass: keys must be indices from {-J} to {J - 1} or a boolean vector; got {keys}.")
        flags = zeros(torch.device("cpu"), B, J)
        flags[:, keys] = 1.0
        return to_device(flags, device)

    def add(self, state: State, tile: Tile) -> None:
        flags = state[1][:, tile.cols].to(tile.weights.dtype)
        state[0][:, :, tile.rows] += (tile.weights @ flags[:, None, :, None])[..., 0]

    def merge(self, state: State, other: State) -> State:
        return [state[0] + other[0], state[1]]


@checked
@dataclass(frozen=True, eq=False)
class MassWhere(Reduction[Tensor]):
    """The weight of each query on the pairs that `mask` allows, sum of w_ij over these keys j; (B, H, I).

    `mask` is independent of the mask of the attention.

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 1, 4, 8)
    >>> rg.Attention()(x, x, x).weights.summarize(rg.maps.MassWhere(~rg.causal()))[0]  # on later keys
    tensor([[[0.7500, 0.5000, 0.2500, 0.0000]]])
    """

    mask: Mask

    def init(self, shape: Shape, device: torch.device) -> State:
        return [zeros(device, *shape[:3])]

    def add(self, state: State, tile: Tile) -> None:
        positions = tile.grid.positions
        if positions is not None:  # skip a tile in which the mask allows no pair
            start, stop = positions.start, positions.start + len(tile.grid.query)
            if not self.mask.any_allowed(start, stop) & positions.keys:
                return
        state[0][:, :, tile.rows] += (tile.weights * self.mask.allowed(tile.grid)).sum(-1)


@checked
@dataclass(frozen=True)
class Pool(Reduction[Tensor]):
    """The map as `rows` x `cols` cells, (B, H, rows, cols): weights summed over the keys and averaged over the queries.

    A row of cells has the same sum as a row of weights. There are never more cells than queries or keys on an axis.

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 1, 4, 8)
    >>> rg.Attention(mask=rg.causal())(x, x, x).weights.summarize(rg.maps.Pool(2, 2))[0][0, 0]
    tensor([[1.0000, 0.0000],
            [0.5833, 0.4167]])
    """

    adds_rows = True
    rows: Size = 64
    cols: Size = 64

    def init(self, shape: Shape, device: torch.device) -> State:
        B, H, I, J = shape
        rows, cols = min(self.rows, I), min(self.cols, J)
        row_of = torch.arange(I, device="cpu") * rows // I  # the cell of each query, on the host: `add` reads numbers
        col_of = torch.arange(J, device="cpu") * cols // J
        return [zeros(device, B, H, rows, cols), row_of, col_of]

    def add(self, state: State, tile: Tile) -> None:
        """Add the sums of cells: R^T W C, where R and C say which query and which key of the tile is in which cell."""
        total, row_of, col_of = state
        rows, of_row = _membership(row_of.cpu()[tile.rows], tile.weights)
        cols, of_col = _membership(col_of.cpu()[tile.cols], tile.weights)
        # the first product handles every weight, so it goes along the axis with fewer cells
        few_rows = of_row.shape[1] < of_col.shape[1]
        cells = (of_row.T @ tile.weights) @ of_col if few_rows else of_row.T @ (tile.weights @ of_col)
        total[:, :, rows, cols] += cells

    def merge(self, state: State, other: State) -> State:
        return [state[0] + other[0], *state[1:]]

    def finish(self, state: State) -> Tensor:
        total, row_of, _ = state
        counts = torch.bincount(row_of.cpu(), minlength=total.shape[2])
        return total / to_device(counts, total.device)[:, None]


def _membership(cell_of: Tensor, like: Tensor) -> tuple[slice, Tensor]:
    """The cells of a tile, and (indices of the tile, cells): 1 where the index is in the cell, else 0."""
    first, last = int(cell_of[0]), int(cell_of[-1])
    membership = cell_of[:, None] == torch.arange(first, last + 1, device="cpu")
    return slice(first, last + 1), to_device(membership.to(like.dtype), like.device)


@checked
@dataclass(frozen=True)
class Similarity(Reduction[Tensor]):
    """The cosine between the maps of every two heads, (B, H, H): 1 on the diagonal, near 1 for heads that are alike.

    `every=n` uses every n-th query only, which is enough for a long text.

    >>> import torch, regard as rg
    >>> x = torch.randn(1, 1, 4, 8).expand(1, 2, 4, 8)  # two equal heads
    >>> rg.Attention()(x, x, x).weights.summarize(rg.maps.Similarity())[0].round(decimals=4)
    tensor([[[1., 1.],
             [1., 1.]]])
    """

    every: Size = 1

    def init(self, shape: Shape, device: torch.device) -> State:
        return [zeros(device, shape[0], shape[1], shape[1])]

    def add(self, state: State, tile: Tile) -> None:
        first = -tile.rows.start % self.every  # the first row of the tile whose index is a multiple of `every`
        flat = tile.weights[:, :, first :: self.every].flatten(2)
        state[0] += flat @ flat.mT

    def finish(self, state: State) -> Tensor:
        squares = state[0].diagonal(dim1=-2, dim2=-1)
        norms = without_zeros(squares).sqrt()  # the slope of sqrt(0) is infinite
        return state[0] / (norms[:, :, None] * norms[:, None]).clamp_min(torch.finfo(torch.float32).tiny)


# The zoom levels of a map: cells of 2^n x 2^n weights, each with the sum over its keys and its largest weight.


def cells(weights: Tensor, size: int, top: int = 0, left: int = 0) -> tuple[Tensor, Tensor]:
    """Weights (..., i, j) as cells of `size` x `size`: sums, and largest weights.

    The first weight is at (`top`, `left`) of its cell.

    >>> [part.tolist() for part in cells(torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.25, 0.75]]), 2)]
    [[[1.25, 0.75]], [[0.5, 0.75]]]
    """
    if size == 1:
        return weights, weights
    i, j = weights.shape[-2:]
    margins = (left, -(left + j) % size, top, -(top + i) % size)
    padded = F.pad(weights, margins) if any(margins) else weights
    rows = padded.unflatten(-2, (-1, size))  # rows first: sums of whole rows are fast and leave few numbers
    sums, greatest = rows.sum(-2), rows.amax(-2)
    return sums.unflatten(-1, (-1, size)).sum(-1), greatest.unflatten(-1, (-1, size)).amax(-1)


def averaged(sums: Tensor, size: int, num_rows: int, first: int = 0) -> Tensor:
    """Sums of cells divided by their numbers of queries, so that a row of cells sums to the same as a row of weights.

    `first` is the index of the first row of cells in the map; the map has `num_rows` queries.
    """
    starts = torch.arange(first, first + sums.shape[-2], device=sums.device) * size
    return sums / (num_rows - starts).clamp(1, size)[:, None]


@dataclass(frozen=True)
class Pyramid(Reduction):
    """One level: cells of 2^level x 2^level, sums over keys averaged over queries, and maxima; (B, H, i, j) each.

    Maps whose weights may be negative are refused: maxima begin at 0, which pairs that the mask hides have, so a cell
    of negative weights would have 0.
    """

    needs_nonnegative = True
    level: int

    def init(self, shape: Shape, device: torch.device) -> State:
        B, H, I, J = shape
        rows, cols = (-(-n // (1 << self.level)) for n in (I, J))
        return [*(zeros(device, B, H, rows, cols) for _ in range(2)), torch.tensor(I, device="cpu")]

    def add(self, state: State, tile: Tile) -> None:
        """A tile may begin and end inside a cell, so its cells are added to those of the map that they are part of."""
        size = 1 << self.level
        row, col = tile.rows.start // size, tile.cols.start // size
        sums, greatest = cells(tile.weights, size, tile.rows.start % size, tile.cols.start % size)
        place = (..., slice(row, row + sums.shape[-2]), slice(col, col + sums.shape[-1]))
        state[0][place] += sums
        state[1][place] = torch.maximum(state[1][place], greatest)

    def merge(self, state: State, other: State) -> State:
        return [state[0] + other[0], torch.maximum(state[1], other[1]), state[2]]

    def finish(self, state: State) -> tuple[Tensor, Tensor]:
        return averaged(state[0], 1 << self.level, int(state[2])), state[1]


def coarser(
    pooled: tuple[Tensor, Tensor], steps: int, level: int, num_rows: int, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Cells of `level + steps` from cells of `level`: 2^steps x 2^steps cells become one. Exact, as if pooled at once.

    `first`, the index of the first row of cells in the map, is a multiple of 2^steps.
    """
    mean, greatest = pooled
    starts = torch.arange(first, first + mean.shape[-2], device=mean.device) * (1 << level)
    # means times their numbers of queries: the last row of cells may have fewer
    sums = mean * (num_rows - starts).clamp(1, 1 << level)[:, None]
    total = cells(sums, 1 << steps)[0]
    return averaged(total, 1 << (level + steps), num_rows, first >> steps), cells(greatest, 1 << steps)[1]
