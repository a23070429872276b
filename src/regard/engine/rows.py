"""From scores to output for some rows of queries: what `dense` does once and `blocked` block by block."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.attention import Attention, Prepared, scores
from regard.pieces.dropout import kept
from regard.pieces.grid import Grid
from regard.pieces.normalizer import RowStatistic, has_logsumexp, is_coarse
from regard.positions import Positions
from regard.shapes import as_slice, at_least_float32, grouped_values, has_numbers, to_device, without_autocast
from regard.spans import Spans

#: Bytes of scores that rows may hold while their statistic is computed again.
REFINED_BYTES = 48 << 20


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
    """Whole rows: every key they may attend to is in `tile`, at key indices `columns`."""
    s = scores(attention, tile, grid, masked)
    weights, row_statistic = attention.normalizer.normalize_rows(s, columns)
    if dropout:
        weights = weights * kept(grid, dropout, seed) / (1 - dropout)
    with without_autocast(value.device):  # it would round the weights
        output = grouped_values(weights, at_least_float32(value).to(weights.dtype)).to(value.dtype)
    return output, tuple(t.detach() for t in row_statistic)


@torch.no_grad()
def in_full(
    attention: Attention, prepared: Prepared, positions: Positions, grid: Grid, row_statistic: RowStatistic
) -> RowStatistic:
    """The statistic with its remainder, where a kernel told the log-sum-exp alone.

    The scores of a row are computed again only if its log-sum-exp is too large to be precise.
    """
    if len(row_statistic) != 1 or not has_logsumexp(attention.normalizer):
        return row_statistic
    total, remainder = row_statistic[0], torch.zeros_like(row_statistic[0])
    coarse = is_coarse(total).flatten(0, 1).any(0)
    if not has_numbers(coarse) or not len(rows := coarse.nonzero().flatten().cpu()):
        return total, remainder
    total, (B, H, _) = total.clone(), total.shape
    row_bytes = B * H * grid.key.numel() * prepared.query.element_size() * (2 * attention.score.floats_per_score + 4)
    for some in rows.split(max(1, REFINED_BYTES // row_bytes)):
        place = to_device(some, total.device)
        total[:, :, place], remainder[:, :, place] = _log_total(attention, prepared, positions, grid, some)
    return total, remainder


def _log_total(
    attention: Attention, prepared: Prepared, positions: Positions, grid: Grid, rows: Tensor
) -> RowStatistic:
    """The statistic of some rows, by indices on the host, from the scores of all keys they may attend to."""
    first, last = int(rows[0]) + positions.start, int(rows[-1]) + positions.start
    mask, keys = attention.mask, Spans.of((0, grid.key.numel()))
    if mask is not None:
        keys = positions.columns(mask.any_allowed(first, last + 1))
    i = at if (at := as_slice(rows)) is not None else to_device(rows, grid.device)
    columns = keys.tensor(grid.device)
    s = scores(attention, prepared.tile(i, columns), grid.tile(i, keys))
    return attention.normalizer.row_statistic(s, columns)


class Collected:
    """Row statistics of all blocks, each written where it belongs.

    Kept as one tensor from the start: small tensors that outlive a block would settle in the
    holes its large ones leave, and the heap would grow with every block.
    """

    def __init__(self, num_entries: int, num_rows: int) -> None:
        self.num_entries, self.num_rows, self._written = num_entries, num_rows, 0
        self._tensors: list[Tensor] = []

    @property
    def is_complete(self) -> bool:
        """Whether every row of every batch entry was written."""
        return self._written == self.num_entries * self.num_rows

    def write(self, rows: slice, row_statistic: RowStatistic, entries: slice = slice(None)) -> None:
        """The statistic of some rows of some batch entries."""
        self._written += (rows.stop - rows.start) * len(range(self.num_entries)[entries])
        if not self._tensors:
            self._tensors = [self._unfilled(t, t.shape[3:]) for t in row_statistic]
        for number, part in enumerate(row_statistic):
            mine = self._tensors[number]
            if part.ndim == 4 and part.shape[3] > mine.shape[3]:
                wider = self._unfilled(part, part.shape[3:])
                wider[..., : mine.shape[3]] = mine
                self._tensors[number] = mine = wider
            place = mine[entries, :, rows] if part.ndim == 3 else mine[entries, :, rows, : part.shape[3]]
            place.copy_(part)

    def _unfilled(self, like: Tensor, width: tuple[int, ...]) -> Tensor:
        """-1 where a narrower block keeps fewer indices."""
        return like.new_full((self.num_entries, like.shape[1], self.num_rows, *width), -1)

    def tensors(self) -> RowStatistic:
        return tuple(self._tensors)
