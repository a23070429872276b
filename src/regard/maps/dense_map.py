"""`DenseMap`: weights that are in memory, or that a function computes all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from regard.attention import Attention
from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import at_least_float32, to_device, unusual_kind
from regard.maps.attention_map import AttentionMap
from regard.maps.gradients import LiveRows, Rows
from regard.maps.indices import Index
from regard.maps.reductions import are_shares
from regard.pieces.grid import Grid


def has_negative(weights: Tensor) -> bool:
    """Whether a weight is below 0."""
    return bool((weights < 0).any())


class DenseMap(AttentionMap):
    """Weights (B, H, I, J) in memory, such as a pseudo-inverse between two other maps.

    >>> import torch, regard as rg
    >>> rg.maps.DenseMap(torch.eye(3)[None, None])[0, 0, 1]
    tensor([0., 1., 0.])
    """

    _made_of: ClassVar[str] = "a matrix of weights, weights.matrix"

    def __init__(
        self,
        source: Tensor | Callable[[], Tensor],
        is_signed: bool | Callable[[Tensor], bool] = has_negative,
        grid: Grid | None = None,
        rule: Callable[[Tensor], Attention] | None = None,
    ) -> None:
        """`source` is the matrix, or a function that computes it at each read; then `grid` has its sizes and positions.

        The batch entries and heads of `grid` are indices in the source, so they may be a selection of it. `is_signed`
        says whether weights may be negative, or is a function of the matrix. `rule` is a function of the matrix that
        returns an attention with only a mask, which describes where the weights are 0.
        """
        if grid is None:
            if not isinstance(source, Tensor) or source.ndim != 4:
                given = tuple(source.shape) if isinstance(source, Tensor) else type(source).__name__
                raise RegardError(f"DenseMap: the matrix must be a tensor (B, H, I, J), got {given}.")
            kind = "without numbers (on the meta device)" if source.is_meta else unusual_kind(source)
            if kind:
                raise RegardError(f"DenseMap: the matrix is {kind}. Give a dense tensor of real numbers.")
            B, H, I, J = source.shape
            grid = Grid.whole(Positions.aligned_to_end(I, J), B, H, I, source.device)
            source = source if torch.is_grad_enabled() else source.detach()
        self.grid, self.positions = grid, grid.placed("DenseMap")
        self._source, self._is_signed, self._rule = source, is_signed, rule

    @property
    def _whole(self) -> Tensor:
        """The matrix of all batch entries and heads of the source."""
        return self._source if isinstance(self._source, Tensor) else self._source()

    @property
    def matrix(self) -> Tensor:
        """All weights, without a budget."""
        return self._whole[self.grid.batch][:, self.grid.head]

    @cached_property
    def attention(self) -> Attention:  # type: ignore[override]
        """An attention with only a mask, the rule for the zeros of the weights, if `rule` finds one.

        It is the rule of the whole source: after a selection the grid still numbers batch entries as the source does.
        """
        return Attention() if self._rule is None else self._rule(self._whole)

    @cached_property
    def is_signed(self) -> bool:  # type: ignore[override]
        return self._is_signed if isinstance(self._is_signed, bool) else self._is_signed(self._whole)

    @cached_property
    def has_shares(self) -> bool:  # type: ignore[override]
        return not self.is_signed and are_shares(at_least_float32(self._whole))

    @property
    def _dtype(self) -> torch.dtype:
        return at_least_float32(self._source).dtype if isinstance(self._source, Tensor) else super()._dtype

    @checked
    def select(self, batch: Index, head: Index) -> DenseMap:
        """The map of some batch entries and heads (indices)."""
        b, h = (to_device(index, self.device) for index in self._selected_indices(batch, head))
        grid = replace(self.grid, batch=self.grid.batch[b], head=self.grid.head[h])
        return DenseMap(self._source, self._is_signed, grid, self._rule)

    @property
    def requires_grad(self) -> bool:
        return isinstance(self._source, Tensor) and self._source.requires_grad

    def live_rows(self) -> LiveRows:
        """Rows of the whole matrix, which is the only tensor."""

        def around(tensors: Sequence[Tensor]) -> Rows:
            return lambda queries, keys: (self._tile_of(tensors[0], queries, keys.tensor(self.device)), None)

        return LiveRows([self._whole], around)

    def _weights(self, rows: Tensor | slice, cols: Tensor | slice) -> Tensor:
        return self._tile_of(self._whole, rows, cols)

    def _tile_of(self, whole: Tensor, rows: Tensor | slice, cols: Tensor | slice) -> Tensor:
        """These rows and columns of the matrix `whole`, for the batch entries and heads of this map."""
        rows, cols = (x if isinstance(x, slice) else to_device(x, self.device) for x in (rows, cols))
        return at_least_float32(whole[:, :, rows][..., cols][self.grid.batch][:, self.grid.head])
