"""Some queries against some keys: what one rank computes at one step, and how such parts add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.attention import Attention, Prepared, scores
from regard.engine.blocked import Blocked, Formed
from regard.engine.blocks import Block
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
) -> list[Tensor | None]:
    """Of value, prepared tensors and parameters, as far as they are wanted, in float32 at least.

    With r the statistic of whole rows, d out_i / d s_ij = w_ij (v_j - out_i): of other keys a part needs nothing but r.
    Scores are formed, since the fused kernel knows only the statistic of the keys it is given.
    """
    like = (chunk.value, *chunk.prepared.tensors(), *parameters)
    totals = [zeros_like(t) if want else None for t, want in zip(like, wanted, strict=True)]
    on_rows = [False, *chunk.prepared.on_rows()]
    for block in Formed(chunk).blocks:
        columns = block.index(chunk.value.device)
        places = [block.rows if is_row else columns for is_row in on_rows]
        found = _of_block(chunk, whole, block, output_grads.rows(block.rows, block.entries), wanted, parameters)
        for total, new, place in zip(totals, found, places, strict=False):
            if total is not None and new is not None:
                add_at(total[block.entries], new, place)
        for total, new in zip(totals[len(on_rows) :], found[len(on_rows) :], strict=True):
            if total is not None and new is not None:
                total += new
    return totals


def _of_block(
    chunk: KVChunk,
    whole: Normalizer,
    block: Block,
    output_grads: OutputGrads,
    wanted: Sequence[bool],
    parameters: Sequence[Tensor],
) -> list[Tensor | None]:
    columns = block.index(chunk.value.device)
    index = block.columns.tensor(chunk.value.device)
    grid = chunk.grid.tile(block.rows, block.columns).entries(block.entries)
    with torch.enable_grad():
        tile = chunk.prepared.tile(block.rows, columns).entries(block.entries)
        leaves = [t.detach() for t in (chunk.value[block.entries, :, columns], *tile.tensors())]
        for leaf, want in zip(leaves, wanted, strict=False):
            leaf.requires_grad_(want)
        s = scores(chunk.attention, tile.with_tensors(leaves[1:]), grid, masked=not block.full)
        weights = whole.weights(s, output_grads.row_statistic, index)
        output = grouped_values(weights, at_least_float32(leaves[0]).to(weights.dtype))
        ends = {output: output_grads.grad.to(output.dtype), weights.sum(-1): -output_grads.along.to(output.dtype)}
        ends = {end: start for end, start in ends.items() if end.requires_grad}
        inputs = [t for t, want in zip((*leaves, *parameters), wanted, strict=True) if want]
        # keep the graph: a piece may reuse what it computed for an earlier block
        found = iter(torch.autograd.grad(list(ends), inputs, list(ends.values()), retain_graph=True, allow_unused=True))
    return [next(found) if want else None for want in wanted]


def zeros_like(tensor: Tensor) -> Tensor:
    """Zeros to add gradients to: in half precision the sum over many blocks would stop growing."""
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


def add_at(total: Tensor, new: Tensor, place: slice | Tensor) -> None:
    """Add on axis 2."""
    if isinstance(place, slice):
        total[:, :, place] += new
    else:
        total.index_add_(2, place, new.to(total.dtype))
