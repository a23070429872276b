"""Biases: changes of a score that may depend on the positions of its query and its key.

An additive bias computes score + term(i, j). It has a type of its own, because engines may pass the term to a fused
kernel as a float mask. A change that adds nothing (softcap) is a `Bias` and never an `AdditiveBias`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from regard.base.checks import Count, Number, Positive, PositiveConstant, Size, checked
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import Sizes, at_least_float32, to_device, widest_float, without_autocast
from regard.pieces.grid import Grid, along_diagonals, at
from regard.pieces.piece import Piece, computes_as, set_promises
from regard.pieces.position import angles

#: What a bias prepares: a tensor of the queries and one of the keys, each (B, H, n, W); None if it needs none.
State = tuple[Tensor | None, Tensor | None]


class Bias(Piece):
    """Base of all biases: `transform` turns scores into scores.

    `prepare` may compute two tensors of O(n) memory, one for the queries and one for the keys, both (B, H, n, W) with
    all query heads; `transform` gets the slices of its tile. `relative`: the term depends on the head and j - i only,
    so it is computed once for each diagonal. A subclass with a `prepare`, `transform` or `term` of its own has to say
    it again.

    >>> import torch, regard as rg
    >>> class Halved(rg.biases.Bias):
    ...     def transform(self, score, grid, rows, cols):
    ...         return score / 2
    >>> q, k, v = torch.randn(3, 1, 2, 5, 8)
    >>> halved, plain = rg.Attention(bias=Halved()), rg.Attention(rg.Dot(scale=8**-0.5 / 2))
    >>> torch.allclose(halved(q, k, v).output, plain(q, k, v).output, atol=1e-6)
    True
    """

    relative: bool = False

    def prepare(self, query: Tensor, key: Tensor, positions: Positions) -> State:
        """All O(n) work, from queries (B, H, I, D) and keys (B, G, J, D) after the positional encoding."""
        return None, None

    @abstractmethod
    def transform(self, score: Tensor, grid: Grid, rows: Tensor | None, cols: Tensor | None) -> Tensor:
        """The new scores of a tile: (B, H, I, J) -> (B, H, I, J).

        `rows` (B, H, I, W) and `cols` (B, H, J, W) are the slices of the two tensors of `prepare`.
        """

    def check(self, sizes: Sizes) -> None:
        """Refuse sizes that do not fit the bias."""


set_promises(Bias, rules={"prepare", "transform", "term"}, promises={"relative"})


class AdditiveBias(Bias):
    """score + term. A new additive bias defines only `term`.

    >>> import math, torch, regard as rg
    >>> class PreferFirst(rg.biases.AdditiveBias):
    ...     def term(self, grid, rows, cols):
    ...         return math.log(2) * (grid.j == 0)
    >>> x = torch.zeros(1, 1, 3, 8)  # without the bias, each weight is 1 / 3
    >>> rg.Attention(bias=PreferFirst())(x, x, x).weights[0, 0, 2]
    tensor([0.5000, 0.2500, 0.2500])
    """

    @abstractmethod
    def term(self, grid: Grid, rows: Tensor | None, cols: Tensor | None) -> Tensor:
        """The summand, which broadcasts against (B, H, I, J)."""

    def transform(self, score: Tensor, grid: Grid, rows: Tensor | None, cols: Tensor | None) -> Tensor:
        return score + self.term(grid, rows, cols).to(score.dtype)


@checked
@dataclass(frozen=True)
class Softcap(Bias):
    """s -> cap tanh(s / cap): scores stay within +-cap (Gemma 2, arXiv:2408.00118). Not additive.

    >>> import torch, regard as rg
    >>> grid = rg.types.Grid.whole(rg.types.Positions.aligned_to_end(1, 3), 1, 1, 1)
    >>> rg.biases.Softcap(50.0).transform(torch.tensor([[[[-1e9, 0.0, 1e9]]]]), grid, None, None)
    tensor([[[[-50., 0., 50.]]]])
    """

    cap: Positive = 50.0

    def transform(self, score: Tensor, grid: Grid, rows: Tensor | None, cols: Tensor | None) -> Tensor:
        return (score / self.cap).tanh_() * self.cap


def alibi_slopes(num_heads: int) -> list[float]:
    """2^(-8 h / H) if H is a power of two; else the slopes of the power below, then every second of the power above.

    >>> alibi_slopes(4)
    [0.25, 0.0625, 0.015625, 0.00390625]
    """

    def geometric(n: int) -> list[float]:
        """The slopes of n heads, n a power of two."""
        return [2.0 ** (-8.0 * (h + 1) / n) for h in range(n)]

    power = 1 << (num_heads.bit_length() - 1)
    return geometric(power) + geometric(2 * power)[0::2][: num_heads - power]


@checked
@dataclass(frozen=True)
class ALiBi(AdditiveBias):
    """-m_h |i - j|: a penalty that grows with distance (Press et al. 2022, arXiv:2108.12409).

    The slopes m_h are those of the authors' code, for any number of heads. The distance has no sign: without a causal
    mask, later keys have the same penalty as earlier keys.

    >>> import regard as rg
    >>> grid = rg.types.Grid.whole(rg.types.Positions.aligned_to_end(1, 3), 1, 8, 1)
    >>> rg.ALiBi(8).term(grid, None, None)[0, :3, 0, 0].tolist()  # the first key, 2 positions back, in 3 heads
    [-1.0, -0.5, -0.25]
    """

    num_heads: Size
    relative = True

    def term(self, grid: Grid, rows: Tensor | None, cols: Tensor | None) -> Tensor:
        slopes = torch.tensor(alibi_slopes(self.num_heads), dtype=widest_float(grid.device), device="cpu")
        slopes = at("ALiBi", "heads", to_device(slopes, grid.device), 0, grid.head)
        return by_distance(grid, lambda distance: -slopes.view(-1, *(1,) * distance.ndim) * distance.abs())

    def check(self, sizes: Sizes) -> None:
        check_heads("ALiBi", self.num_heads, sizes)


def t5_bucket(distance: Tensor, num_buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """The bucket of j - i: one for each short distance, then logarithmic to `max_distance`, one for all longer ones.

    With `bidirectional`, later keys have the second half of the buckets; else they share the bucket of distance 0.
    """
    side = torch.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        side = (distance > 0) * num_buckets
        apart = distance.abs()
    else:
        apart = (-distance).clamp_min(0)
    exact = num_buckets // 2  # so many buckets have one distance each
    ratio = (apart.clamp_min(exact).float() / exact).log() / math.log(max_distance / exact)  # 0 up to `exact`
    return side + (apart.clamp_max(exact) + (ratio * (num_buckets - exact)).long()).clamp_max(num_buckets - 1)


@checked
class T5Bias(nn.Module, AdditiveBias):
    """A learned number for each head and bucket of j - i (Raffel et al. 2020, arXiv:1910.10683, section 2.1).

    With `bidirectional` each direction has half the buckets (encoders). Without it all later keys share the bucket of
    distance 0 (decoders). T5 uses the score `Dot(scale=1.0)`.

    >>> import torch, regard as rg
    >>> grid = rg.types.Grid.whole(rg.types.Positions.aligned_to_end(5, 5), 1, 2, 5)
    >>> term = rg.biases.T5Bias(num_heads=2).term(grid, None, None)
    >>> term.shape, torch.equal(term[..., :-1, :-1], term[..., 1:, 1:])  # it depends on j - i only
    (torch.Size([1, 2, 5, 5]), True)
    """

    relative = True

    def __init__(
        self, num_heads: Size, num_buckets: Size = 32, max_distance: Size = 128, bidirectional: bool = True
    ) -> None:
        super().__init__()
        sides, least = (2, "4, 2 for each direction") if bidirectional else (1, "2")
        if num_buckets < 2 * sides or max_distance <= num_buckets // sides // 2:
            raise RegardError(
                f"T5Bias(num_buckets={num_buckets}, max_distance={max_distance}, bidirectional={bidirectional}): half "
                "of the buckets of a direction hold one distance each, the others grow to max_distance. So num_buckets "
                f"is at least {least}, and max_distance is above {num_buckets // sides // 2}. T5 has 32 and 128."
            )
        self.num_buckets, self.max_distance, self.bidirectional = num_buckets, max_distance, bidirectional
        self.table = nn.Parameter(torch.randn(num_buckets, num_heads))

    def term(self, grid: Grid, rows: Tensor | None, cols: Tensor | None) -> Tensor:
        table = at("T5Bias", "heads", self.table, 1, grid.head)

        def number(distance: Tensor) -> Tensor:
            """The learned numbers of distances (...) for the heads of the tile: (H, ...)."""
            bucket = t5_bucket(distance, self.num_buckets, self.max_distance, self.bidirectional)
            return table[bucket].movedim(-1, 0)

        return by_distance(grid, number)

    def check(self, sizes: Sizes) -> None:
        check_heads("T5Bias", self.table.shape[1], sizes)

    def extra_repr(self) -> str:
        B, H = self.table.shape
        return f"{H}, num_buckets={B}, max_distance={self.max_distance}, bidirectional={self.bidirectional}"


@checked
class ShawBias(nn.Module, AdditiveBias):
    """q_i . a_{clip(j - i)} / sqrt(D): learned keys for distances (Shaw et al. 2018, arXiv:1803.02155, eq. 5).

    Distances beyond `reach` share the vector of `reach`. `scale` takes the place of 1 / sqrt(D), if it is given. Each
    query is multiplied once with all 2 reach + 1 vectors; a tile only selects among the products.

    >>> import torch, regard as rg
    >>> q, k = torch.randn(1, 1, 5, 4), torch.zeros(1, 1, 5, 4)
    >>> row = rg.Attention(bias=rg.biases.ShawBias(head_dim=4, reach=2))(q, k, k).weights[0, 0, 0]
    >>> torch.allclose(row[2:], row[2])  # keys 2, 3 and 4 ahead have one vector
    True
    """

    def __init__(self, head_dim: Size, reach: Count, scale: Number | None = None) -> None:
        super().__init__()
        self.reach, self.scale = reach, head_dim**-0.5 if scale is None else scale
        self.keys = nn.Parameter(torch.randn(2 * reach + 1, head_dim) * head_dim**-0.5)

    def prepare(self, query: Tensor, key: Tensor, positions: Positions) -> State:
        """The product of each query with the vector of each distance -reach ... reach: (B, H, I, 2 reach + 1)."""
        query = at_least_float32(query)
        with without_autocast(query.device):  # terms are parts of scores, which are never in half precision
            return query @ (self.keys.to(query.dtype) * self.scale).T, None

    def term(self, grid: Grid, rows: Tensor | None, cols: Tensor | None) -> Tensor:
        """The product of each query that belongs to its distance to each key.

        If positions have gaps, or the host does not know them, products are gathered; else a view puts them in place.
        """
        rows = prepared_part("ShawBias", rows)
        distances = grid.distances()
        if distances is None:
            index = grid.distance.clamp(-self.reach, self.reach) + self.reach
            return rows.gather(-1, index.expand(*rows.shape[:3], -1))
        return _skewed(clipped(rows, distances, self.reach), len(grid.key))

    def check(self, sizes: Sizes) -> None:
        _check_width("ShawBias", self.keys.shape[1], sizes.D, "queries")

    def extra_repr(self) -> str:
        return f"{self.keys.shape[1]}, reach={self.reach}"


@checked
class TransformerXLBias(nn.Module, AdditiveBias):
    """(u.k_j + (q_i + v).W r_{i-j}) / sqrt(D) (Dai et al. 2019, arXiv:1901.02860, section 3.3, terms b, c and d).

    r is sinusoidal, with frequencies `base`^(-2m / D). W, u and v are learned, one for each head. With the score
    `Dot()` the sum of score and bias is the paper's. A tile projects only its own distances, so no n x n tensor is
    kept.

    >>> import torch, regard as rg
    >>> bias = rg.biases.TransformerXLBias(num_heads=2, head_dim=8)
    >>> sum(p.numel() for p in bias.parameters())  # u, v and W: 2 * (8 + 8 + 8 * 8)
    160
    >>> rg.Attention(bias=bias)(*torch.randn(3, 1, 2, 5, 8)).output.shape
    torch.Size([1, 2, 5, 8])
    """

    def __init__(self, num_heads: Size, head_dim: Size, base: PositiveConstant = 10_000.0) -> None:
        super().__init__()
        if head_dim % 2:
            raise RegardError(
                f"TransformerXLBias(head_dim={head_dim}): sines come with cosines, so the width must be even."
            )
        self.head_dim, self.base = head_dim, base
        self.content = nn.Parameter(torch.randn(num_heads, 1, head_dim) * 0.02)  # u
        self.distance = nn.Parameter(torch.randn(num_heads, 1, head_dim) * 0.02)  # v
        self.projection = nn.Parameter(torch.randn(num_heads, head_dim, head_dim) * head_dim**-0.5)  # W

    def prepare(self, query: Tensor, key: Tensor, positions: Positions) -> State:
        """(q + v) W / sqrt(D) of the queries, (B, H, I, D), and u.k / sqrt(D) of the keys, (B, H, J, 1)."""
        _check_width("TransformerXLBias", self.head_dim, key.shape[3], "keys")
        query, scale = at_least_float32(query), self.head_dim**-0.5
        repeated = at_least_float32(key).repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        with without_autocast(query.device):
            by_content = (repeated * self.content * scale).sum(-1, keepdim=True)
            compared = (query + self.distance) * scale
            return compared @ self.projection.to(compared.dtype), by_content

    def term(self, grid: Grid, rows: Tensor | None, cols: Tensor | None) -> Tensor:
        """Each query is multiplied once with the wave of each distance, and once more for its place in the tile.

        Consecutive positions: a view puts the products in place. Keys with gaps: one run of keys at a time. Positions
        that the host does not know: products are gathered.
        """
        rows, cols = prepared_part("TransformerXLBias", rows), prepared_part("TransformerXLBias", cols)
        if grid.positions is not None and len(grid.positions.keys.intervals) > 1:
            return torch.cat([self.term(tile, rows, cols[:, :, run]) for run, tile in _key_runs(grid)], -1)
        distances = grid.distances()
        if distances is not None:
            behind = -torch.arange(distances.start, distances.stop, device=grid.device)  # i - j
            return _skewed(rows @ self._waves(behind, rows).T, len(grid.key)) + cols.mT
        behind, index = torch.unique(-grid.distance[0, 0], return_inverse=True)
        products = rows @ self._waves(behind, rows).T
        return products.gather(-1, index.expand(*rows.shape[:3], -1)) + cols.mT

    def _waves(self, behind: Tensor, rows: Tensor) -> Tensor:
        """Sines, then cosines, of i - j, as in the paper's code, in the dtype of the rows: (n,) -> (n, head_dim)."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device="cpu") / self.head_dim
        angle = angles(behind, self.base**-exponents, at_least_float32(rows).dtype)
        return torch.cat((angle.sin(), angle.cos()), -1).to(rows.dtype)

    def check(self, sizes: Sizes) -> None:
        check_heads("TransformerXLBias", self.content.shape[0], sizes)
        _check_width("TransformerXLBias", self.head_dim, sizes.D, "queries")

    def extra_repr(self) -> str:
        return f"{self.content.shape[0]}, {self.head_dim}"


