"""Some queries against some keys: what one rank computes at one step, and how such parts add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.attention import Attention, Prepared, scores
from regard.engine.blocked import Blocked, Formed
from regard.engine.blocks import Block
from regard.engine.gradients import Gradients, GradientSums, block_gradients
from regard.engine.problem import Problem
from regard.engine.rows import in_full
from regard.pieces.contents import take_apart
from regard.pieces.normalizer import Normalizer, RowStatistic, Softmax, SumNormalizer, add_log_sums, has_logsumexp
from regard.positions import Positions
from regard.shapes import Sizes, at_least_float32, grouped_values
from regard.spans import Spans

#: Some queries' outputs and the statistic of their rows.
Rows = tuple[Tensor, RowStatistic]


def refusal(attention: Attention) -> str | None:
    """Why parts of rows cannot be merged, or None: they can."""
    normalizer = attention.normalizer
    if has_logsumexp(normalizer) or isinstance(normalizer, SumNormalizer):
        return None
    return (
        f"the weights of {normalizer!r} take all scores of a row at once (a threshold, or which keys are kept), and no "
        "number of each part tells those of the whole, as the log-sum-exp does for softmax"
    )


def without_sink(normalizer: Normalizer) -> Normalizer:
    """The normaliser of a part: a sink belongs to the whole row, and is added when the parts are one."""
    return Softmax(normalizer.temperature) if has_logsumexp(normalizer) else normalizer


class KVChunk(Problem):
    """A problem whose queries and keys were prepared by the ranks that hold them."""

    @staticmethod
    def of(attention: Attention, prepared: Prepared, value: Tensor, queries: Spans, keys: Spans) -> KVChunk:
        """Prepared queries that stand at one stretch, and keys with their values anywhere."""
        (B, H, I, D), (_, G, J, E) = prepared.query.shape, value.shape
        positions = Positions(queries.intervals[0][0], keys)
        piece_tensors, skeleton = take_apart(attention)
        sizes = Sizes(B, H, G, I, J, D, E)
        facts: dict[str, Any] = {"piece_tensors": piece_tensors, "skeleton": skeleton, "hides_gradients": False}
        return KVChunk.from_prepared(
            attention=attention, prepared=prepared, value=value, positions=positions, sizes=sizes, **facts
        )

    def attend(self) -> Rows:
        """The output over these keys alone, in float32 at least, and the statistic of its rows."""
        result = Blocked().run(self)
        assert result.row_statistic is not None
        row_statistic = in_full(self.attention, self.prepared, self.positions, self.grid, result.row_statistic)
        return at_least_float32(result.output), row_statistic


def merge(normalizer: Normalizer, rows: Rows, others: Rows) -> None:
    """Take other keys into the rows, in place: averages, weighted by how much each has summed up."""
    (output, total), (added, more) = rows, others
    if has_logsumexp(normalizer):
        both = add_log_sums(total, more)
        factors = share(total, both), share(more, both)
    else:
        both = (total[0] + more[0],)
        whole = both[0].masked_fill(both[0] == 0, 1.0)
        factors = total[0] / whole, more[0] / whole
    output.mul_(factors[0][..., None]).addcmul_(added, factors[1][..., None])
    for mine, new in zip(total, both, strict=True):
        mine.copy_(new)


def share(chunk: RowStatistic, whole: RowStatistic) -> Tensor:
    """How much of the sum of a row a part of its keys has, from the logs of both in two numbers; 0 in empty rows."""
    finite = whole[0].masked_fill(whole[0].isneginf(), 0.0)
    return torch.exp(chunk[0] - finite + (chunk[1] - whole[1]))


def finished(normalizer: Normalizer, rows: Rows) -> Rows:
    """The rows once no more keys come: the sink takes its share."""
    output, total = rows
    if not has_logsumexp(normalizer):
        return rows
    with_sink = normalizer.with_sink(total)
    if normalizer.row_sum is None:
        output = output * share(total, with_sink)[..., None]
    return output, with_sink


@dataclass(frozen=True, eq=False)
class OutputGrads:
    """Of finished rows: the gradient of the output, and how far it lies along the output, row by row."""

    grad: Tensor
    along: Tensor
    row_statistic: RowStatistic

    @staticmethod
    def of(output: Tensor, grad: Tensor, row_statistic: RowStatistic) -> OutputGrads:
        grad = at_least_float32(grad)
        return OutputGrads(grad, (grad * output).sum(-1), row_statistic)

    def rows(self, rows: slice, entries: slice = slice(None)) -> OutputGrads:
        found = (t[entries, :, rows] for t in (self.grad, self.along, *self.row_statistic))
        return OutputGrads(next(found), next(found), tuple(found))


def gradients(
    chunk: KVChunk, whole: Normalizer, output_grads: OutputGrads, wanted: Sequence[bool], parameters: Sequence[Tensor]
) -> Gradients:
    """Of value, prepared tensors and parameters, as far as they are wanted, in float32 at least.

    With r the statistic of whole rows, d out_i / d s_ij = w_ij (v_j - out_i): of other keys a part needs nothing but r.
    Scores are formed, since the fused kernel knows only the statistic of the keys it is given.
    """
    inputs, on_rows = (chunk.value, *chunk.prepared.tensors(), *parameters), [False, *chunk.prepared.on_rows()]
    sums = GradientSums.zeros(inputs, wanted, on_rows)
    for block in Formed(chunk).blocks:
        forward = partial(_weighted_sums, chunk, whole, block, output_grads.rows(block.rows, block.entries))
        grads = block_gradients(chunk, block, parameters, wanted, forward)
        sums.add(grads, block.rows, block.index(chunk.value.device), block.entries)
    return sums.sums


def _weighted_sums(
    chunk: KVChunk, whole: Normalizer, block: Block, output_grads: OutputGrads, tile: Prepared, value: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Weights times values of a block, and the sum of its weights, each with the gradient of the loss."""
    columns = block.columns.tensor(value.device)
    grid = chunk.grid.tile(block.rows, block.columns).entries(block.entries)
    s = scores(chunk.attention, tile, grid, masked=not block.full)
    weights = whole.weights(s, output_grads.row_statistic, columns)
    output = grouped_values(weights, at_least_float32(value).to(weights.dtype))
    return [(output, output_grads.grad.to(output.dtype)), (weights.sum(-1), -output_grads.along.to(output.dtype))]
