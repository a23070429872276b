"""Chunks: some queries with some keys, computed by one rank at one step; and how rows of chunks are merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.attention import Attention, Prepared, scores
from regard.engine.blocked import Blocked, UnfusedWork
from regard.engine.blocks import Block
from regard.engine.gradients import Gradients, GradientSums, block_gradients
from regard.engine.problem import Problem
from regard.engine.rows import with_remainder
from regard.pieces.contents import take_apart
from regard.pieces.normalizer import Normalizer, RowStatistic, Softmax, SumNormalizer, add_log_sums, has_logsumexp
from regard.positions import Positions
from regard.shapes import Sizes, at_least_float32, grouped_values
from regard.spans import Spans

#: Output and row statistic of some queries.
Rows = tuple[Tensor, RowStatistic]


def refusal(attention: Attention) -> str | None:
    """Why rows of chunks cannot be merged; None if they can."""
    normalizer = attention.normalizer
    if has_logsumexp(normalizer) or isinstance(normalizer, SumNormalizer):
        return None
    return (
        f"the weights of {normalizer!r} need all scores of a row at once (for a threshold, or for the keys that are "
        "kept), and the row statistics of parts do not give that of the whole row, as they do for softmax"
    )


def chunk_attention(whole: Attention) -> Attention:
    """The pieces of a chunk, without position encoding and sink.

    Prepared keys contain their positions. A sink belongs to the whole row, and is added after the last merge.
    """
    normalizer = whole.normalizer
    sinkless = Softmax(normalizer.temperature) if has_logsumexp(normalizer) else normalizer
    return Attention(whole.score, bias=whole.bias, mask=whole.mask, normalizer=sinkless)


class KVChunk(Problem):
    """A problem of some queries and keys, prepared by the ranks that hold them."""

    @staticmethod
    def of(attention: Attention, prepared: Prepared, value: Tensor, queries: Spans, keys: Spans) -> KVChunk:
        """Prepared queries at consecutive positions, and prepared keys with values at any positions."""
        (B, H, I, D), (_, G, J, E) = prepared.query.shape, value.shape
        positions = Positions(queries.intervals[0][0], keys)
        piece_tensors, skeleton = take_apart(attention)
        sizes = Sizes(B, H, G, I, J, D, E)
        facts: dict[str, Any] = {"piece_tensors": piece_tensors, "skeleton": skeleton, "hides_gradients": False}
        return KVChunk.from_prepared(
            attention=attention, prepared=prepared, value=value, positions=positions, sizes=sizes, **facts
        )

    def attend(self) -> Rows:
        """The output over these keys alone, in float32 at least, and its row statistic."""
        result = Blocked().run(self)
        assert result.row_statistic is not None
        row_statistic = with_remainder(self.attention, self.prepared, self.positions, self.grid, result.row_statistic)
        return at_least_float32(result.output), row_statistic


def merge(normalizer: Normalizer, rows: Rows, new_rows: Rows) -> None:
    """Merge the same rows over other keys into `rows`, in place: the mean of both outputs, weighted by row sums."""
    (output, statistic), (new_output, new_statistic) = rows, new_rows
    if has_logsumexp(normalizer):
        merged = add_log_sums(statistic, new_statistic)
        factors = share(statistic, merged), share(new_statistic, merged)
    else:
        merged = (statistic[0] + new_statistic[0],)
        row_sum = merged[0].masked_fill(merged[0] == 0, 1.0)
        factors = statistic[0] / row_sum, new_statistic[0] / row_sum
    output.mul_(factors[0][..., None]).addcmul_(new_output, factors[1][..., None])
    for number, merged_number in zip(statistic, merged, strict=True):
        number.copy_(merged_number)


def share(chunk: RowStatistic, whole: RowStatistic) -> Tensor:
    """The share of a chunk in the sum of each row, from the log-sum-exps and remainders of both; 0 in empty rows."""
    finite = whole[0].masked_fill(whole[0].isneginf(), 0.0)
    return torch.exp(chunk[0] - finite + (chunk[1] - whole[1]))


def finished(normalizer: Normalizer, rows: Rows) -> Rows:
    """The rows after the last merge: the sink takes its share."""
    output, row_statistic = rows
    if not has_logsumexp(normalizer):
        return rows
    with_sink = normalizer.with_sink(row_statistic)
    if normalizer.row_sum is None:
        output = output * share(row_statistic, with_sink)[..., None]
    return output, with_sink


@dataclass(frozen=True, eq=False)
class OutputGrads:
    """Of finished rows: `grad` of the output, `dot` = rowsum(grad * output), and the row statistic."""

    grad: Tensor
    dot: Tensor
    row_statistic: RowStatistic

    @staticmethod
    def of(output: Tensor, grad: Tensor, row_statistic: RowStatistic) -> OutputGrads:
        grad = at_least_float32(grad)
        return OutputGrads(grad, (grad * output).sum(-1), row_statistic)

    def rows(self, rows: slice, entries: slice = slice(None)) -> OutputGrads:
        """Those of some rows and batch entries."""
        grad, dot, *row_statistic = (t[entries, :, rows] for t in (self.grad, self.dot, *self.row_statistic))
        return OutputGrads(grad, dot, tuple(row_statistic))


def gradients(
    chunk: KVChunk, whole: Normalizer, output_grads: OutputGrads, wanted: Sequence[bool], parameters: Sequence[Tensor]
) -> Gradients:
    """Gradients of value, prepared tensors and parameters, if they are wanted, in float32 at least.

    With r the statistic of whole rows, d out_i / d s_ij = w_ij (v_j - out_i). So of other chunks it needs only r.
    Blocks compute their scores, since the fused kernel cannot be given the statistic of whole rows.
    """
    inputs, on_rows = (chunk.value, *chunk.prepared.tensors(), *parameters), [False, *chunk.prepared.on_rows()]
    sums = GradientSums.zeros(inputs, wanted, on_rows)
    for block in UnfusedWork(chunk).blocks:
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
    return [(output, output_grads.grad.to(output.dtype)), (weights.sum(-1), -output_grads.dot.to(output.dtype))]