def prepared_part(bias: str, part: Tensor | None) -> Tensor:
    """What `prepare` of a bias has computed and its `term` needs; an error if `term` was called without it."""
    if part is None:
        raise RegardError(
            f"{bias}.term(grid, None, None): the term needs the tensors of the queries and keys. In a call "
            "regard.Attention(bias=...) gives them; by hand: bias.term(grid, *bias.prepare(query, key, positions))."
        )
    return part


def is_additive(bias: Bias) -> TypeGuard[AdditiveBias]:
    """Whether the bias adds its `term`, and nothing else."""
    return computes_as(bias, AdditiveBias, "transform")


def is_softcap(bias: Bias) -> TypeGuard[Softcap]:
    """Whether the bias is the soft cap of its `cap`."""
    return computes_as(bias, Softcap, "transform")


def is_shaw(bias: Bias) -> TypeGuard[ShawBias]:
    """Whether the bias adds the terms that `ShawBias` adds."""
    return computes_as(bias, ShawBias, "transform", "term")


def by_distance(grid: Grid, number: Callable[[Tensor], Tensor]) -> Tensor:
    """`number(j - i)` for all pairs of a tile: (1, H, I, J). `number` turns distances (...) into numbers (H or 1, ...).

    If both queries and keys have consecutive positions, it is called with each distance once, else with each pair.
    """
    distances = grid.distances()
    asked = (
        grid.distance[0, 0] if distances is None else torch.arange(distances.start, distances.stop, device=grid.device)
    )
    each = number(asked)
    if each.shape[1:] != asked.shape or len(each) not in (1, len(grid.head)):
        raise RegardError(
            f"by_distance: of distances {tuple(asked.shape)} a bias returned numbers {tuple(each.shape)}; they must be "
            f"(heads, or 1 for all, *distances) = {(len(grid.head), *asked.shape)}."
        )
    return each[None] if distances is None else _Diagonals.apply(each, len(grid.query))[None]  # type: ignore[index]


