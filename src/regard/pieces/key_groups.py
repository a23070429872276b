"""Keys that stand for many tokens: the keys and values of a group are fixed sums of those of its tokens."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from regard.base.checks import Size, checked
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import Sizes, at_least_float32, to_device
from regard.base.spans import EMPTY, Spans
from regard.pieces.grid import Grid
from regard.pieces.mask import Composed, Mask
from regard.pieces.mask_checks import select_entries
from regard.pieces.piece import Piece
from regard.pieces.token_ranks import TokenRanks


class KeyGroups(Piece):
    """Base of all groupings: group m has the key sum_j A_mj k_j and the value sum_j C_mj v_j.

    A weight on group m is a weight C_mj on each of its tokens, so the map over tokens is W C. `unfolded` computes it.

    >>> import torch, regard as rg
    >>> class Pairs(rg.composites.KeyGroups):  # the sum of tokens 2 m and 2 m + 1
    ...     def keys(self, x):
    ...         return x[:, :, 0::2] + x[:, :, 1::2]
    ...     def unfolded(self, weights, columns, num_keys):
    ...         return weights[..., columns // 2]
    >>> q, k, v = torch.randn(3, 1, 2, 6, 8)
    >>> seen = rg.composites.Grouped(rg.Attention(), Pairs())(q, k, v)
    >>> torch.allclose(seen.weights.dense() @ v, seen.output, atol=1e-5), seen.weights.by_group.shape
    (True, (1, 2, 6, 3))
    """

    #: Whether the value of a group is a mean of its tokens' values: weights of tokens sum to those of groups.
    are_means: ClassVar[bool] = False

    @abstractmethod
    def keys(self, x: Tensor) -> Tensor:
        """Keys (B, G, J, D) -> keys of the groups (B, G, M, D)."""

    def values(self, x: Tensor) -> Tensor:
        """Values (B, G, J, E) -> values of the groups (B, G, M, E); by default grouped as the keys are."""
        return self.keys(x)

    @abstractmethod
    def unfolded(self, weights: Tensor, columns: Tensor, num_keys: int) -> Tensor:
        """Weights of the groups (B, H, I, M) -> weights of the tokens `columns` (indices), (B, H, I, J')."""

    def positions(self, positions: Positions, num_groups: int) -> Positions:
        """The positions of queries and groups. By default groups have none, so only masks of all keys are possible."""
        return Positions.aligned_to_end(num_groups, num_groups)

    def visible(self, mask: Mask | None, sizes: Sizes, grid: Grid) -> tuple[KeyGroups, Mask | None]:
        """The groups of a call with this mask of tokens, and the mask of these groups."""
        return self, mask

    def select(self, batch: Tensor) -> KeyGroups:
        """The groups of some batch entries."""
        return self

    def check(self, num_keys: int, mask: Mask | None) -> None:
        """Refuse a number of keys, or a mask that needs positions of groups."""
        if mask is not None:
            raise RegardError(
                f"Grouped: groups of {type(self).__name__} stand for tokens of the whole sequence, without a position, "
                f"so the mask {mask!r} cannot hide some of them. Leave the mask out, or use MeanGroups."
            )


@checked
@dataclass(frozen=True)
class MeanGroups(KeyGroups):
    """Group m is the mean of the `size` tokens from m `stride` on; by default groups do not overlap.

    The position of a group is that of its last token, so with `regard.causal()` no query attends to a later token.
    Tokens after the last whole group are in no group. A query attends to a group if the mask shows it all tokens of the
    group. Groups begin anew with each packed document, and padding is in none of them: a document among others, or a
    padded text, has the groups that it has alone, as in flash-linear-attention.

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 1, 6, 4)
    >>> weights = rg.composites.Grouped(rg.Attention(mask=rg.causal()), rg.composites.MeanGroups(2))(x, x, x).weights
    >>> weights[0, 0, 4]  # the groups (0, 1) and (2, 3); token 5 is not there yet
    tensor([0.2500, 0.2500, 0.2500, 0.2500, 0.0000, 0.0000])
    """

    are_means: ClassVar[bool] = True
    size: Size
    stride: Size | None = None

    @property
    def step(self) -> int:
        return self.size if self.stride is None else self.stride

    def count(self, num_keys: int) -> int:
        """The number of whole groups."""
        return max(0, (num_keys - self.size) // self.step + 1)

    def keys(self, x: Tensor) -> Tensor:
        if not self.count(x.shape[2]):
            return x[:, :, :0]
        return at_least_float32(x).unfold(2, self.size, self.step).mean(-1).to(x.dtype)

    def unfolded(self, weights: Tensor, columns: Tensor, num_keys: int) -> Tensor:
        """The weights of all groups of a token, divided by `size`. With overlap a token is in several groups."""
        tokens = weights.new_zeros(*weights.shape[:3], len(columns))
        columns, num_groups = to_device(columns, weights.device), weights.shape[3]
        for earlier in range(0, self.size, self.step):  # the groups of a token, from the last to the first
            group = (columns - earlier) // self.step
            is_inside = (group >= 0) & (group < num_groups) & (columns < group * self.step + self.size)
            if num_groups:
                tokens += weights[..., group.clamp(0, num_groups - 1)] * is_inside
        return tokens / self.size

    def positions(self, positions: Positions, num_groups: int) -> Positions:
        """Each group has the position of its last token."""
        last = positions.keys.tensor()[self.size - 1 :: self.step][:num_groups].tolist()
        return Positions(positions.start, Spans.union((j, j + 1) for j in last) if last else EMPTY)

    def visible(self, mask: Mask | None, sizes: Sizes, grid: Grid) -> tuple[KeyGroups, Mask | None]:
        """These groups, if the mask is causal or missing; else groups of real tokens of one document, and a mask."""
        if mask is None or mask.is_lower_triangular:
            return self, mask
        mask.check(sizes, grid.placed(f"{type(self).__name__}.visible"))
        tokens, last, is_own = TokenRanks.of(mask, grid).groups(self.size, self.step)
        return TokenGroups(tokens, last), GroupMask(mask, grid.key[last], grid.key[tokens], is_own)

    def check(self, num_keys: int, mask: Mask | None) -> None:
        """Accept any number of keys and any mask."""


@dataclass(frozen=True, eq=False)
class TokenGroups(KeyGroups):
    """Group m is the mean of the keys `tokens[:, m]`, indices (B or 1, M, size).

    `last` (M,) is the index of the last key of each group, which is the same in all batch entries.
    """

    tokens: Tensor
    last: Tensor

    def keys(self, x: Tensor) -> Tensor:
        index = self.tokens.flatten(1)[:, None, :, None].expand(len(x), x.shape[1], -1, x.shape[3])
        return at_least_float32(x).gather(2, index).unflatten(2, self.tokens.shape[1:]).mean(3).to(x.dtype)

    def unfolded(self, weights: Tensor, columns: Tensor, num_keys: int) -> Tensor:
        """Add a share of each group's weight to each of its tokens, then take the columns."""
        index = to_device(self.tokens, weights.device).flatten(1)[:, None, None].expand(*weights.shape[:3], -1)
        size = self.tokens.shape[2]
        tokens = weights.new_zeros(*weights.shape[:3], num_keys)
        tokens = tokens.scatter_add(3, index, weights.repeat_interleave(size, 3) / size)
        return tokens[..., to_device(columns, weights.device)]

    def positions(self, positions: Positions, num_groups: int) -> Positions:
        return Positions(positions.start, positions.at(Spans.union((j, j + 1) for j in self.last.tolist())))

    def select(self, batch: Tensor) -> KeyGroups:
        tokens = self.tokens
        return self if len(tokens) == 1 else TokenGroups(tokens[to_device(batch, tokens.device)], self.last)


@dataclass(frozen=True, eq=False)
class GroupMask(Composed):
    """A query may attend to a group of its entry if `mask` shows it all tokens of the group.

    `last` has the position of the last token of each group, (M,), `tokens` those of all its tokens, (B or 1, M, size).
    Entries may have different groups: `is_own` tells which, (B or 1, M).
    """

    mask: Mask
    last: Tensor
    tokens: Tensor
    is_own: Tensor
    relative = False  # type: ignore[assignment]

    @property
    def parts(self) -> tuple[Mask]:
        return (self.mask,)

    @property
    def batched(self) -> bool:  # type: ignore[override]
        return len(self.tokens) != 1 or self.mask.batched

    def allowed(self, grid: Grid) -> Tensor:
        """Ask `mask` for each token of the groups once, and gather the answers: the keys of `grid` are groups."""
        last, tokens, is_own = (to_device(x, grid.device) for x in (self.last, self.tokens, self.is_own))
        groups, entries = torch.searchsorted(last, grid.key), grid.batch if len(tokens) > 1 else slice(None)
        tokens, is_own = tokens[entries][:, groups], is_own[entries][:, groups]
        keys, place = tokens.unique(return_inverse=True)
        flags = self.mask.allowed(replace(grid, key=keys, positions=None))
        flags = flags.expand(max(len(flags), len(tokens)), -1, -1, len(keys))
        place = place.flatten(1)[:, None, None].expand(*flags.shape[:3], -1)
        return flags.gather(3, place).unflatten(3, tokens.shape[1:]).all(4) & is_own[:, None, None]

    def any_allowed(self, start: int, stop: int) -> Spans:
        return self._groups(self._inside(self.mask.any_allowed(start, stop)).any(0))

    def all_allowed(self, start: int, stop: int) -> Spans:
        return self._groups(self._inside(self.mask.all_allowed(start, stop)).all(0))

    def _inside(self, tokens: Spans) -> Tensor:
        """The groups of each entry all of whose tokens are in the spans, (B or 1, M)."""
        edges = torch.tensor(tokens.intervals, dtype=torch.int64, device=self.tokens.device).flatten()
        is_in_span = torch.bucketize(self.tokens, edges, right=True) % 2 == 1  # after a start and before its stop
        return is_in_span.all(2) & self.is_own

    def _groups(self, flags: Tensor) -> Spans:
        """The positions of flagged groups (M,), as one interval for each run of them."""
        last = self.last.tolist()
        return Spans(tuple((last[first], last[stop - 1] + 1) for first, stop in Spans.where(flags)))

    def check(self, sizes: Sizes, positions: Positions) -> None:
        """The mask was checked with the tokens."""

    def of_entry(self, entry: int) -> Mask:
        """This mask, which is right for every entry; its spans are those of all entries."""
        return self

    def select(self, index: Tensor) -> Mask:
        tokens, is_own = (
            x if len(x) == 1 else select_entries("GroupMask", x, index) for x in (self.tokens, self.is_own)
        )
        return GroupMask(self.mask.select(index), self.last, tokens, is_own)


@checked
class ProjectedGroups(nn.Module, KeyGroups):
    """Group m is a learned sum of all tokens: keys E k and values F v, E and F of size (num_groups, length).

    Shorter sequences use the first columns. With `is_shared` keys and values have one matrix, F = E (Wang et al. 2020,
    Linformer, arXiv:2006.04768, section 4). Every group stands for later tokens too, so it cannot be causal.

    >>> import torch, regard as rg
    >>> groups = rg.composites.ProjectedGroups(length=64, num_groups=4)
    >>> groups.keys(torch.randn(1, 2, 10, 8)).shape, [tuple(p.shape) for p in groups.parameters()]
    (torch.Size([1, 2, 4, 8]), [(4, 64), (4, 64)])
    """

    def __init__(self, length: Size, num_groups: Size, is_shared: bool = False) -> None:
        super().__init__()
        self.of_keys = nn.Parameter(torch.empty(num_groups, length))
        self.of_values = self.of_keys if is_shared else nn.Parameter(torch.empty(num_groups, length))
        for matrix in {id(p): p for p in (self.of_keys, self.of_values)}.values():
            nn.init.uniform_(matrix, -(num_groups**-0.5), num_groups**-0.5)

    def keys(self, x: Tensor) -> Tensor:
        return _projected(self.of_keys, x)

    def values(self, x: Tensor) -> Tensor:
        return _projected(self.of_values, x)

    def unfolded(self, weights: Tensor, columns: Tensor, num_keys: int) -> Tensor:
        return weights @ self.of_values[:, to_device(columns, self.of_values.device)].to(weights.dtype)

    def check(self, num_keys: int, mask: Mask | None) -> None:
        length = self.of_keys.shape[1]
        if num_keys > length:
            raise RegardError(
                f"ProjectedGroups: made for at most {length} keys, got {num_keys}. Create it with length={num_keys}."
            )
        super().check(num_keys, mask)

    def extra_repr(self) -> str:
        num_groups, length = self.of_keys.shape
        return f"{length}, {num_groups}{', is_shared=True' if self.of_keys is self.of_values else ''}"


def _projected(matrix: Tensor, x: Tensor) -> Tensor:
    """A sum over tokens in float32 at least: (M, length), (B, G, J, D) -> (B, G, M, D)."""
    wide = at_least_float32(x)
    return (matrix[:, : x.shape[2]].to(wide.dtype) @ wide).to(x.dtype)
