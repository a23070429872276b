"""Keys that stand for many tokens: the keys and values of a group are fixed sums of those of its tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.checks import Size, checked
from regard.errors import RegardError
from regard.pieces.mask import Mask
from regard.positions import Positions
from regard.shapes import at_least_float32, to_device
from regard.spans import EMPTY, Spans


class KeyGroups(ABC):
    """Base of all groupings: group m has the key sum_j A_mj k_j and the value sum_j C_mj v_j.

    A weight on group m is a weight C_mj on each of its tokens, so the map over tokens is W C. `unfolded` computes it.

    >>> import torch, regard as rg
    >>> class Pairs(rg.KeyGroups):  # the sum of tokens 2 m and 2 m + 1
    ...     def keys(self, x):
    ...         return x[:, :, 0::2] + x[:, :, 1::2]
    ...     def unfolded(self, weights, columns, num_keys):
    ...         return weights[..., columns // 2]
    >>> q, k, v = torch.randn(3, 1, 2, 6, 8)
    >>> seen = rg.attend(rg.Grouped(rg.Attention(), Pairs()), q, k, v)
    >>> torch.allclose(seen.weights.dense() @ v, seen.output, atol=1e-5), seen.weights.by_group.shape
    (True, (1, 2, 6, 3))
    """

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
    Tokens after the last whole group are in no group.

    >>> import torch, regard as rg
    >>> x = torch.zeros(1, 1, 6, 4)
    >>> weights = rg.attend(rg.Grouped(rg.Attention(mask=rg.causal()), rg.MeanGroups(2)), x, x, x).weights
    >>> weights[0, 0, 4]  # the groups (0, 1) and (2, 3); token 5 is not there yet
    tensor([0.2500, 0.2500, 0.2500, 0.2500, 0.0000, 0.0000])
    """

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
        tokens = weights.new_zeros(*weights.shape[:3], len(columns))
        columns, num_groups = to_device(columns, weights.device), weights.shape[3]
        for number in range(-(-self.size // self.step)):  # the groups of a token, from the last to the first
            group = columns // self.step - number
            inside = (group >= 0) & (group < num_groups) & (columns < group * self.step + self.size)
            if num_groups:
                tokens += weights[..., group.clamp(0, num_groups - 1)] * inside
        return tokens / self.size

    def positions(self, positions: Positions, num_groups: int) -> Positions:
        last = positions.keys.tensor()[self.size - 1 :: self.step][:num_groups].tolist()
        return Positions(positions.start, Spans.union((j, j + 1) for j in last) if last else EMPTY)

    def check(self, num_keys: int, mask: Mask | None) -> None:
        """Accept any number of keys and any mask."""


@checked
class ProjectedGroups(nn.Module, KeyGroups):
    """Group m is a learned sum of all tokens: keys E k and values F v, E and F of size (num_groups, length).

    Shorter sequences use the first columns. With `is_shared` keys and values have one matrix, F = E (Wang et al. 2020,
    Linformer, arXiv:2006.04768, section 4). Every group stands for later tokens too, so it cannot be causal.

    >>> import torch, regard as rg
    >>> groups = rg.ProjectedGroups(length=64, num_groups=4)
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