class _Diagonals(torch.autograd.Function):
    """A number for each j - i, (H, I + J - 1), along the diagonals of (H, I, J).

    Backward sums along the diagonals. The rows are reversed, padded to I + J columns and joined. Cut into rows of
    I + J - 1 numbers, each row is moved by one column more than the row before it, so diagonals become columns.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(each: Tensor, num_queries: int) -> Tensor:
        return along_diagonals(each, num_queries).flip(-2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.num_queries = inputs[1]

    @staticmethod
    def jvp(ctx: Any, along: Tensor, _: None) -> Tensor:
        return _Diagonals.forward(along, ctx.num_queries)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        H, I, J = grad.shape
        moved = torch.nn.functional.pad(grad.flip(-2), (0, I)).flatten(-2)[:, : I * (I + J - 1)]
        return moved.view(H, I, I + J - 1).sum(-2), None


def _key_runs(grid: Grid) -> Iterator[tuple[slice, Grid]]:
    """For each run of consecutive key positions of a tile: the slice of its keys, and the tile of these keys."""
    assert grid.positions is not None
    first = 0
    for start, stop in grid.positions.keys:
        run = slice(first, first + stop - start)
        yield run, grid.tile(slice(None), run)
        first = run.stop


def clipped(rows: Tensor, distances: range, reach: int) -> Tensor:
    """The columns of `rows`, which are for the distances -reach ... reach, for these distances: (B, H, I, n).

    Distances beyond `reach` repeat the outermost column.
    """
    first, last = (min(max(d, -reach), reach) for d in (distances[0], distances[-1]))
    before, after = max(first - distances[0], 0), max(distances[-1] - last, 0)
    middle = rows[..., first + reach : last + reach + 1]
    parts = [middle[..., :1].expand(*rows.shape[:3], before), middle, middle[..., -1:].expand(*rows.shape[:3], after)]
    return torch.cat(parts, -1)


def _skewed(by_distance: Tensor, num_keys: int) -> Tensor:
    """(B, H, I, I + J - 1), a column for each j - i -> (B, H, I, J): a view whose rows each begin one column earlier.

    The first query has the smallest position, so its row begins last, at column I - 1. Rows of memory have I + J - 1
    numbers, so a step of one number less is one row down and one column back.
    """
    x = by_distance.contiguous()
    (B, H, I, count), (b, h, _, _) = x.shape, x.stride()
    return x.as_strided((B, H, I, num_keys), (b, h, max(count - 1, 1), 1), x.storage_offset() + I - 1)


@checked
class LearnedTable(nn.Module, AdditiveBias):
    """A learned number for each head and distance; beyond `reach` the outermost is used (Swin, arXiv:2103.14030).

    >>> import torch, regard as rg
    >>> bias = rg.biases.LearnedTable(num_heads=1, reach=1)
    >>> bias.table.data[0] = torch.tensor([1.0, 2.0, 3.0])  # before, here, after
    >>> bias.term(rg.types.Grid.whole(rg.types.Positions.aligned_to_end(3, 3), 1, 1, 3), None, None)[0, 0].tolist()
    [[2.0, 3.0, 3.0], [1.0, 2.0, 3.0], [1.0, 1.0, 2.0]]
    """

    relative = True

    def __init__(self, num_heads: Size, reach: Count) -> None:
        super().__init__()
        self.reach = reach
        self.table = nn.Parameter(torch.zeros(num_heads, 2 * reach + 1))

    def term(self, grid: Grid, rows: Tensor | None, cols: Tensor | None) -> Tensor:
        reach, table = self.reach, at("LearnedTable", "heads", self.table, 0, grid.head)
        return by_distance(grid, lambda distance: table[:, distance.clamp(-reach, reach) + reach])

    def check(self, sizes: Sizes) -> None:
        check_heads("LearnedTable", self.table.shape[0], sizes)

    def extra_repr(self) -> str:
        return f"{self.table.shape[0]}, reach={self.reach}"


def check_heads(bias: str, num_heads: int, sizes: Sizes) -> None:
    """Refuse another number of heads than that of the bias."""
    if num_heads != sizes.H:
        raise RegardError(f"{bias}: made for {num_heads} heads, the query has {sizes.H}. Create it for {sizes.H}.")


def _check_width(bias: str, head_dim: int, width: int, name: str) -> None:
    if head_dim != width:
        raise RegardError(f"{bias}: made for width {head_dim}, the {name} have {width}. Create it for {width}.")
