"""Roles of heads on the patches of an image: same row, same column, neighbors on the grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.base.checks import Count, Size, checked
from regard.base.errors import RegardError
from regard.maps import AttentionMap
from regard.stats.numbering import layer_numbers
from regard.stats.profile import one_text
from regard.stats.roles import PATCH_KINDS, IsLink, Measured, RoleTable, TargetMass, mean_score, roles_of_kind
from regard.stats.statistics import Allowed

# `PatchGrid`: where the patches of an image or a video are among the tokens of a model.


@checked
@dataclass(frozen=True)
class PatchGrid:
    """Where the patches of one image, or of the frames of one video, are among the tokens.

    The token of the patch in row r and column c of frame f is `start + (f * rows + r) * columns + c`, or the entry
    of `tokens` with this number if `tokens` is given.

    >>> import torch
    >>> from regard.stats import PatchGrid
    >>> grid = PatchGrid(2, 3, start=1)  # a class token, then 6 patches
    >>> grid.token(1, 2), grid.fold(torch.arange(7)).tolist()
    (6, [[[1, 2, 3], [4, 5, 6]]])
    """

    rows: int
    columns: int
    start: int = 0
    frames: int = 1
    tokens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if min(self.rows, self.columns, self.frames) < 1 or self.start < 0:
            raise RegardError(f"{self}: rows, columns and frames must be at least 1, and start at least 0.")
        if self.tokens is not None and len(self.tokens) != len(self):
            raise RegardError(
                f"PatchGrid: {self.frames} x {self.rows} x {self.columns} patches need {len(self)} tokens, got "
                f"{len(self.tokens)}."
            )

    def __len__(self) -> int:
        """The number of patches."""
        return self.frames * self.rows * self.columns

    @property
    def places(self) -> Sequence[int]:
        """The token of every patch: frame by frame, row by row."""
        return range(self.start, self.start + len(self)) if self.tokens is None else self.tokens

    def token(self, row: int, column: int, frame: int = 0) -> int:
        """The token of one patch."""
        return self.places[(frame * self.rows + row) * self.columns + column]

    def fold(self, row: Tensor) -> Tensor:
        """A row of weights (..., J) as pictures (..., frames, rows, columns)."""
        places = torch.tensor(list(self.places), device=row.device)
        return row[..., places].unflatten(-1, (self.frames, self.rows, self.columns))


#: The step on the grid of each role of one neighbor: (rows, columns).
STEPS = {"left": (0, -1), "right": (0, 1), "above": (-1, 0), "below": (1, 0)}


@checked
@torch.no_grad()
def patch_roles(
    maps: Mapping[str, AttentionMap],
    grid: PatchGrid,
    *,
    null: Mapping[str, AttentionMap],
    batch: Count = 0,
    numbers: Sequence[int] | None = None,
) -> RoleTable:
    """Score every head for the roles of places on the grid: row, column, left, right, above, below.

    Row and column leave out the neighbors of a patch, which have roles of their own.

    A score is the mean of sum_j w_ij over the keys of the role, for all patches i that have such a key in their frame.
    `null` are the maps of a run on the image with its patches shuffled (`shuffle_patches`): a head that depends on
    places has the same score there. A head has a role if both scores are at least 0.4, and the lower one is 0.2 above
    that of a head with equal weights. No role is given for fewer than 25 patches that have such a key.

    `batch` is the entry of each map that is read. `numbers` are the numbers of the layers; by default they are read
    from the module paths (`layer_numbers`).

    >>> import torch, regard as rg
    >>> from regard.stats import PatchGrid, patch_roles
    >>> rows = torch.eye(8).repeat_interleave(8, 0) * 5  # 64 patches; queries and keys say their row
    >>> x = rows.expand(1, 1, 64, 8)
    >>> maps = {"layers.0": rg.Attention()(x, x, x).weights}
    >>> [role.kind for role in patch_roles(maps, PatchGrid(8, 8), null=maps).labeled]
    ['row']
    """
    _check(maps, null, grid)
    head_roles = []
    for number, weights, shuffled in zip(layer_numbers(maps, numbers), maps.values(), null.values(), strict=True):
        scores, nulls = (_measure(one_text("patch_roles", each, batch), grid) for each in (weights, shuffled))
        for kind in PATCH_KINDS:
            head_roles += roles_of_kind(kind, number, scores[kind], nulls[kind])
    return RoleTable(head_roles)


@checked
def shuffle_patches(pixels: Tensor, rows: Size, columns: Size, seed: Count = 0) -> Tensor:
    """Images `pixels` (..., height, width) with their rows x columns patches in another order, the same for all images.

    `seed` decides the order.

    >>> import torch
    >>> from regard.stats import shuffle_patches
    >>> shuffle_patches(torch.arange(8.0).view(1, 2, 4), 1, 4).shape
    torch.Size([1, 2, 4])
    """
    if pixels.ndim < 2:
        raise RegardError(f"shuffle_patches: pixels are (..., height, width), got {tuple(pixels.shape)}.")
    height, width = pixels.shape[-2:]
    if height % rows or width % columns:
        raise RegardError(
            f"shuffle_patches: an image of {height} x {width} pixels cannot be cut into {rows} x {columns} equal "
            "patches. Give the rows and columns of the model's patches."
        )
    order = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(seed)).to(pixels.device)
    # (..., rows, columns, height of a patch, width of a patch)
    cut = pixels.unflatten(-2, (rows, height // rows)).unflatten(-1, (columns, width // columns)).transpose(-3, -2)
    mixed = cut.flatten(-4, -3)[..., order, :, :].unflatten(-3, (rows, columns)).transpose(-3, -2)
    return mixed.reshape(pixels.shape)


def _check(maps: Mapping[str, AttentionMap], null: Mapping[str, AttentionMap], grid: PatchGrid) -> None:
    """Refuse maps of other layers than those of the null, and maps that are not of self-attention over all patches."""
    if not maps or list(maps) != list(null):
        raise RegardError(
            "patch_roles: maps and null must be of the same layers, at least one. Run the same model on the image and "
            "on shuffle_patches(image, rows, columns)."
        )
    for name, weights in (*maps.items(), *null.items()):
        I, J = weights.shape[2:]
        if I != J or max(grid.places) >= J:
            raise RegardError(
                f"patch_roles: the map of {name!r} has {I} queries and {J} keys, and the last patch of the grid is "
                f"token {max(grid.places)}. Roles of patches need self-attention over all patches."
            )


def _measure(weights: AttentionMap, grid: PatchGrid) -> dict[str, Measured]:
    """The scores of one map for each kind of role; means over the queries that are patches."""
    links = _links(grid, weights.shape[3], weights.device)
    reductions = [TargetMass(weights, links[kind]) for kind in PATCH_KINDS]
    allowed, *sums = weights.summarize(Allowed(weights), *reductions)
    is_patch = torch.zeros(weights.shape[2], dtype=torch.bool, device=weights.device)
    is_patch[torch.tensor(list(grid.places), device=weights.device)] = True
    return {kind: mean_score(mass, None, allowed, is_patch) for kind, mass in zip(PATCH_KINDS, sums, strict=True)}


def _links(grid: PatchGrid, num_tokens: int, device: torch.device) -> dict[str, IsLink]:
    """For each kind of role, which pairs of tokens (query, key) are its links.

    A token that is no patch has the frame -1, and is in no pair.
    """
    places = torch.tensor(list(grid.places), device=device)
    patch = torch.arange(len(grid), device=device)
    frame, row, column = (torch.full((num_tokens,), -1, device=device) for _ in range(3))
    frame[places] = patch // (grid.rows * grid.columns)
    row[places] = patch // grid.columns % grid.rows
    column[places] = patch % grid.columns

    def same_frame(i: Tensor, j: Tensor) -> Tensor:
        return (frame[i] == frame[j]) & (frame[i] >= 0)

    def beyond_neighbors(place: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (place[i] - place[j]).abs() > 1

    def step(down: int, right: int) -> IsLink:
        return lambda i, j: same_frame(i, j) & (row[j] == row[i] + down) & (column[j] == column[i] + right)

    links: dict[str, IsLink] = {kind: step(*by) for kind, by in STEPS.items()}
    links["row"] = lambda i, j: same_frame(i, j) & (row[i] == row[j]) & beyond_neighbors(column, i, j)
    links["column"] = lambda i, j: same_frame(i, j) & (column[i] == column[j]) & beyond_neighbors(row, i, j)
    return links
