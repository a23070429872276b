"""Rows of queries from scores to output and row statistic: `dense` computes all rows, `blocked` one block of them."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.attention import Attention, Prepared, scores
from regard.base.positions import Positions
from regard.base.shapes import as_slice, at_least_float32, grouped_values, has_numbers, to_device, without_autocast
from regard.base.spans import Spans
from regard.pieces.dropout import kept
from regard.pieces.grid import Grid
from regard.pieces.normalizer import Normalizer, RowStatistic, is_coarse

#: Bytes of scores that may be held while the statistic of rows is computed again.
RECOMPUTED_BYTES = 48 << 20


def attend_rows(
    attention: Attention,
    tile: Prepared,
    value: Tensor,
    grid: Grid,
    columns: Tensor,
    *,
    masked: bool = True,
    dropout: float = 0.0,
    seed: int = 0,
) -> tuple[Tensor, RowStatistic]:
    """Output (B, H, I, E) and statistic of whole rows. `tile` and `value` hold every key they may attend to.

    `columns` are the indices of these keys among all, which a statistic may keep (top-k does). `grid` has the
    coordinates of the tile. Without `masked` the mask allows all its pairs. `dropout` is the share of the weights that
    are set to 0; which ones, `seed` and the coordinates decide.
    """
    s = scores(attention, tile, grid, masked)
    weights, row_statistic = attention.normalizer.normalize_rows(s, columns)
    if dropout:
        weights = weights * kept(grid, dropout, seed) / (1 - dropout)
    with without_autocast(value.device):  # it would round the weights
        output = grouped_values(weights, at_least_float32(value).to(weights.dtype)).to(value.dtype)
    return output, tuple(t.detach() for t in row_statistic)


def finished_rows(normalizer: Normalizer, output: Tensor, row_statistic: RowStatistic) -> tuple[Tensor, RowStatistic]:
    """Output and statistic of rows after all keys are merged: a sink is added, which takes a share of each row."""
    whole = normalizer.finish(row_statistic)
    if whole is row_statistic:
        return output, row_statistic
    return output * normalizer.share(row_statistic, whole)[..., None].to(output.dtype), whole


@torch.no_grad()
def with_remainder(
    attention: Attention, prepared: Prepared, positions: Positions, grid: Grid, row_statistic: RowStatistic
) -> RowStatistic:
    """The log-sum-exp and its rounding error (the remainder) in place of a log-sum-exp alone; other statistics as is.

    A row whose log-sum-exp is coarse in some batch entry or head is computed again from its scores, in all of them. All
    other rows have a remainder of 0, and so have all rows if the numbers of the tensor cannot be read.
    """
    if len(row_statistic) != 1 or attention.normalizer.as_softmax is None:
        return row_statistic
    logsumexp, remainder = row_statistic[0], torch.zeros_like(row_statistic[0])
    coarse = is_coarse(logsumexp).flatten(0, 1).any(0)
    if not has_numbers(coarse) or not len(coarse_rows := coarse.nonzero().flatten().cpu()):
        return logsumexp, remainder
    logsumexp, (B, H, _) = logsumexp.clone(), logsumexp.shape
    row_bytes = B * H * grid.key.numel() * prepared.query.element_size() * (2 * attention.score.floats_per_score + 4)
    for rows in coarse_rows.split(max(1, RECOMPUTED_BYTES // row_bytes)):
        exact = recomputed_statistic(attention, prepared, positions, grid, rows)
        place = to_device(rows, logsumexp.device)
        logsumexp[:, :, place], remainder[:, :, place] = exact
    return logsumexp, remainder


def recomputed_statistic(
    attention: Attention, prepared: Prepared, positions: Positions, grid: Grid, rows: Tensor
) -> RowStatistic:
    """The statistic of the rows at these ascending indices (on the host), from all scores of keys they may attend to.

    There is at least one row, and each of them may attend to a key.
    """
    first, last = int(rows[0]) + positions.start, int(rows[-1]) + positions.start
    mask, keys = attention.mask, Spans.of((0, grid.key.numel()))
    if mask is not None:
        keys = positions.columns(mask.any_allowed(first, last + 1))
    row_slice = as_slice(rows)
    i = to_device(rows, grid.device) if row_slice is None else row_slice
    columns = keys.tensor(grid.device)
    s = scores(attention, prepared.tile(i, columns), grid.tile(i, keys))
    return attention.normalizer.row_statistic(s, columns)


class StatisticBuffer:
    """The row statistics of all blocks in tensors of all rows, (`num_entries`, H, `num_rows`, ...).

    The tensors are allocated at the first block. Small tensors that outlive a block would fill the gaps of its
    large tensors, and the heap would grow with every block.
    """

    def __init__(self, num_entries: int, num_rows: int) -> None:
        self.num_entries, self.num_rows, self._written = num_entries, num_rows, 0
        self._tensors: list[Tensor] = []

    @property
    def is_complete(self) -> bool:
        """Whether every row of every batch entry was written."""
        return self._written == self.num_entries * self.num_rows

    def write(self, rows: slice, row_statistic: RowStatistic, entries: slice = slice(None)) -> None:
        """Write the statistic of these rows and batch entries."""
        self._written += (rows.stop - rows.start) * len(range(self.num_entries)[entries])
        if not self._tensors:
            self._tensors = [self._unfilled(t, t.shape[3:]) for t in row_statistic]
        for number, part in enumerate(row_statistic):
            total = self._tensors[number]
            if part.ndim == 4 and part.shape[3] > total.shape[3]:  # kept keys, of a block with more keys than before
                wider = self._unfilled(part, part.shape[3:])
                wider[..., : total.shape[3]] = total
                self._tensors[number] = total = wider
            place = total[entries, :, rows] if part.ndim == 3 else total[entries, :, rows, : part.shape[3]]
            place.copy_(part)

    def _unfilled(self, like: Tensor, width: tuple[int, ...]) -> Tensor:
        """A tensor of all rows, filled with -1, which is no index: blocks with few keys write fewer kept keys."""
        return like.new_full((self.num_entries, like.shape[1], self.num_rows, *width), -1)

    def tensors(self) -> RowStatistic:
        """The statistic of all rows."""
        return tuple(self._tensors)
