"""`PatchGrid`: where the patches of an image or a video are among the tokens of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.base.checks import checked
from regard.base.errors import RegardError


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
